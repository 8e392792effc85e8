"""Does the operations of a conversion plan, each with the tensors of the source that it needs."""

from functools import partial
from typing import Any

from w4pack.convert.files.checkpoint import Checkpoint
from w4pack.convert.files.store import digest
from w4pack.convert.jobs import manifest, rotated, work
from w4pack.convert.jobs.layerjob import job_of
from w4pack.convert.jobs.outfiles import OutFiles
from w4pack.convert.jobs.rebuild import record, record_json
from w4pack.convert.planning.plan import Op, Plan
from w4pack.convert.planning.targets import TARGETS
from w4pack.convert.source.detect import Source


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
