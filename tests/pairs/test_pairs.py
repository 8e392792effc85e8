"""The tests that depend on transformers and huggingface_hub, run again with the lowest and the newest pair.

`make test` and `make test-matrix` build the two environments: the ones of the suite with these two packages
replaced. A pair runs in a pytest of its own, whose counts are in the captured output and checked here.
"""

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

VERSIONS = "from importlib.metadata import version as v; print(v('transformers'), v('huggingface_hub'))"


def python_of(pair: str, repo: Path) -> Path:
    python = repo / f".venv-{pair}" / "bin" / "python"
    if not python.exists():
        pytest.skip("needs the environments of `make test-matrix`")
    return python


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version)[:2])


def run(python: Path, *args: str, cwd: Path, environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in environ.items() if not name.startswith(("PYTEST_", "VIRTUAL_ENV"))}
    return subprocess.run(
        [str(python), *args], cwd=cwd, env=kept, capture_output=True, text=True, timeout=900, check=False
    )


def test_the_pairs_are_the_lowest_and_the_newest(repo: Path, outer_environ: Mapping[str, str]) -> None:
    def pair(name: str) -> list[tuple[int, ...]]:
        said = run(python_of(name, repo), "-c", VERSIONS, cwd=repo, environ=outer_environ).stdout
        return [numbers(version) for version in said.split()]

    low, high = pair("low"), pair("high")
    assert low == [(5, 16), (1, 5)]
    assert high[0] >= (5, 24)
    assert high[1] >= (2, 4)


@pytest.mark.parametrize("pair", ["low", "high"])
def test_the_suite_of_the_pair_passes(
    pair: str, repo: Path, outer_environ: Mapping[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest_args = (
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "hub or pair",
        "--ignore=tests/pairs",
    )
    done = run(python_of(pair, repo), *pytest_args, cwd=repo, environ=outer_environ)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    counts = re.search(r"(\d+) passed", done.stdout)
    with capsys.disabled():
        print(f"\npair {pair}: {done.stdout.strip().splitlines()[-1]}")
    assert counts is not None
    assert int(counts[1]) > 1
