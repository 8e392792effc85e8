"""One conversion from source to published output, and the report of it."""

import hashlib
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from w4pack.convert import formats
from w4pack.convert.core.facts import ModelFacts, Warning_
from w4pack.convert.errors import OutputError, Refused, SourceError, UsageError, VerifyError
from w4pack.convert.events import Quiet, Reporter, warning_fields
from w4pack.convert.files.checkpoint import Checkpoint, open_checkpoint
from w4pack.convert.files.local import LocalStore
from w4pack.convert.files.store import Blob, chunks, digest
from w4pack.convert.jobs import execute, manifest, rotated, sidefiles, work
from w4pack.convert.jobs.compare import Failure, compare_files
from w4pack.convert.jobs.execute import Executor, StopFlag
from w4pack.convert.jobs.journal import Finished, Journal
from w4pack.convert.jobs.layerjob import job_of
from w4pack.convert.jobs.outfiles import OutFiles
from w4pack.convert.jobs.rebuild import record, record_json
from w4pack.convert.jobs.staging import Staging, check_apart, existing_parent
from w4pack.convert.jobs.verify import compare_output, refuse_damaged
from w4pack.convert.planning.options import ConvertOptions
from w4pack.convert.planning.plan import Op, Plan, SourceFile, make_plan, planned_facts
from w4pack.convert.planning.targets import TARGETS
from w4pack.convert.source.detect import Source

HEAD_BYTES = 1 << 20  # bytes of a pickle that identify it without ``--strict``
# Errors after which `--resume` may work: a source that is read again, a limit that decides no byte.
PASSING = ("resume-differs", "unreadable", "file-too-short", "quality")

CardMaker = Callable[[Plan, Mapping[str, float]], str]  # plan, error of each re-quantized layer -> README.md
OnPlan = Callable[[Plan, Sequence[Warning_], ModelFacts, Source], None]
WriteRest = Callable[[Path, manifest.Written], None]  # staging folder, what was written
# Does what is left of a plan: (files, journal, what an earlier run finished) -> everything that is finished.
Operations = Callable[[OutFiles, Journal, list[Finished]], Mapping[int, Finished]]


def check_device(name: str) -> None:
    """Raise UsageError for a name that no device has here, whether torch is installed or not."""
    if re.fullmatch(r"cpu|cuda(:\d{1,3})?", name) is None:
        raise UsageError(
            "no such device",
            code="no-device",
            where="--device",
            expected="cpu, cuda or cuda:N",
            found=name,
        )


MAX_KL = 4.0  # nats a token, mean: above it the result is no longer the model


def check_limit(max_kl: float) -> None:
    """Raise UsageError for a limit of the divergence that is none: NaN and infinity would let all pass."""
    if not 0 <= max_kl < math.inf:
        raise UsageError(
            "no such limit",
            where="--max-kl",
            expected="nats a token, 0 or more; 1000, say, lets everything pass",
            found=f"{max_kl:g}",
        )


@dataclass(frozen=True, slots=True)
class Running:
    """How to run: none of this decides bytes, but the last bits of what a device computes.

    threads  0: one per core, at most 8
    device   where quantization computes: ``cpu``, ``cuda`` or ``cuda:1``
    packer   makes Marlin tiles, e.g. ``kernels.packing.packer_on("cuda")``; None: numpy does, on the CPU
    max_kl   divergence, nats a token, above which a calibrated quantization is not published
    """

    threads: int = 0
    resume: bool = False
    overwrite: bool = False
    strict: bool = False
    reporter: Reporter = field(default_factory=Quiet)
    stop: StopFlag = field(default_factory=StopFlag)
    device: str = "cpu"
    packer: work.Packer | None = None
    max_kl: float = MAX_KL

    @property
    def workers(self) -> int:
        """Number of threads."""
        return self.threads or min(len(os.sched_getaffinity(0)), 8)

    def packed_on(self, plan: Plan) -> str | None:
        """Return the device that packs a plan's layers; None where they do not become Marlin tiles."""
        layout = TARGETS[plan.target].layout
        packed = any(layer.action != "dense" for layer in plan.layers)
        if layout is None or not packed or not work.packs_tiles(formats.get(layout)):
            return None
        return "cpu" if self.packer is None else self.packer.device


@dataclass(frozen=True, slots=True)
class Report:
    """What a conversion did.

    errors        relative Frobenius error of each re-quantized layer
    was_complete  OUT was already the published result of this plan (``--resume``); nothing was written
    packed_on     the device that made Marlin tiles, None where nothing became tiles
    followed      another process of a team has written OUT
    """

    out: Path
    plan: Plan
    warnings: tuple[Warning_, ...]
    seconds: float
    errors: Mapping[str, float]
    was_complete: bool = False
    packed_on: str | None = None
    followed: bool = False

    @property
    def lossless(self) -> bool:
        """Claim: codes, zeros, scales and order are those of the source, bit for bit."""
        return self.plan.lossless

    @property
    def target(self) -> str:
        """The target, as ``--to`` names it."""
        return self.plan.target


class ConvertRecipe:
    """Does the operations of a conversion plan."""

    def __init__(
        self, source: Source, plan: Plan, *, strict: bool, packer: work.Packer | None = None
    ) -> None:
        self.source = source
        self.layers = {layer.name: layer for layer in source.layers}
        self.plans = {p.source: p for p in plan.layers}
        self.dense = {d.source: d for d in plan.dense}
        self.layout = TARGETS[plan.target].layout
        self.records = plan.target in manifest.TARGETS_WITH_RECORDS
        self.strict = strict
        self.packer = packer
        self.model = None if plan.rotation is None else rotated.rotated_model(source, plan)

    def start(self, op: Op, out: OutFiles) -> work.OpRun:
        """See ``work.Recipe``."""
        run = work.OpRun(op, [])
        if op.kind == "copy":
            run.tasks = work.copy_tasks(
                self.source.checkpoint, op.source, out, out.tensors[op.outputs[0]], run.report
            )
        elif op.kind == "rotated" and self.model is not None:
            run.tasks = [partial(rotated.write, self.model, out, out.tensors[op.source], run.report)]
        elif op.kind == "dense":
            run.report["sha256"] = hash_tensor(self.source.checkpoint, op.source)
            run.tasks = work.dense_tasks(self.source, self.dense[op.source], out, out.tensors[op.outputs[0]])
        else:
            run.tasks = self._layer(op, out, run.report)
        return run

    def _layer(self, op: Op, out: OutFiles, report: dict[str, Any]) -> list[work.Task]:
        plan = self.plans[op.source]
        job = job_of(self.source.checkpoint, self.layers, plan, self.layout)
        if self.records:
            report["unpack"] = record_json(record(job, self.source.checkpoint, self._codes_hash(op.source)))
        if plan.action == "dense":
            return work.dense_layer_tasks(job, out, out.tensors[op.outputs[0]], report)
        if plan.action == "regroup" or self.layout is None:
            return work.regroup_tasks(job, out, report, self.packer)
        small = work.encoded(job)
        return work.pack_tasks(job.codes, self.layout, out, plan.name, small, self.packer)

    def _codes_hash(self, name: str) -> str | None:
        if not self.strict:
            return None
        layer = self.layers[name]
        info = layer.tensors[layer.module.grid(layer.scheme.bits).suffix]
        return hash_tensor(self.source.checkpoint, info.name)


def hash_tensor(checkpoint: Checkpoint, name: str) -> str:
    """Return the sha256 of a source tensor's bytes."""
    return digest(checkpoint.chunks(checkpoint.tensors[name]))


def source_files(checkpoint: Checkpoint, *, strict: bool) -> tuple[SourceFile, ...]:
    """Identify the source's weight files: size, digest of the header, sha256 of the whole if ``strict``."""
    found = []
    for name in checkpoint.weight_files:
        blob = checkpoint.store.blob(name)
        whole = digest(chunks(blob.read_into, blob.size)) if strict else None
        found.append(SourceFile(name, blob.size, header_digest(blob), whole))
    return tuple(found)


def header_digest(blob: Blob) -> str:
    """Return the sha256 of a file's first bytes: of a safetensors file, its whole header."""
    prefix = bytearray(min(8, blob.size))
    blob.read_into(0, memoryview(prefix))
    length = int.from_bytes(prefix, "little") if blob.name.endswith(".safetensors") else HEAD_BYTES
    head = bytearray(min(8 + length, blob.size))
    blob.read_into(0, memoryview(head))
    return hashlib.sha256(head).hexdigest()


def plan_conversion(
    source: Source, out: Path, options: ConvertOptions, origin: Mapping[str, str] | None, running: Running
) -> tuple[Plan, tuple[Warning_, ...]]:
    """Plan, and refuse what the run itself would refuse: the source, the options, the place of OUT.

    Writes nothing. Raises Refused, SourceError, OutputError, or VerifyError for a damaged source of ours.
    """
    check_place(source.checkpoint, out, running)
    if source.problems:
        refuse_damaged_source(source.checkpoint, manifest_of(source.checkpoint), running.workers)
    plan, warnings = make_plan(
        source, options, origin, source_files(source.checkpoint, strict=running.strict)
    )
    if running.resume and finished_plan(out, plan) is None:
        Staging(out).check(overwrite=running.overwrite, resume=True)
    return plan, warnings


def manifest_of(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """Return the manifest of a source that w4pack itself wrote, or None."""
    return manifest.of_store(checkpoint.store.read, checkpoint.store.files())


def refuse_damaged_source(checkpoint: Checkpoint, value: Mapping[str, Any] | None, threads: int) -> None:
    """Raise VerifyError if a source that w4pack wrote is no longer what its manifest says."""
    if value is not None:
        refuse_damaged(checkpoint, value, threads)


def convert_source(
    source: Source,
    out: Path,
    options: ConvertOptions,
    origin: Mapping[str, str] | None,
    running: Running,
    *,
    card: CardMaker | None = None,
    on_plan: OnPlan | None = None,
    before: Callable[[], None] | None = None,
) -> Report:
    """Plan, execute and publish.

    card     ``card(plan, errors) -> str`` makes the output's README; None: no card
    on_plan  called with (plan, warnings, facts of the output, source) before anything is written
    before   called after that, where there is something to do; what it raises stops the job

    Raises Refused before anything is written; OutputError, SourceError, Interrupted while running. OUT
    appears complete or not at all.
    """
    started = time.monotonic()
    settle_place(source.checkpoint, out, running)
    plan, warnings = plan_conversion(source, out, options, origin, running)
    if on_plan is not None:
        on_plan(plan, warnings, planned_facts(source, plan), source)
    for warning in warnings:
        running.reporter.event("warning", **warning_fields(warning))
    original = manifest_of(source.checkpoint)
    refuse_damaged_source(source.checkpoint, original, running.workers)
    if running.resume and finished_before(out, plan, source, running.workers):
        return Report(out, plan, warnings, time.monotonic() - started, {}, was_complete=True)
    if before is not None:
        before()
    written = run_plan(
        plan,
        ConvertRecipe(source, plan, strict=running.strict, packer=running.packer),
        out,
        running,
        lambda folder, done: _write_rest(folder, done, plan, source, original, card),
    )
    tell_values(written, running.reporter)
    seconds = time.monotonic() - started
    return Report(out, plan, warnings, seconds, _errors(written), packed_on=running.packed_on(plan))


def tell_values(written: manifest.Written, reporter: Reporter) -> None:
    """Warn of values that were counted on the way."""
    told = (
        (
            "flushed",
            "values that float16 holds",
            "smaller ones",
            "values are smaller than float16 holds and became 0; `--dtype bfloat16` keeps them",
        ),
        (
            "nonfinite",
            "finite values",
            "not finite",
            "values are not finite; copied as they are, `w4pack verify` reports them",
        ),
    )
    for name, report in written.reports.items():
        for code, expected, found, text in told:
            count = report.get(code)
            if count:
                reporter.event(
                    "warning",
                    code=code,
                    where=name,
                    expected=expected,
                    found=f"{count} {found}",
                    text=f"{name}: {count} {text}",
                )


def _errors(written: manifest.Written) -> dict[str, float]:
    """Return the relative error of each re-quantized layer."""
    return {n: float(r["relative_error"]) for n, r in written.reports.items() if "relative_error" in r}


def _write_rest(
    folder: Path,
    written: manifest.Written,
    plan: Plan,
    source: Source,
    original: Mapping[str, Any] | None,
    card: CardMaker | None,
) -> None:
    value = manifest.build(plan, source, written, original)
    side_files = sidefiles.copy_side_files(source.checkpoint, folder)
    text = card(plan, _errors(written)) if card else None
    sidefiles.write_rest(folder, plan, source.config, side_files, value, text)


def settle_place(source: Checkpoint, out: Path, running: Running) -> None:
    """Put OUT back if an overwrite died; raise OutputError if it cannot be where it is asked to be."""
    _check_apart(source, out)
    Staging(out).put_back()
    check_place(source, out, running)


def check_place(source: Checkpoint, out: Path, running: Running) -> None:
    """Raise OutputError if OUT cannot be where it is asked to be; with ``--resume`` the plan decides more."""
    _check_apart(source, out)
    if not running.resume:
        Staging(out).check(overwrite=running.overwrite, resume=False)


def _check_apart(source: Checkpoint, out: Path) -> None:
    folder = folder_of(source)
    if folder is not None:
        check_apart(folder, out)


def folder_of(checkpoint: Checkpoint) -> Path | None:
    """Return the folder a checkpoint lies in, or None if it is read from elsewhere."""
    root = getattr(checkpoint.store, "root", None)
    return None if root is None else Path(root)


def finished_plan(out: Path, plan: Plan) -> dict[str, Any] | None:
    """Return the manifest of OUT if OUT says that it is the published result of this plan, else None."""
    staging = Staging(out)
    if staging.out.exists() or not (staging.standing / manifest.NAME).is_file():
        return None
    value = manifest.load(staging.standing)
    return value if value.get("plan") == plan.digest else None


def finished_before(out: Path, plan: Plan, source: Source, threads: int) -> bool:
    """Tell whether OUT is already the published result of this plan; a staging folder left is removed.

    The plan holds sizes and headers of the source's files; their data is compared too, with the hashes
    that ``--strict`` took or else with OUT, value by value. Raises Refused if the source changed since,
    VerifyError if OUT did.
    """
    value = finished_plan(out, plan)
    if value is None:
        return False
    staging = Staging(out)
    with open_checkpoint(LocalStore(out)) as written:
        refuse_damaged(written, value, threads)
        _refuse_changed(written, value, source, plan, threads)
    staging.remove_old()
    shutil.rmtree(staging.root, ignore_errors=True)
    return True


def _refuse_changed(
    written: Checkpoint, value: Mapping[str, Any], source: Source, plan: Plan, threads: int
) -> None:
    """Raise Refused if the source is not the one that OUT was made of."""
    recorded = _hashes(value)
    hashed = {f.name: f.sha256 for f in plan.files if f.sha256 and recorded.get(f.name)}
    if len(hashed) == len(plan.files):
        failures = [Failure(n, "hash", recorded[n], sha) for n, sha in hashed.items() if sha != recorded[n]]
        failures += compare_files(sidefiles.carried(source.checkpoint), written, source.checkpoint)
    else:
        failures = compare_output(written, value, source, plan, threads)[1]
    if failures:
        first = failures[0]
        raise Refused(
            "the source changed after OUT was made",
            code="resume-differs",
            where=first.tensor,
            expected=first.expected,
            found=first.found,
            hint="convert again with `--overwrite`, without `--resume`",
        )


def _hashes(value: Mapping[str, Any]) -> dict[str, str]:
    """Return the sha256 of each source file that a manifest records, as far as it does."""
    files = value["source"].get("files")
    found = [f for f in files if isinstance(f, dict)] if isinstance(files, list) else []
    return {
        f["name"]: f["sha256"]
        for f in found
        if isinstance(f.get("name"), str) and isinstance(f.get("sha256"), str)
    }


def check_disk(plan: Plan, staging: Staging) -> None:
    """Raise OutputError if the file system cannot hold the output."""
    place = existing_parent(staging.root)
    have = (
        sum(f.stat().st_blocks * 512 for f in staging.out.glob("*.safetensors"))
        if staging.out.is_dir()
        else 0
    )
    needed = plan.disk_bytes - have
    free = shutil.disk_usage(place).free
    if free < needed:
        raise OutputError(
            "not enough room for the output",
            code="disk-full",
            where=str(place),
            expected=f"{needed:,} bytes",
            found=f"{free:,} bytes free",
            hint="free some space, or choose another OUT",
        )


def run_plan(
    plan: Plan, recipe: work.Recipe, out: Path, running: Running, write_rest: WriteRest
) -> manifest.Written:
    """Execute a plan in the staging folder and publish it. ``write_rest`` adds the other files."""

    def operations(files: OutFiles, log: Journal, earlier: list[Finished]) -> Mapping[int, Finished]:
        executor = Executor(plan, recipe, files, log, running.reporter, running.stop)
        executor.adopt(earlier)
        whole = plan.rotation is not None  # tensors are made as a whole: one at a time
        executor.run(1 if whole else running.workers)
        return executor.finished

    return run_staged(plan, out, running, write_rest, operations)


def _resumed(finished: int, plan: Plan) -> str:
    """Return what is told where `--resume` was given."""
    if not finished:
        return "there is nothing to resume: the work starts at the beginning"
    return f"resumed: {finished} of {len(plan.ops)} steps of the earlier run are kept"


def _opened(
    stack: ExitStack, staging: Staging, plan: Plan, *, resume: bool
) -> tuple[OutFiles, Journal, list[Finished]]:
    """Open what is written, and what an earlier run finished; ``stack`` closes it.

    Raises OutputError; then nothing is begun, and of a new run no folder stays. Only on a full disk, where
    `--resume` is what the message names.
    """
    try:
        log, earlier = execute.open_journal(staging.journal, plan, resume=resume)
        stack.callback(log.close)
        return stack.enter_context(OutFiles(staging.out, plan)), log, earlier
    except OutputError as err:
        if not resume and err.code != "disk-full":
            staging.discard()
        raise


def run_staged(
    plan: Plan, out: Path, running: Running, write_rest: WriteRest, operations: Operations
) -> manifest.Written:
    """Do a plan's operations in the staging folder and publish it. ``write_rest`` adds the other files."""
    with running.stop.watching():
        return _staged(plan, out, running, write_rest, operations)


def _staged(
    plan: Plan, out: Path, running: Running, write_rest: WriteRest, operations: Operations
) -> manifest.Written:
    staging = Staging(out)
    check_disk(plan, staging)
    try:
        resume = staging.prepare(overwrite=running.overwrite, resume=running.resume)
        if staging.discarded:
            text = "an unfinished run of this output was discarded; `--resume` would have gone on with it"
            running.reporter.event("note", text=text)
        with ExitStack() as stack:
            files, log, earlier = _opened(stack, staging, plan, resume=resume)
            if running.resume:
                running.reporter.event("note", text=_resumed(len(earlier), plan))
            finished = operations(files, log, earlier)
            samples = {tensor.name: files.sample(tensor) for tensor in plan.tensors}
        hashes, reports = execute.tensor_hashes(finished), execute.reports(plan, finished)
        written = manifest.Written(hashes, reports, samples)
        write_rest(staging.out, written)
        staging.publish(overwrite=running.overwrite)
        return written
    except (SourceError, Refused, VerifyError) as err:
        if err.code not in PASSING:
            staging.discard()  # the source itself is at fault: there is nothing to go on with
        raise
    finally:
        staging.close()
