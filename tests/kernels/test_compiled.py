"""What a build of the kernels left: every file a launch can name, no spills, nothing stale.

``make test`` builds them first (once per checkout; no GPU is needed).
"""

import hashlib
from typing import Any

import pytest

from w4pack.kernels import build, tiles

MOST_BYTES = 90_000_000  # installed; a wheel, 60 MB at most, holds them compressed (tests/package)


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    found = {str(row["path"]): row for row in build.read_manifest()}
    if not found:
        pytest.skip("needs built kernels (make kernels)")
    return found


@pytest.mark.parametrize("arch", [*tiles.ARCHES, tiles.PTX_ARCH])
def test_every_file_is_there_and_made_of_these_sources(arch: str, rows: dict[str, dict[str, Any]]) -> None:
    wanted = {job.path: job for job in build.jobs(arch)}
    assert wanted.keys() <= rows.keys()
    stale = [path for path, job in wanted.items() if rows[path]["key"] != build.key_of(job)]
    assert not stale, "made of other sources: make kernels"
    for path in wanted:
        code = (build.CUBINS / path).read_bytes()
        assert hashlib.sha256(code).hexdigest() == rows[path]["sha256"], path


def test_no_hot_kernel_spills(rows: dict[str, dict[str, Any]]) -> None:
    hot = [job.path for arch in tiles.ARCHES for job in build.jobs(arch) if job.hot]
    assert [path for path in hot if rows[path]["spills"]] == []


def test_nothing_else_is_shipped_and_it_is_small(rows: dict[str, dict[str, Any]]) -> None:
    wanted = {job.path for arch in (*tiles.ARCHES, tiles.PTX_ARCH) for job in build.jobs(arch)}
    there = {path.name for path in build.CUBINS.iterdir() if path.suffix in (".cubin", ".ptx")}
    assert there == wanted == set(rows)
    assert sum(int(row["bytes"]) for row in rows.values()) < MOST_BYTES
