"""What is in the wheel and the sdist: all of w4pack, and nothing else."""

import sys
import zipfile
from email import message_from_bytes
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from package.conftest import Built, Command

pytestmark = pytest.mark.slow

MOST_BYTES = 60_000_000
CODE_AND_DATA = {".py", ".json", ".cu", ".cuh", ".cubin", ".ptx"}


def files_of(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def expected_files(checkout: Path) -> set[str]:
    """The rule, spelled out: three root modules, the marker for type checkers, two folders."""
    wanted = {"w4pack/__init__.py", "w4pack/__main__.py", "w4pack/cli.py", "w4pack/py.typed"}
    for top in ("convert", "kernels"):
        for path in (checkout / top).rglob("*"):
            if path.is_file() and path.suffix in CODE_AND_DATA and "__pycache__" not in path.parts:
                wanted.add(f"w4pack/{path.relative_to(checkout).as_posix()}")
    return wanted


def test_the_wheel_holds_the_package_and_no_strays(built: "Built") -> None:
    packed = {name for name in files_of(built.wheel) if ".dist-info/" not in name}
    assert packed == expected_files(built.checkout)


def test_the_tag_says_whether_cubins_are_inside(built: "Built") -> None:
    cubins = [name for name in files_of(built.wheel) if name.endswith(".cubin")]
    platform = "manylinux_2_17_x86_64" if cubins else "any"
    assert built.wheel.name.endswith(f"-py3-none-{platform}.whl")


def test_a_wheel_with_kernels_holds_every_one_and_is_small(built: "Built") -> None:
    from w4pack.kernels import build, tiles

    if not (built.checkout / "kernels" / "cubins").is_dir():
        pytest.skip("needs built kernels (make kernels)")
    jobs = (job for arch in (*tiles.ARCHES, tiles.PTX_ARCH) for job in build.jobs(arch))
    assert {f"w4pack/kernels/cubins/{job.path}" for job in jobs} <= files_of(built.wheel)
    assert built.wheel.stat().st_size < MOST_BYTES


def test_the_sdist_builds_the_same_wheel(built: "Built", command: "Command", tmp_path: Path) -> None:
    build = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
    command(*build, "--wheel-dir", tmp_path, built.sdist, cwd=tmp_path)
    (again,) = tmp_path.glob("*.whl")
    assert files_of(again) == files_of(built.wheel)


def test_metadata_names_licence_version_and_a_base_without_torch(built: "Built") -> None:
    import w4pack

    with zipfile.ZipFile(built.wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = message_from_bytes(archive.read(name))
        licences = [n for n in archive.namelist() if n.endswith("licenses/LICENSE")]
    base = [r for r in metadata.get_all("Requires-Dist", []) if "extra ==" not in r]
    names = {r.replace(">", " ").split()[0].replace("-", "_") for r in base}
    assert metadata["Version"] == w4pack.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert len(licences) == 1
    assert names == {"click", "huggingface_hub", "numpy", "safetensors", "tqdm"}
    assert set(metadata.get_all("Provides-Extra", [])) >= {"quantize", "gpu", "report", "all", "dev"}
