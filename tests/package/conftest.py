"""Builds the package once from a copy of the checkout, with strays laid beside it."""

import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

LEFT_OUT = shutil.ignore_patterns(
    ".*", "build", "dist", "*.egg-info", "__pycache__", "data", "benchmarks", "*.w4pack-staging"
)
# What must not be packed: a tool's file at the root, a folder with a similar name, a loose table; modules
# that an earlier build has left, and one that was interrupted.
STRAYS = (
    *("noxfile.py", "conftest.py", "converted/model.py", "kernels_old/x.py", "stray.json"),
    "build/lib/w4pack/convert/deleted.py",
    "build/lib/w4pack/deleted/__init__.py",
    f"build/bdist.{sysconfig.get_platform()}/wheel/w4pack/deleted.py",
)


@dataclass(frozen=True, slots=True)
class Built:
    """A copy of the checkout and what was built from it."""

    checkout: Path
    wheel: Path
    sdist: Path


Command = Callable[..., str]


@pytest.fixture(scope="session")
def command(outer_environ: Mapping[str, str]) -> Command:
    """Run a program with the user's own environment (pip's configuration and cache); return its stdout."""
    kept = {name: value for name, value in outer_environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}

    def run(*args: str | Path, cwd: Path, codes: tuple[int, ...] = (0,)) -> str:
        done = subprocess.run(
            [*map(str, args)], cwd=cwd, env=kept, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode in codes, f"{args}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return run


@pytest.fixture(scope="session")
def built(repo: Path, command: Command, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Wheel straight from the tree, and sdist, both without build isolation: no network."""
    base = tmp_path_factory.mktemp("package")
    checkout = base / "checkout"
    shutil.copytree(repo, checkout, ignore=LEFT_OUT)
    for stray in STRAYS:
        (checkout / stray).parent.mkdir(parents=True, exist_ok=True)
        (checkout / stray).write_text("raise SystemExit('a stray was packed')\n", encoding="utf-8")
    build = (sys.executable, "-m", "build", "--no-isolation", "--outdir")
    command(*build, base / "wheel", "--wheel", checkout, cwd=base)
    command(*build, base / "sdist", "--sdist", checkout, cwd=base)
    (wheel,) = (base / "wheel").glob("*.whl")
    (sdist,) = (base / "sdist").glob("*.tar.gz")
    return Built(checkout, wheel, sdist)


def wheel_files(wheel: Path) -> set[str]:
    """Names of the files in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def sdist_files(sdist: Path) -> set[str]:
    """Names of the files in an sdist, without its top folder."""
    with tarfile.open(sdist) as archive:
        return {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
