"""`--dry-run` refuses every OUT that the run itself refuses, in the same words, and touches nothing."""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from runner import Run, run

DEMO = Path(__file__).parents[2] / "examples" / "demo-gptq"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEMO, tmp_path / "src"))


def inside(out: Path, source: Path) -> Path:
    return source / "out"


def around(out: Path, source: Path) -> Path:
    return source.parent


def the_source(out: Path, source: Path) -> Path:
    return source


def a_file(out: Path, source: Path) -> Path:
    out.write_text("mine")
    return out


def notes(out: Path, source: Path) -> Path:
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    return out


def dead_link(out: Path, source: Path) -> Path:
    out.symlink_to(out.parent / "nowhere")
    return out


def taken_staging(out: Path, source: Path) -> Path:
    staging = out.parent / "out.w4pack-staging"
    staging.mkdir()
    (staging / "thesis.tex").write_text("mine")
    return out


def set_aside(out: Path, source: Path) -> Path:
    """Leave what an overwrite that died leaves: the old OUT, to be put back."""
    run("convert", source, out, "-q").expect(0)
    out.rename(out.parent / "out.w4pack-old")
    return out


def earlier(out: Path, source: Path) -> Path:
    run("convert", source, out, "-q", "--to", "dense").expect(0)
    return out


def told(done: Run) -> tuple[object, ...]:
    return tuple(done.error[key] for key in ("code", "exit", "what", "where", "expected", "found", "hint"))


def state(folder: Path) -> dict[str, object]:
    return {
        str(p.relative_to(folder)): p.read_bytes() if p.is_file() else p.is_symlink()
        for p in sorted(folder.rglob("*"))
    }


PLACES = (inside, around, the_source, a_file, notes, dead_link, taken_staging, set_aside, earlier)
TAKEN = {  # which options let a place be used
    earlier: {("--overwrite",), ("--overwrite", "--resume")},
    set_aside: {("--overwrite",), ("--resume",), ("--overwrite", "--resume")},  # it is this very result
}


@pytest.mark.parametrize("options", [(), ("--overwrite",), ("--resume",), ("--overwrite", "--resume")])
@pytest.mark.parametrize("place", PLACES)
def test_dry_run_answers_as_the_run_does(
    place: Callable[[Path, Path], Path], options: tuple[str, ...], source: Path, tmp_path: Path
) -> None:
    out = place(tmp_path / "out", source)
    before = state(tmp_path)
    dry = run("convert", source, out, *options, "--json", "--dry-run")
    assert state(tmp_path) == before
    real = run("convert", source, out, *options, "--json")
    code = 0 if options in TAKEN.get(place, ()) else 1
    assert (dry.code, real.code) == (code, code), (dry.text[-600:], real.text[-600:])
    if code and place is not set_aside:  # the run puts the old OUT back first, and names its real place
        assert told(dry) == told(real)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    folder.mkdir()
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(held, fcntl.LOCK_EX)
    yield
    os.close(held)


def test_another_process_at_work(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with locked(tmp_path / "out.w4pack-staging"):
        dry = run("convert", source, out, "--json", "--dry-run").expect(1)
        assert told(dry) == told(run("convert", source, out, "--json").expect(1))
        assert dry.error["code"] == "locked"


def test_a_finished_output_is_no_obstacle_to_its_resumption(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run("convert", source, out, "-q").expect(0)
    run("convert", source, out, "--resume", "--dry-run").expect(0)
    run("convert", source, out, "--resume").expect(0, "already the complete result")
