"""The operations of a quantization, done layer after layer, and journaled: resumes at the last finished one.

What a finished layer gives to the next one is not kept: on resume the tokens go through the finished layers
again, with the weights that their codes in the staging folder stand for, which are the same numbers. What is
measured before the first layer is kept: clip ratios in the journal, guides of keys as the tensors that they
are.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from w4pack.convert.core import families
from w4pack.convert.core.facts import Warning_
from w4pack.convert.core.families import natural_key
from w4pack.convert.dialects.online_reading import parse
from w4pack.convert.events import Reporter, warning_fields
from w4pack.convert.files.provider import Provider
from w4pack.convert.jobs import execute
from w4pack.convert.jobs.execute import Interrupted
from w4pack.convert.jobs.journal import MEASURED, Earlier, Finished, Journal
from w4pack.convert.jobs.outfiles import OutFiles
from w4pack.convert.jobs.running import Running
from w4pack.convert.modeljobs.judging import judge
from w4pack.convert.modeljobs.layerfiles import LayerFiles
from w4pack.convert.modeljobs.measuring import Measured, measure, settled, settled_plan
from w4pack.convert.modeljobs.modelrun import QUANTIZE, REPEAT, STOPPED, model_run, say, settings_of
from w4pack.convert.modeljobs.overlap import Behind, overlaps
from w4pack.convert.modeljobs.peaks import peak_text
from w4pack.convert.modeljobs.prepared import Prepared
from w4pack.convert.modeljobs.progress import Layers
from w4pack.convert.planning.plan import Op, Plan
from w4pack.convert.quantize.clips import Clips
from w4pack.convert.quantize.linears import Quantized, quantize_set
from w4pack.convert.quantize.team import Team
from w4pack.convert.quantize.whole import ModelRun
from w4pack.convert.source import online_shown


@dataclass(frozen=True, slots=True)
class _Layer:
    """One decoder layer's operations: op number -> op."""

    index: int
    ops: Mapping[int, Op]


class QuantizeRun:
    """Does the operations of a quantization plan that are not finished yet.

    prepared, told   with what was measured, once it is: what the layers run with, and the plan as the output
                     says it
    warnings         of what was found on the way
    """

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
        self.plan = self.told = plan
        self.log = log
        self.running = running
        self.files = LayerFiles(files, plan, running.packer)
        self.finished: dict[int, Finished] = {}
        self.warnings: tuple[Warning_, ...] = ()
        self.outcome: dict[str, Any] = {}
        if prepared.chosen is not None:
            self.outcome["chosen"] = {name: one.to_json() for name, one in prepared.chosen.items()}
        self._measured: Measured | None = None
        self._behind = Behind(threaded=overlaps(prepared.device))
        self._held: list[Finished] = []  # not yet journaled, since ``_since``
        self._since = time.monotonic()
        self._bytes = 0

    @property
    def provider(self) -> Provider:
        """The tensors to quantize."""
        return self.prepared.provider

    @property
    def reporter(self) -> Reporter:
        """Where it is told."""
        return self.running.reporter

    def adopt(self, earlier: Earlier) -> None:
        """Believe an earlier run as far as its hashes hold."""
        kept = []
        for item in earlier.finished:
            wrong = self.files.changed(item)
            if wrong is None:
                kept.append(item)
            else:
                self.reporter.event("note", text=f"redone: {wrong} does not match the journal")
        if self.prepared.guides:
            self._measured = self._found({item.op for item in kept}, earlier.results.get(MEASURED))
            if self._measured is None:  # what was made with other values is no part of this run
                copied = [item for item in kept if self.plan.ops[item.op].kind == "copy"]
                left = [item for item in copied if self.plan.ops[item.op].source not in self.prepared.guides]
                if len(left) < len(kept):
                    text = "redone: clip ratios and guides of keys are not as the earlier run measured them"
                    self.reporter.event("note", text=text)
                kept = left
        self.running.tell_kept(earlier, len(kept), self.plan)
        for item in kept:
            self._complete(item)

    def run(self) -> None:
        """Measure, copy what stays, then quantize. Raises Interrupted between two batches or linears."""
        settings = settings_of(self.prepared.options)
        with torch.no_grad(), self.prepared.reading(), self._behind:
            if settings.method != "rtn":
                say(self.team, self.plan.digest)
            if self.prepared.guides:
                self._settle()
            for number, op in enumerate(self.plan.ops):
                if op.kind == "copy" and number not in self.finished:
                    copied = self.files.copy(op, self.provider.get(op.source))
                    self._behind.do(partial(self._gather, number, op, copied))
            self._behind.do(self._flush)
            if settings.method == "rtn":
                self._each_alone()
            else:
                self._in_order()

    # ---- what is measured before the first layer -------------------------------------------------------

    def _found(self, kept: set[int], ratios: Any) -> Measured | None:
        """Return what an earlier run has measured, if it is all there."""
        ops = {op.source: number for number, op in enumerate(self.plan.ops)}
        if ratios is None or not all(ops[name] in kept for name in self.prepared.guides):
            return None
        try:
            clips = Clips.from_json(ratios)
        except ValueError:
            return None
        tensors = self.files.files.tensors
        read = {name: torch.from_numpy(self.files.read(tensors[name])) for name in self.prepared.guides}
        return Measured(clips, read)

    def _settle(self) -> None:
        """Measure clip ratios and guides, unless an earlier run has, and go on with them."""
        measured = self._measured
        if measured is None:
            measured = self._measured = measure(self.prepared, self.reporter, self._stop_here)
            self._keep_measured(measured)
        else:
            text = "clip ratios and guides of keys: as the earlier run measured them"
            self.reporter.event("note", text=text)
        if self.team is not None:
            self.team.told(measured)
        self.prepared = settled(self.prepared, measured)
        self.told = settled_plan(self.plan, self.prepared)
        online = online_shown.to_json(parse(self.prepared.model.online))
        self.reporter.event("measured", text="\n".join(online_shown.ratios(online)), online=online)
        self.warnings = measured.warnings
        for warning in self.warnings:
            self.reporter.event("warning", **warning_fields(warning))

    def _keep_measured(self, measured: Measured) -> None:
        """Write the guides, and journal them and the ratios at once: neither is of use without the other."""
        done = []
        for number, op in enumerate(self.plan.ops):
            if op.source in measured.guides:
                copied = self.files.copy(op, measured.guides[op.source])
                done.append(self.files.finished(number, op, copied))
        self._journal(done, **{MEASURED: measured.clips.to_json()})

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
        schemes = {op.source: self.files.plans[op.source].scheme}
        made = quantize_set({op.source: weight}, schemes, None, None, settings_of(self.prepared.options))
        return made[op.source][0]

    def _keep_one(self, number: int, op: Op, made: Quantized) -> None:
        self._gather(number, op, self.files.write(op, made))

    # ---- GPTQ: in the order of the model --------------------------------------------------------------

    def _in_order(self) -> None:
        # A team is told between two layers: within one, the others wait for sums.
        check = self._stop_here if self.team is None else None
        model = model_run(self.prepared, self.told, self.team, check)
        progress = Layers(model.layers, self.reporter, self.prepared.device)
        for layer in self._layers(model):
            self._stop_here(self.team)
            left = [number for number in layer.ops if number not in self.finished]
            if left or not layer.ops:
                say(self.team, QUANTIZE)
                self._behind.do(partial(self._keep, model.quantize(layer.index), progress, layer))
            else:
                say(self.team, REPEAT)
                model.repeat(layer.index, self.files.weights)
                self._tell(progress, layer, "kept")
        self._behind.wait()
        self._judge(model)

    def _keep(self, made: Mapping[str, Quantized], progress: Layers, layer: _Layer) -> None:
        """Write a layer, journal it, and tell."""
        files = self.files
        done = [files.finished(n, op, files.write(op, made[op.source])) for n, op in layer.ops.items()]
        self._journal(done)
        self._tell(progress, layer, "quantized")

    def _layers(self, model: ModelRun) -> list[_Layer]:
        found: dict[int, dict[int, Op]] = {index: {} for index in range(model.layers)}
        index_of = {name: index for index in found for name in model.below(index).values()}
        for number, op in enumerate(self.plan.ops):
            if op.kind == "layer":
                found[index_of[op.source]][number] = op
        return [_Layer(index, ops) for index, ops in found.items()]

    def _tell(self, progress: Layers, layer: _Layer, how: str) -> None:
        errors = [self.finished[n].report["error"] for n in layer.ops if n in self.finished]
        mean = f", mean output error {sum(errors) / len(errors):.2%}" if errors else ""
        progress.tell(layer.index + 1, f"{how}{mean}")

    def _stop_here(self, team: Team | None = None) -> None:
        if self.running.stop.signum is not None:
            say(team, STOPPED)
            raise Interrupted(self.running.stop.signum, self.files.files.folder.parent)

    def _judge(self, model: ModelRun) -> None:
        found = model.outcome()
        self.outcome |= {"kl": found.kl, "kl_tokens": found.tokens}
        counts = self._expert_tokens()
        if counts:
            self.outcome["expert_tokens"] = counts
        judge(found, self.running.max_kl, self.prepared, self.plan, self.files.files.folder.parent)

    def _expert_tokens(self) -> dict[str, list[int]]:
        """Return name of a set of experts -> calibration tokens of each, in their order."""
        found: dict[str, dict[int, int]] = {}
        for number, item in self.finished.items():
            op = self.plan.ops[number]
            expert = families.expert_index(op.source) if op.kind == "layer" else None
            if expert is not None:
                name = self.files.plans[op.source].name.rpartition(f".{expert}.")[0]
                found.setdefault(name, {})[expert] = int(item.report["tokens"])
        return {name: [c for _, c in sorted(found[name].items())] for name in sorted(found, key=natural_key)}

    # ---- the journal ----------------------------------------------------------------------------------

    def _gather(self, number: int, op: Op, report: Mapping[str, Any]) -> None:
        """Journal operations as they are finished, a few seconds of work at a time."""
        self._held.append(self.files.finished(number, op, report))
        if time.monotonic() - self._since >= execute.FLUSH_SECONDS:
            self._flush()

    def _flush(self) -> None:
        held, self._held, self._since = self._held, [], time.monotonic()
        if held:
            self._journal(held)

    def _journal(self, items: list[Finished], **results: Any) -> None:
        """Sync what was written, then journal it: a line never stands before its data."""
        self.files.sync(items)
        self.log.append(items, **results)
        for item in items:
            self._complete(item)

    def _complete(self, item: Finished) -> None:
        self.finished[item.op] = item
        op = self.plan.ops[item.op]
        self._tell_dampings(op.source, item.report)
        self._bytes += sum(self.files.files.tensors[name].nbytes for name in op.outputs)
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
