"""Quantizing a 16-bit model: plan, layer after layer, journal, publish. Resumes at the last finished layer.

What a finished layer gives to the next one is not kept: on resume the tokens go through the finished layers
again, with the weights that their codes in the staging folder stand for, which are the same numbers.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from w4pack.convert import formats
from w4pack.convert.core import dtypes, families
from w4pack.convert.core.facts import ModelFacts, Warning_
from w4pack.convert.core.families import natural_key
from w4pack.convert.events import Reporter, time_text, warning_fields
from w4pack.convert.files.provider import Provider, is_finite
from w4pack.convert.jobs import execute
from w4pack.convert.jobs.conversion import (
    OnPlan,
    Report,
    Running,
    check_place,
    finished_plan,
    run_staged,
    settle_place,
    source_files,
    tell_values,
)
from w4pack.convert.jobs.execute import Interrupted
from w4pack.convert.jobs.journal import Finished, Journal
from w4pack.convert.jobs.outfiles import OutFiles
from w4pack.convert.modeljobs.gate import check_rotation
from w4pack.convert.modeljobs.judging import judge
from w4pack.convert.modeljobs.mixed import told
from w4pack.convert.modeljobs.online import Runtime, runtime_of
from w4pack.convert.modeljobs.overlap import Behind, overlaps
from w4pack.convert.modeljobs.peaks import peak_text
from w4pack.convert.modeljobs.prepared import Prepared
from w4pack.convert.modeljobs.rest import CardMaker, write_rest
from w4pack.convert.modeljobs.stored import decoded, encoded
from w4pack.convert.planning.options import ConvertOptions
from w4pack.convert.planning.plan import Op, OutTensor, Plan, facts_of
from w4pack.convert.planning.quantize_options import LEFT
from w4pack.convert.planning.quantizing import plan_quantization
from w4pack.convert.planning.targets import TARGETS
from w4pack.convert.quantize.linears import Quantized, quantize_set
from w4pack.convert.quantize.settings import Settings
from w4pack.convert.quantize.team import Team
from w4pack.convert.quantize.whole import ModelRun
from w4pack.convert.source.detect import Source

STRENGTH = 0.25  # of GPTAQ, chosen on text that is neither calibrated nor measured with (docs/benchmarks.md)
# What a leader says to its team (``quantize.team``) before a layer, and at the end.
QUANTIZE, REPEAT, STOPPED, FINISHED = "quantize", "repeat", "stopped", "finished"
COPY_BYTES = 1 << 24  # of a copied tensor that are written at a time


def settings_of(options: ConvertOptions) -> Settings:
    """Return how codes are chosen."""
    asked = options.quantize
    if asked is None:
        raise ValueError("nothing is to be quantized")
    strength = STRENGTH if asked.gptaq and asked.method == "gptq" else 0.0
    return Settings(asked.method, asked.damp, strength, sinks=asked.act_bits == LEFT)


def planned(prepared: Prepared, running: Running) -> tuple[Plan, tuple[Warning_, ...]]:
    """Plan a quantization, wherever it goes."""
    source = prepared.source
    plan, more = plan_quantization(
        prepared.model,
        prepared.options,
        origin=prepared.origin,
        files=source_files(source.checkpoint, strict=running.strict),
        record=prepared.record(),
        schemes=prepared.schemes,
    )
    return plan, (*source.warnings, *prepared.warnings, *more)


def plan_quantized(
    prepared: Prepared, out: Path, running: Running
) -> tuple[Plan, tuple[Warning_, ...], ModelFacts, Source]:
    """Plan, tell what was chosen by measurement, and refuse what the run itself would. Writes nothing."""
    source = prepared.source
    check_place(source.checkpoint, out, running)
    for line in told(prepared.chosen or {}):
        running.reporter.event("note", text=f"--bpw: {line}")
    plan, warnings = planned(prepared, running)
    return plan, warnings, facts_of(source.config, plan), source


def model_run(
    prepared: Prepared, plan: Plan, team: Team | None = None, check: Callable[[], None] | None = None
) -> ModelRun:
    """Return the model of a plan, ready for its first layer. ``check`` may raise within a layer."""
    config = {**prepared.source.config, **plan.config_changes}
    layers = {layer.source: layer for layer in plan.layers}
    records = (plan.quant_config or {}).get("online")
    return ModelRun(
        config,
        prepared.provider,
        {name: layer.scheme for name, layer in layers.items()},
        prepared.windows,
        settings_of(prepared.options),
        prepared.device,
        _runtime(config, prepared, records, layers) if records else None,
        team,
        prepared.ahead,
        check,
    )


def _runtime(config: Mapping[str, Any], prepared: Prepared, records: Any, layers: Iterable[str]) -> Runtime:
    return runtime_of(config, prepared.model.infos, records, layers, read=prepared.provider.get)


def quantize_model(
    prepared: Prepared,
    out: Path,
    running: Running,
    *,
    card: CardMaker | None = None,
    on_plan: OnPlan | None = None,
    team: Team | None = None,
) -> Report:
    """Quantize a model and publish it. Raises Refused before anything is written; see ``convert_source``.

    ``team``: the processes that this one leads; the others call ``follow.follow``.

    VerifyError where the result no longer predicts what the source does: then nothing is published.
    """
    started = time.monotonic()
    settle_place(prepared.source.checkpoint, out, running)
    plan, warnings, facts, source = plan_quantized(prepared, out, running)
    if on_plan is not None:
        on_plan(plan, warnings, facts, source)
    for warning in warnings:
        running.reporter.event("warning", **warning_fields(warning))
    if running.resume and finished_plan(out, plan) is not None:
        _say(team, FINISHED)
        return Report(out, plan, warnings, time.monotonic() - started, {}, was_complete=True)
    outliers: dict[str, Any] = {}
    if prepared.options.rotate != "none":
        gate = check_rotation(source, prepared.options, running.reporter, prepared.device)
        before, after = zip(*gate.outliers, strict=True)
        outliers = {"outliers": {"source": before, "rotated": after}}
    done: list[QuantizeRun] = []

    def work(files: OutFiles, log: Journal, earlier: list[Finished]) -> Mapping[int, Finished]:
        run = QuantizeRun(prepared, plan, files, log, running, team)
        done.append(run)
        run.adopt(earlier)
        run.run()
        return run.finished

    written = run_staged(
        plan,
        out,
        running,
        lambda folder, w: write_rest(folder, w, plan, source, done[0].outcome | outliers, card),
        work,
    )
    _say(team, FINISHED)
    tell_values(written, running.reporter)
    errors = {n: float(r["error"]) for n, r in written.reports.items() if "error" in r}
    seconds = time.monotonic() - started
    return Report(out, plan, warnings, seconds, errors, packed_on=running.packed_on(plan))


def _say(team: Team | None, word: str) -> None:
    if team is not None:
        team.told(word)


@dataclass(frozen=True, slots=True)
class _Layer:
    """One decoder layer's operations: op number -> op."""

    index: int
    ops: Mapping[int, Op]


class QuantizeRun:
    """Does the operations of a quantization plan that are not finished yet."""

    def __init__(
        self,
        prepared: Prepared,
        plan: Plan,
        files: OutFiles,
        log: Journal,
        running: Running,
        team: Team | None = None,
    ) -> None:
        self.team = team
        self.prepared = prepared
        self.plan = plan
        self.files = files
        self.log = log
        self.running = running
        self.finished: dict[int, Finished] = {}
        self._behind = Behind(threaded=overlaps(prepared.device))
        self._held: list[Finished] = []  # not yet journaled, since ``_since``
        self._since = time.monotonic()
        self.outcome: dict[str, Any] = {}
        if prepared.chosen is not None:
            self.outcome["chosen"] = {name: one.to_json() for name, one in prepared.chosen.items()}
        self.plans = {layer.source: layer for layer in plan.layers}
        self.layout = formats.get(TARGETS[plan.target].layout or "")
        self._bytes = 0
        self._started = time.monotonic()

    @property
    def provider(self) -> Provider:
        """The tensors to quantize."""
        return self.prepared.provider

    @property
    def reporter(self) -> Reporter:
        """Where it is told."""
        return self.running.reporter

    def adopt(self, earlier: Sequence[Finished]) -> None:
        """Believe an earlier run as far as its hashes hold."""
        for item in earlier:
            wrong = [n for n, sha in item.hashes.items() if self.files.digest(self.files.tensors[n]) != sha]
            if wrong:
                self.reporter.event("note", text=f"redone: {wrong[0]} does not match the journal")
            else:
                self._complete(item)

    def run(self) -> None:
        """Copy what stays, then quantize. Raises Interrupted between two batches or linears."""
        with torch.no_grad(), self.prepared.reading(), self._behind:
            for number, op in enumerate(self.plan.ops):
                if op.kind == "copy" and number not in self.finished:
                    self._behind.do(partial(self._gather, number, op, self._copied(op)))
            self._behind.do(self._flush)
            if settings_of(self.prepared.options).method == "rtn":
                self._each_alone()
            else:
                self._in_order()

    # ---- round to nearest: no calibration, no model ---------------------------------------------------

    def _each_alone(self) -> None:
        left = [
            (n, op) for n, op in enumerate(self.plan.ops) if op.kind == "layer" and n not in self.finished
        ]
        names = [f"{op.source}.weight" for _, op in left]
        for place, (number, op) in enumerate(left):
            self._stop_here()
            weight = self.provider.get(names[place]).to(self.prepared.device)
            if self.prepared.ahead is not None:
                self.prepared.ahead.expect(names[place + 1 : place + 2])
            self._behind.do(partial(self._keep_one, number, op, self._rounded(op, weight)))
        self._behind.do(self._flush)
        self._behind.wait()
        self.reporter.event("note", text=f"quantized, at most {peak_text(self.prepared.device)}")

    def _rounded(self, op: Op, weight: torch.Tensor) -> Quantized:
        schemes = {op.source: self.plans[op.source].scheme}
        made = quantize_set({op.source: weight}, schemes, None, None, settings_of(self.prepared.options))
        return made[op.source][0]

    def _keep_one(self, number: int, op: Op, made: Quantized) -> None:
        self._gather(number, op, self._written(op, made))

    # ---- GPTQ: in the order of the model --------------------------------------------------------------

    def _in_order(self) -> None:
        _say(self.team, self.plan.digest)
        # A team is told between two layers: within one, the others wait for sums.
        check = self._stop_here if self.team is None else None
        model = model_run(self.prepared, self.plan, self.team, check)
        for layer in self._layers(model):
            self._stop_here(self.team)
            left = [number for number in layer.ops if number not in self.finished]
            if left or not layer.ops:
                _say(self.team, QUANTIZE)
                self._behind.do(partial(self._keep, model.quantize(layer.index), model, layer))
            else:
                _say(self.team, REPEAT)
                model.repeat(layer.index, self._stored)
                self._tell(model, layer, "kept")
        self._behind.wait()
        self._judge(model)

    def _keep(self, made: Mapping[str, Quantized], model: ModelRun, layer: _Layer) -> None:
        """Write a layer, journal it, and tell."""
        done = [self._finished(n, op, self._written(op, made[op.source])) for n, op in layer.ops.items()]
        self._journal(done)
        self._tell(model, layer)

    def _layers(self, model: ModelRun) -> list[_Layer]:
        found: dict[int, dict[int, Op]] = {index: {} for index in range(model.layers)}
        index_of = {name: index for index in found for name in model.below(index).values()}
        for number, op in enumerate(self.plan.ops):
            if op.kind == "layer":
                found[index_of[op.source]][number] = op
        return [_Layer(index, ops) for index, ops in found.items()]

    def _tell(self, model: ModelRun, layer: _Layer, how: str = "quantized") -> None:
        errors = [self.finished[n].report["error"] for n in layer.ops if n in self.finished]
        spent, done = time.monotonic() - self._started, layer.index + 1
        left = spent / done * (model.layers - done)
        mean = f", mean output error {sum(errors) / len(errors):.2%}" if errors else ""
        most = peak_text(self.prepared.device)
        text = f"layer {done} of {model.layers} {how}{mean}, at most {most}, about {time_text(left)} left"
        self.reporter.event("note", text=text)

    def _stop_here(self, team: Team | None = None) -> None:
        if self.running.stop.signum is not None:
            _say(team, STOPPED)
            raise Interrupted(self.running.stop.signum, self.files.folder.parent)

    def _judge(self, model: ModelRun) -> None:
        found = model.outcome()
        self.outcome |= {"kl": found.kl, "kl_tokens": found.tokens}
        counts = self._expert_tokens()
        if counts:
            self.outcome["expert_tokens"] = counts
        judge(found, self.running.max_kl, self.prepared, self.plan, self.files.folder.parent)

    def _expert_tokens(self) -> dict[str, list[int]]:
        """Return name of a set of experts -> calibration tokens of each, in their order."""
        found: dict[str, dict[int, int]] = {}
        for number, item in self.finished.items():
            op = self.plan.ops[number]
            expert = families.expert_index(op.source) if op.kind == "layer" else None
            if expert is not None:
                name = self.plans[op.source].name.rpartition(f".{expert}.")[0]
                found.setdefault(name, {})[expert] = int(item.report["tokens"])
        return {name: [c for _, c in sorted(found[name].items())] for name in sorted(found, key=natural_key)}

    # ---- files ----------------------------------------------------------------------------------------

    def _copied(self, op: Op) -> dict[str, Any]:
        """Write a tensor that stays as it is. Returns what the journal says of it beside its hash."""
        target = self.files.tensors[op.outputs[0]]
        values = self.provider.get(op.source)
        flat = values.contiguous().reshape(-1).view(torch.uint8)
        if flat.numel() != target.nbytes:
            raise ValueError(f"{op.source}: {flat.numel()} bytes, planned {target.nbytes}")
        for start in range(0, flat.numel(), COPY_BYTES):
            self.files.write(target, start, flat[start : start + COPY_BYTES].cpu().numpy())
        if target.dtype not in dtypes.FLOAT_TAGS or is_finite(values):
            return {}
        return {"nonfinite": int((~torch.isfinite(values)).sum())}

    def _written(self, op: Op, made: Quantized) -> dict[str, Any]:
        """Write a quantized linear. Returns what the journal says of it beside its hashes."""
        plan = self.plans[op.source]
        tensors = encoded(self.layout, made.words, made.params, plan.scheme, self.running.packer)
        for suffix, array in tensors.items():
            self.files.write(self.files.tensors[f"{plan.name}.{suffix}"], 0, array)
        return dict(made.report)

    def _finished(self, number: int, op: Op, report: Mapping[str, Any]) -> Finished:
        """Hash what an operation has written."""
        hashes = {name: self.files.digest(self.files.tensors[name]) for name in op.outputs}
        return Finished(number, hashes, report)

    def _gather(self, number: int, op: Op, report: Mapping[str, Any]) -> None:
        """Journal operations as they are finished, a few seconds of work at a time."""
        self._held.append(self._finished(number, op, report))
        if time.monotonic() - self._since >= execute.FLUSH_SECONDS:
            self._flush()

    def _flush(self) -> None:
        held, self._held, self._since = self._held, [], time.monotonic()
        if held:
            self._journal(held)

    def _journal(self, items: list[Finished]) -> None:
        """Sync what was written, then journal it: a line never stands before its data."""
        names = {self.files.tensors[n].shard for item in items for n in item.hashes}
        self.files.sync(sorted(names))
        self.log.append(items)
        for item in items:
            self._complete(item)

    def _complete(self, item: Finished) -> None:
        self.finished[item.op] = item
        op = self.plan.ops[item.op]
        self._tell_dampings(op.source, item.report)
        self._bytes += sum(self.files.tensors[name].nbytes for name in op.outputs)
        if op.kind == "layer":
            self.reporter.event("layer", name=op.source, **item.report)
        self.reporter.progress(self._bytes, self.plan.output_bytes, op.source)

    def _tell_dampings(self, name: str, report: Mapping[str, Any]) -> None:
        """Say each value of the damping that was too little, and what came next."""
        failed: Sequence[float] = report.get("failed_dampings", ())
        told = [f"a damping of {share:.3g}" for share in failed[1:]]
        told.append(f"a damping of {report['damping']:.3g}" if "damping" in report else "rounding to nearest")
        for share, then in zip(failed, told, strict=False):
            text = f"{name}: the Hessian cannot be factored with a damping of {share:.3g}; {then} comes next"
            self.reporter.event("note", text=text)

    def _stored(self, name: str) -> torch.Tensor:
        """Return the weights (N, K) float32 that a finished linear's stored codes stand for."""
        plan = self.plans[name]
        tensors = {
            suffix: self._read(self.files.tensors[f"{plan.name}.{suffix}"])
            for suffix in self.layout.specs(plan.scheme)
        }
        return torch.from_numpy(np.ascontiguousarray(decoded(self.layout, tensors, plan.scheme).T))

    def _read(self, tensor: OutTensor) -> NDArray[Any]:
        return self.files.read(tensor).view(dtypes.numpy_dtype(tensor.dtype)).reshape(tensor.shape)
