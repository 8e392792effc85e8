"""Reading ahead and writing behind: what jobs on a card do in threads, on the CPU here: same bytes."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quantize import sources
from quantize.test_outputs import FEW, quantize, stop_anywhere, tree
from runner import run
from w4pack.convert.errors import SourceError
from w4pack.convert.files.provider import CheckpointProvider
from w4pack.convert.files.readahead import ReadAhead
from w4pack.convert.files.tensorfile import TensorInfo
from w4pack.convert.modeljobs import layerfiles, overlap, quantizerun
from w4pack.convert.modeljobs.overlap import Behind


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bfloat16 Llama of four layers: the third and the fourth are read ahead. A shard for each."""
    folder = tmp_path_factory.mktemp("overlap") / "deep"
    model = sources.llama(num_hidden_layers=4)
    sources.save(model, folder, torch.bfloat16)
    return folder


@pytest.fixture
def overlapped(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Threads on the CPU too; none of them may be left."""
    monkeypatch.setattr(overlap, "OVERLAPPED", ("cpu", "cuda"))
    yield
    assert [t.name for t in threading.enumerate() if t.name.startswith("w4pack")] == []


Reads = Counter[tuple[str, str]]  # (thread, tensor)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    """Who has read what."""
    found: Reads = Counter()
    original = CheckpointProvider._read

    def counting(self: CheckpointProvider, info: TensorInfo, *rest: Any) -> torch.Tensor:
        found[threading.current_thread().name.partition("_")[0], info.name] += 1
        return original(self, info, *rest)

    monkeypatch.setattr(CheckpointProvider, "_read", counting)
    return found


OUTPUTS = [("--quantize", "gptq"), ("--quantize", "gptq", "--rotate", "offline"), ("--quantize", "rtn")]


@pytest.mark.parametrize("options", OUTPUTS, ids=["gptq", "rotated", "rtn"])
def test_the_files_are_those_of_a_run_without_threads(
    options: tuple[str, ...],
    deep: Path,
    book: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reads: Reads,
) -> None:
    given = () if "rtn" in options else ("--calibration", book, *FEW)
    words = ("--json", *options, "--group-size", 32, *given)
    alone = run("convert", deep, tmp_path / "alone", *words).expect(0)
    assert {thread for thread, _ in reads} == {"MainThread"}
    reads.clear()
    monkeypatch.setattr(overlap, "OVERLAPPED", ("cpu",))
    threaded = run("convert", deep, tmp_path / "threads", *words).expect(0)
    assert tree(tmp_path / "threads") == tree(tmp_path / "alone")
    told = [[e for e in r.events if e["event"] in ("layer", "note", "gate")] for r in (alone, threaded)]
    assert [e.get("name") for e in told[0]] == [e.get("name") for e in told[1]]  # in the same order
    ahead = {n for (thread, n), _ in reads.items() if thread == "w4pack-read" and ".mlp.up_proj" in n}
    layers = {"gptq": {2, 3}, "rotated": {0, 1, 2, 3}, "rtn": {0, 1, 2, 3}}
    kind = "rotated" if "offline" in options else options[1]
    assert ahead == {f"model.layers.{i}.mlp.up_proj.weight" for i in layers[kind]}


def test_a_rotated_layer_is_read_once_by_the_gate_and_once_for_its_codes(
    deep: Path, book: Path, tmp_path: Path, overlapped: None, reads: Reads
) -> None:
    quantize(deep, tmp_path / "out", "--rotate", "offline", text=book).expect(0)
    for index in range(4):
        name = f"model.layers.{index}.mlp.up_proj.weight"
        assert sum(count for (_, n), count in reads.items() if n == name) == 2


def test_a_run_that_was_stopped_anywhere_resumes_to_the_same_bytes(
    llama: Path, book: Path, tmp_path: Path, overlapped: None
) -> None:
    stop_anywhere(llama, book, tmp_path / "out", range(3, 400, 29))


def test_a_layer_that_was_computed_is_journaled_before_a_later_error_ends_the_run(
    deep: Path, book: Path, tmp_path: Path, overlapped: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its writing is slow here: the error of the next layer comes while it is under way."""
    compute, write = quantizerun.ModelRun.quantize, layerfiles.LayerFiles.write
    seen: list[int] = []

    def failing(self: Any, index: int) -> Any:
        seen.append(index)
        if seen == [0, 1, 2]:
            raise KeyboardInterrupt
        return compute(self, index)

    def slowly(self: Any, *args: Any) -> Any:
        time.sleep(0.05)
        return write(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(layerfiles.LayerFiles, "write", slowly)
        patch.setattr(quantizerun.ModelRun, "quantize", failing)
        quantize(deep, tmp_path / "out", text=book).expect(130)
    monkeypatch.setattr(quantizerun.ModelRun, "quantize", failing)
    quantize(deep, tmp_path / "out", "--resume", text=book).expect(0)
    assert seen == [0, 1, 2, 2, 3]


# Eleven linears are written: the second layer's fourth is on the disk and in no journal.
KILLED = """
import os, signal
from w4pack.convert.modeljobs import layerfiles, overlap, quantizerun
overlap.OVERLAPPED = ("cpu",)
original, seen = layerfiles.LayerFiles.write, []
def written(self, op, made):
    found = original(self, op, made)
    seen.append(op.source)
    if len(seen) == 11:
        os.kill(os.getpid(), signal.SIGKILL)
    return found
layerfiles.LayerFiles.write = written
from w4pack.cli import main
main()
"""


@pytest.mark.slow
def test_kill_9_while_one_layer_is_written_and_another_in_work(
    deep: Path, book: Path, tmp_path: Path, overlapped: None
) -> None:
    quantize(deep, tmp_path / "one", text=book).expect(0)
    words = ["convert", deep, tmp_path / "two", "--quantize", "gptq", "--group-size", 32]
    words += ["--calibration", book, *FEW, "-q"]
    done = subprocess.run([sys.executable, "-c", KILLED, *map(str, words)], timeout=600, check=False)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "two").exists()
    (journal,) = tmp_path.glob("*.w4pack-staging/journal.jsonl")
    assert "layers.0.mlp.down_proj" in journal.read_text()
    assert "layers.1.self_attn" not in journal.read_text()
    quantize(deep, tmp_path / "two", "--resume", text=book).expect(0)
    assert tree(tmp_path / "two") == tree(tmp_path / "one")


# ---- errors -------------------------------------------------------------------------------------------


def shard_of(folder: Path) -> Path:
    return folder / "model.safetensors"


def failing_reads(monkeypatch: pytest.MonkeyPatch, fails: Callable[[str], bool]) -> None:
    """Reads of the last layer's tensors fail in threads of certain names."""
    original = CheckpointProvider._read

    def read(self: CheckpointProvider, info: TensorInfo, *rest: Any) -> torch.Tensor:
        if "layers.3.mlp.up_proj" in info.name and fails(threading.current_thread().name):
            raise SourceError(
                "cannot read a file of the source",
                code="unreadable",
                where=info.file,
                found="Input/output error",
            )
        return original(self, info, *rest)

    monkeypatch.setattr(CheckpointProvider, "_read", read)


def test_what_only_the_thread_cannot_read_is_read_again(
    deep: Path, book: Path, tmp_path: Path, overlapped: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize(deep, tmp_path / "one", text=book).expect(0)
    failing_reads(monkeypatch, lambda thread: thread.startswith("w4pack-read"))
    quantize(deep, tmp_path / "two", text=book).expect(0)
    assert tree(tmp_path / "two") == tree(tmp_path / "one")


def test_what_nobody_can_read_is_refused_as_without_threads(
    deep: Path, book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_reads(monkeypatch, lambda thread: True)
    alone = quantize(deep, tmp_path / "out", text=book).expect(1)
    monkeypatch.setattr(overlap, "OVERLAPPED", ("cpu",))
    threaded = quantize(deep, tmp_path / "threaded", text=book).expect(1)
    assert alone.error == threaded.error
    assert threaded.error["code"] == "unreadable"
    assert not (tmp_path / "out").exists()


def test_a_source_that_shrinks_meanwhile_is_named_and_the_run_can_go_on_when_it_is_whole_again(
    deep: Path, book: Path, tmp_path: Path, overlapped: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize(deep, tmp_path / "one", text=book).expect(0)
    source = shutil.copytree(deep, tmp_path / "src")
    whole = shard_of(source).read_bytes()
    compute = quantizerun.ModelRun.quantize

    def cutting(self: Any, index: int) -> Any:
        if index == 1:
            os.truncate(shard_of(source), 4096)
        return compute(self, index)

    with monkeypatch.context() as patch:
        patch.setattr(quantizerun.ModelRun, "quantize", cutting)
        done = quantize(source, tmp_path / "two", text=book).expect(1)
    assert done.error["code"] == "file-too-short"
    with shard_of(source).open("r+b") as file:
        file.write(whole)
    quantize(source, tmp_path / "two", "--resume", text=book).expect(0)
    assert tree(tmp_path / "two") == tree(tmp_path / "one")


def test_a_source_that_changed_before_resuming_is_refused(
    deep: Path, book: Path, tmp_path: Path, overlapped: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = shutil.copytree(deep, tmp_path / "src")
    compute = quantizerun.ModelRun.quantize

    def stopping(self: Any, index: int) -> Any:
        if index == 2:
            raise KeyboardInterrupt
        return compute(self, index)

    with monkeypatch.context() as patch:
        patch.setattr(quantizerun.ModelRun, "quantize", stopping)
        quantize(source, tmp_path / "out", text=book).expect(130)
    sources.save(sources.llama(num_hidden_layers=4, rope_theta=5000.0), source, torch.float16)
    assert (
        quantize(source, tmp_path / "out", "--resume", text=book).expect(3).error["code"] == "resume-differs"
    )


def test_a_disk_that_is_full_ends_the_run_as_without_threads(
    deep: Path, book: Path, tmp_path: Path, overlapped: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize(deep, tmp_path / "one", text=book).expect(0)
    real, writers = os.pwrite, set()

    def full(fd: int, *rest: Any) -> int:
        target = os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115
        writers.add(threading.current_thread().name)
        if target.endswith(".safetensors") and len(done) >= 9:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, *rest)

    done: list[str] = []
    write = layerfiles.LayerFiles.write

    def counting(self: Any, op: Any, made: Any) -> Any:
        found = write(self, op, made)
        done.append(op.source)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        patch.setattr(layerfiles.LayerFiles, "write", counting)
        stopped = quantize(deep, tmp_path / "two", text=book).expect(1)
    assert stopped.error["code"] == "disk-full"
    assert any(name.startswith("w4pack-write") for name in writers)
    assert not (tmp_path / "two").exists()
    quantize(deep, tmp_path / "two", "--resume", text=book).expect(0)
    assert tree(tmp_path / "two") == tree(tmp_path / "one")


# ---- the two helpers alone ----------------------------------------------------------------------------


class Numbered:
    """A provider of one-element tensors that counts, and waits where it is told to."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.gate = threading.Event()
        self.gate.set()

    def names(self) -> list[str]:
        return [f"t{i}" for i in range(9)]

    def info(self, name: str) -> TensorInfo:
        return TensorInfo(name, "F32", (1,), "", 0, 4)

    def get(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        self.gate.wait(10)
        self.asked.append(name)
        return torch.tensor([float(name[1:])], dtype=dtype)


@pytest.fixture
def ahead() -> Iterator[ReadAhead]:
    made = ReadAhead(Numbered())
    yield made
    made.close()


def test_expected_tensors_are_read_once_and_handed_out_as_often_as_said(ahead: ReadAhead) -> None:
    ahead.expect(["t3", "absent", "t1"], times=2)
    first = ahead.get("t3", torch.float64)
    assert (first.item(), first.dtype) == (3.0, torch.float64)
    assert ahead.get("t1").zero_().item() == 0  # the caller's own
    assert (ahead.get("t1").item(), ahead.get("t3").item()) == (1.0, 3.0)
    assert ahead.source.asked == ["t3", "t1"]
    assert ahead.get("t3").item() == 3.0
    assert ahead.source.asked == ["t3", "t1", "t3"]


def test_what_is_not_used_up_is_let_go_with_the_next_call_but_one(ahead: ReadAhead) -> None:
    ahead.source.gate.clear()
    ahead.expect(["t0", "t1", "t2"])
    ahead.expect(["t1", "t4"])
    ahead.expect(["t5"])
    ahead.source.gate.set()
    assert [ahead.get(name).item() for name in ("t5", "t4", "t1")] == [5.0, 4.0, 1.0]
    assert "t2" not in ahead.source.asked  # was not begun yet
    assert ahead.source.asked.count("t1") == 1
    assert ahead._coming == {}


def test_closing_waits_for_the_read_under_way_and_begins_no_other(ahead: ReadAhead) -> None:
    ahead.source.gate.clear()
    ahead.expect(["t0", "t1", "t2"])
    threading.Timer(0.05, ahead.source.gate.set).start()
    ahead.close()
    asked = list(ahead.source.asked)
    assert len(asked) <= 1
    assert ahead.get("t2").item() == 2.0


def test_work_behind_is_done_in_order_and_one_at_a_time() -> None:
    seen: list[int] = []

    def work(number: int) -> None:
        assert not torch.is_grad_enabled()
        time.sleep(0.01)
        seen.append(number)

    with torch.no_grad(), Behind(threaded=True) as behind:
        for number in range(4):
            behind.do(lambda number=number: work(number))
            assert len(seen) >= number  # the one before it is done
    assert seen == [0, 1, 2, 3]


@pytest.mark.parametrize("threaded", [True, False])
def test_an_error_of_work_behind_comes_out_and_nothing_is_done_after_it(threaded: bool) -> None:
    seen: list[int] = []

    def work(number: int) -> None:
        if number == 1:
            raise OSError("no room")
        seen.append(number)

    def all_of_them() -> None:
        with Behind(threaded=threaded) as behind:
            for number in range(4):
                behind.do(lambda number=number: work(number))

    with pytest.raises(OSError, match="no room"):
        all_of_them()
    assert seen == [0]


def test_an_error_of_the_last_work_comes_out_at_the_end() -> None:
    def fail() -> None:
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"), Behind(threaded=True) as behind:
        behind.do(fail)
