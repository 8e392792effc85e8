"""Runs a plan: a few threads take small tasks, write at planned offsets, and journal what is finished.

The bytes do not depend on the number of threads or on their order: every task writes its own range, and
every value comes from the plan. Memory does not grow with the model: what is alive is one block per thread
and the small tensors of the layers in work.
"""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from w4pack.convert.errors import EXIT_SIGINT, EXIT_SIGTERM, W4PackError
from w4pack.convert.events import Reporter
from w4pack.convert.jobs import journal
from w4pack.convert.jobs.journal import Earlier, Finished, Journal
from w4pack.convert.jobs.outfiles import OutFiles
from w4pack.convert.jobs.work import OpRun, Recipe, Task
from w4pack.convert.planning.plan import Plan

FLUSH_BYTES = 256 << 20  # data that may be written before it is synced and journaled
FLUSH_SECONDS = 2.0


class Interrupted(W4PackError):
    """A signal asked the job to stop. What is finished is journaled; ``--resume`` goes on."""

    default_code = "interrupted"

    def __init__(self, signum: int, where: Path) -> None:
        super().__init__(
            "stopped by a signal", where=str(where), hint="the same command with `--resume` goes on from here"
        )
        self.exit_code = EXIT_SIGTERM if signum == 15 else EXIT_SIGINT


@dataclass(slots=True)
class StopFlag:
    """Set by a signal handler, read by the workers between tasks.

    ``watched``: somebody reads it soon, and has a journal to close first. Else a handler ends the command at
    once: planning may measure for minutes, and leaves nothing behind.
    """

    signum: int | None = None
    watched: bool = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Let signals wait for whoever reads the flag within this block."""
        self.watched = True
        try:
            yield
        finally:
            self.watched = False


@dataclass(slots=True)
class _Running:
    """One operation in work: tasks not finished yet."""

    index: int
    run: OpRun
    pending: int


@dataclass(slots=True)
class _State:
    """Shared between the workers, under ``lock``."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    flush_lock: threading.Lock = field(default_factory=threading.Lock)
    unflushed: list[Finished] = field(default_factory=list)
    unflushed_bytes: int = 0
    flushed_at: float = field(default_factory=time.monotonic)
    done_bytes: int = 0
    shard_left: dict[str, int] = field(default_factory=dict)
    error: BaseException | None = None


class Executor:
    """Runs the operations of one plan that are not finished yet."""

    def __init__(
        self, plan: Plan, recipe: Recipe, out: OutFiles, log: Journal, reporter: Reporter, stop: StopFlag
    ) -> None:
        self.plan = plan
        self.recipe = recipe
        self.out = out
        self.log = log
        self.reporter = reporter
        self.stop = stop
        self.finished: dict[int, Finished] = {}
        self._state = _State()
        for tensor in plan.tensors:
            self._state.shard_left[tensor.shard] = self._state.shard_left.get(tensor.shard, 0) + 1

    def adopt(self, earlier: list[Finished]) -> None:
        """Believe an earlier run as far as its hashes hold; the rest is done again, with a line."""
        for item in earlier:
            wrong = [n for n, sha in item.hashes.items() if self.out.digest(self.out.tensors[n]) != sha]
            if wrong:
                self.reporter.event("note", text=f"redone: {wrong[0]} does not match the journal")
            else:
                self._complete(item)

    def run(self, threads: int) -> None:
        """Do everything that is left. Raises the first error of any worker, or Interrupted."""
        tasks = self._tasks()
        workers = [threading.Thread(target=self._work, args=(tasks,), daemon=True) for _ in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            while worker.is_alive():
                worker.join(0.2)  # short, so that signal handlers run between
        self._flush(always=self._state.error is None)
        if self._state.error is not None:
            raise self._state.error
        if self.stop.signum is not None:
            raise Interrupted(self.stop.signum, self.out.folder.parent)

    def _tasks(self) -> Iterator[tuple[_Running, Task]]:
        for index, op in enumerate(self.plan.ops):
            if index in self.finished:
                continue
            run = self.recipe.start(op, self.out)
            running = _Running(index, run, len(run.tasks))
            for task in run.tasks:
                yield running, task

    def _work(self, tasks: Iterator[tuple[_Running, Task]]) -> None:
        try:
            while self._state.error is None and self.stop.signum is None:
                with self._state.lock:
                    item = next(tasks, None)
                if item is None:
                    return
                running, task = item
                task()
                with self._state.lock:
                    running.pending -= 1
                    last = running.pending == 0
                if last:
                    self._finish(running)
        except BaseException as err:
            self._state.error = self._state.error or err

    def _finish(self, running: _Running) -> None:
        outputs = [self.out.tensors[name] for name in running.run.op.outputs]
        hashes = {t.name: self.out.digest(t) for t in outputs}
        item = Finished(running.index, hashes, running.run.report)
        size = sum(t.nbytes for t in outputs)
        with self._state.lock:
            self._state.unflushed.append(item)
            self._state.unflushed_bytes += size
            self._complete(item)
        self._flush(always=False)

    def _complete(self, item: Finished) -> None:
        """Count an operation as done, and tell."""
        self.finished[item.op] = item
        op = self.plan.ops[item.op]
        for name in op.outputs:
            tensor = self.out.tensors[name]
            self._state.done_bytes += tensor.nbytes
            self._state.shard_left[tensor.shard] -= 1
            if self._state.shard_left[tensor.shard] == 0:
                self.reporter.event(
                    "shard",
                    name=tensor.shard,
                    bytes=sum(t.nbytes for t in self.plan.tensors if t.shard == tensor.shard),
                )
        if op.kind == "layer":
            self.reporter.event("layer", name=op.source, **item.report_fields())
        self.reporter.progress(self._state.done_bytes, self.plan.output_bytes, op.source)

    def _flush(self, *, always: bool) -> None:
        """Sync what was written, then journal it: a line never stands before its data."""
        with self._state.flush_lock:
            with self._state.lock:
                due = (
                    self._state.unflushed_bytes >= FLUSH_BYTES
                    or time.monotonic() - self._state.flushed_at >= FLUSH_SECONDS
                )
                if not self._state.unflushed or not (always or due):
                    return
                batch, self._state.unflushed, self._state.unflushed_bytes = self._state.unflushed, [], 0
                self._state.flushed_at = time.monotonic()
            self.out.sync(sorted({self.out.tensors[n].shard for item in batch for n in item.hashes}))
            self.log.append(batch)


def open_journal(path: Path, plan: Plan, *, resume: bool) -> tuple[Journal, Earlier]:
    """Open the journal, with what an earlier run of the same job finished. Raises Refused for another job."""
    earlier = journal.read(path, plan) if resume else Earlier()
    log = Journal(path, plan, fresh=earlier.end == 0)
    if earlier.end:
        log.cut(earlier.end)
    return log, earlier


def tensor_hashes(finished: Mapping[int, Finished]) -> dict[str, str]:
    """Return the sha256 of every tensor."""
    return {name: sha for item in finished.values() for name, sha in item.hashes.items()}


def reports(plan: Plan, finished: Mapping[int, Finished]) -> dict[str, Mapping[str, Any]]:
    """Return the report of every operation by its source's name."""
    return {plan.ops[index].source: item.report for index, item in finished.items()}
