"""`--resume` behind a source or an OUT that is no longer what it was."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantize.test_outputs import _stopped, tree
from runner import Run, run
from w4pack.convert.files.local import LocalStore
from w4pack.convert.jobs import identity

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # fork, beside idle threads
RTN = ("--quantize", "rtn", "--group-size", 32)


def words(source: Path, out: Path) -> tuple[Any, ...]:
    return ("convert", source, out, *RTN, "--threads", 1)


def resumed(source: Path, out: Path, *options: Any) -> Run:
    return run(*words(source, out), "--json", "--resume", *options)


@pytest.fixture
def source(llama: Path, tmp_path: Path) -> Path:
    """A source that a test may change."""
    return Path(shutil.copytree(llama, tmp_path / "src"))


@pytest.fixture(scope="module")
def made(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("resumed") / "out"
    run(*words(llama, out)).expect(0)
    return out


@pytest.fixture
def out(made: Path, tmp_path: Path) -> Path:
    """A complete OUT that a test may change."""
    return Path(shutil.copytree(made, tmp_path / "out"))


def settings(source: Path, **changed: Any) -> None:
    path = source / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def step_with_work(source: Path, out: Path) -> int:
    """Stop a run where something is finished; return the step."""
    for step in range(20, 200, 4):
        shutil.rmtree(f"{out}.w4pack-staging", ignore_errors=True)
        assert not _stopped(step, *words(source, out)), "no stop behind a journaled operation"
        log = Path(f"{out}.w4pack-staging/journal.jsonl")
        if log.is_file() and log.read_bytes().count(b"\n") > 3:
            return step
    raise AssertionError("no stop behind a journaled operation")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_an_interrupted_run_does_not_go_on_with_other_settings(
    name: str, source: Path, made: Path, tmp_path: Path
) -> None:
    out, path = tmp_path / "new", source / name
    step_with_work(source, out)
    before = path.read_bytes()
    settings(source, rms_norm_eps=1e-3) if name == "config.json" else path.write_bytes(before + b"\n")
    error = resumed(source, out).expect(3).error
    assert (error["code"], error["where"]) == ("resume-differs", name)
    path.write_bytes(before)
    resumed(source, out).expect(0)
    assert tree(out) == tree(made)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_complete_out_of_other_settings_is_refused(name: str, source: Path, out: Path) -> None:
    if name == "config.json":
        settings(source, rope_theta=50.0)
    else:
        (source / name).write_bytes((source / name).read_bytes() + b"\n")
    for more in ((), ("--dry-run",)):
        error = resumed(source, out, *more).expect(3).error
        assert (error["what"], error["where"]) == ("the source changed after OUT was made", name)


def test_a_complete_out_as_it_was_made_is_left(source: Path, out: Path) -> None:
    before = tree(out)
    events = resumed(source, out).expect(0).events
    assert any("resumed_complete" in json.dumps(event) for event in events)
    assert tree(out) == before


@pytest.mark.parametrize(
    "damage",
    [flip, lambda path: path.write_bytes(path.read_bytes()[:-64]), Path.unlink],
    ids=["a byte", "cut", "gone"],
)
def test_a_damaged_complete_out_is_told(damage: Callable[[Path], object], llama: Path, out: Path) -> None:
    damage(out / "model.safetensors")
    assert resumed(llama, out).expect(4).error["code"] == "damaged"


def other_values(source: Path, every: int) -> None:
    """Change a byte of every so many behind the header, as another training of the model would change all."""
    path = source / "model.safetensors"
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    for at in range(start, len(data), every):
        data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("complete", [False, True], ids=["interrupted", "complete"])
def test_another_model_of_the_same_shapes_is_refused(
    complete: bool, source: Path, made: Path, out: Path, tmp_path: Path
) -> None:
    if not complete:
        out = tmp_path / "new"
        step_with_work(source, out)
    before = (source / "model.safetensors").read_bytes()
    other_values(source, 4096)
    error = resumed(source, out).expect(3).error
    assert (error["code"], error["where"]) == ("resume-differs", "model.safetensors")
    assert "values with the digest " in error["expected"] and error["expected"] != error["found"]
    (source / "model.safetensors").write_bytes(before)
    resumed(source, out).expect(0)
    assert tree(out) == tree(made)


def pages(data: bytes, start: int) -> list[bytes]:
    """The pages as the reference says where they lie, by fractions."""
    last = len(data) - 4096
    places = [start + int(Fraction(i, 63) * (last - start)) for i in range(64)]
    return [data[at : at + 4096] for at in places]


@pytest.mark.parametrize("size", [0, 1, 64 * 4096, 64 * 4096 + 1, 5_000_011])
def test_a_sample_is_of_the_pages_that_the_reference_names(size: int, tmp_path: Path) -> None:
    data = np.random.default_rng(size).bytes(1000 + size)
    (tmp_path / "weights").write_bytes(data)
    whole = data[1000:] if size <= 64 * 4096 else b"".join(pages(data, 1000))
    blob = LocalStore(tmp_path).blob("weights")
    assert identity.sample_digest(blob, 1000) == hashlib.sha256(whole).hexdigest()


def test_other_weights_under_the_same_header_are_told_where_both_runs_were_strict(
    source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "new"
    run(*words(source, out), "--strict").expect(0)
    resumed(source, out, "--strict").expect(0)
    flip(source / "model.safetensors")
    error = resumed(source, out, "--strict").expect(3).error
    assert (error["code"], error["where"]) == ("resume-differs", "model.safetensors")


def test_what_a_crash_behind_the_rename_left_is_removed(source: Path, out: Path, tmp_path: Path) -> None:
    """`--overwrite`, ended at its last steps: OUT is new, and the old one may still lie beside it."""
    before, seen = tree(out), set()
    for step in range(40, 200):
        over = _stopped(step, *words(source, out), "--overwrite")
        left = {p.name for p in tmp_path.glob("out.w4pack*")}
        if not over and out.exists() and not (tmp_path / "out.w4pack-staging/out").exists():
            seen |= left
            resumed(source, out).expect(0)
            assert not list(tmp_path.glob("out.w4pack*")) and tree(out) == before, step
        if over:
            break
    assert seen == {"out.w4pack-staging", "out.w4pack-old"}


# ---- lines of the journal ---------------------------------------------------------------------------------


def bent(line: str, **changed: Any) -> str:
    return json.dumps({**json.loads(line), **changed}, separators=(",", ":"))


BENT: dict[str, Callable[[str], str]] = {
    "hashes null": lambda line: bent(line, hashes=None),
    "hashes list": lambda line: bent(line, hashes=list(json.loads(line)["hashes"])),
    "report null": lambda line: bent(line, report=None),
    "report of text": lambda line: bent(line, report={"error": "x"}),
    "op bool": lambda line: bent(line, op=True),
    "another number": lambda line: bent(line, report={"error": 0.5}),
    "no object": lambda line: "[5]",
    "deep": lambda line: "[" * 100_000,
    "not text": lambda line: "\0" * 300,
}


@pytest.fixture(scope="module")
def stopped(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run leaves that died behind its last layer."""
    out = tmp_path_factory.mktemp("stopped") / "out"
    step_with_work(llama, out)
    return Path(f"{out}.w4pack-staging")


@pytest.fixture
def log(stopped: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stopped, tmp_path / "new.w4pack-staging")) / "journal.jsonl"


@pytest.mark.parametrize("change", BENT.values(), ids=BENT)
def test_a_line_that_is_not_as_it_was_written_is_lost_work(
    change: Callable[[str], str], log: Path, llama: Path, made: Path, tmp_path: Path
) -> None:
    lines = log.read_text().splitlines()
    lines[2] = change(lines[2])
    log.write_text("".join(f"{line}\n" for line in lines))
    notes = [e.get("text") for e in resumed(llama, tmp_path / "new").expect(0).events]
    assert "lines that are not as they were written: 1" in str(notes)
    assert f"resumed: {len(lines) - 2} of " in str(notes)  # neither the first line nor that one
    assert tree(tmp_path / "new") == tree(made)


@pytest.mark.parametrize("files", [None, 5, [5], [[]], [[1]], {}], ids=str)
def test_a_first_line_of_another_shape_is_another_source(
    files: Any, log: Path, llama: Path, tmp_path: Path
) -> None:
    first, _, others = log.read_text().partition("\n")
    log.write_text(f"{bent(first, files=files)}\n{others}")
    assert resumed(llama, tmp_path / "new").expect(3).error["code"] == "resume-differs"


@pytest.mark.parametrize("first", ["[]", "x", "[" * 100_000], ids=["list", "text", "deep"])
def test_a_journal_of_nobody_knows_which_job_is_refused(
    first: str, log: Path, llama: Path, tmp_path: Path
) -> None:
    log.write_text(first + "\n" + log.read_text().partition("\n")[2])
    before = log.read_bytes()
    assert resumed(llama, tmp_path / "new").expect(1, "--overwrite").error["code"] == "journal"
    assert log.read_bytes() == before


def test_the_hint_of_an_interrupted_overwrite_keeps_its_work(
    log: Path, llama: Path, out: Path, made: Path, tmp_path: Path
) -> None:
    log.parent.rename(f"{out}.w4pack-staging")
    hint = resumed(llama, out).expect(1).error["hint"]
    assert "`--resume --overwrite`" in hint and "`--overwrite` alone deletes" in hint
    assert "resumed: " in resumed(llama, out, "--overwrite").expect(0).out
    assert tree(out) == tree(made)
