"""The tensors of a quantization in its staging folder: written, hashed, and read back by a resumed run."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from w4pack.convert import formats
from w4pack.convert.core import dtypes
from w4pack.convert.files.provider import is_finite
from w4pack.convert.jobs.journal import Finished
from w4pack.convert.jobs.outfiles import OutFiles
from w4pack.convert.jobs.work import Packer
from w4pack.convert.modeljobs.stored import decoded, encoded
from w4pack.convert.planning.plan import Op, OutTensor, Plan
from w4pack.convert.planning.targets import TARGETS
from w4pack.convert.quantize.linears import Quantized

COPY_BYTES = 1 << 24  # of a copied tensor that are written at a time


class LayerFiles:
    """Writes and reads what the operations of a plan make."""

    def __init__(self, files: OutFiles, plan: Plan, packer: Packer | None) -> None:
        self.files, self.packer = files, packer
        self.plans = {layer.source: layer for layer in plan.layers}
        self.layout = formats.get(TARGETS[plan.target].layout or "")

    def copy(self, op: Op, values: torch.Tensor) -> dict[str, Any]:
        """Write a tensor that stays as it is. Returns what the journal says of it beside its hash."""
        target = self.files.tensors[op.outputs[0]]
        flat = values.contiguous().reshape(-1).view(torch.uint8)
        if flat.numel() != target.nbytes:
            raise ValueError(f"{op.source}: {flat.numel()} bytes, planned {target.nbytes}")
        for start in range(0, flat.numel(), COPY_BYTES):
            self.files.write(target, start, flat[start : start + COPY_BYTES].cpu().numpy())
        if target.dtype not in dtypes.FLOAT_TAGS or is_finite(values):
            return {}
        return {"nonfinite": int((~torch.isfinite(values)).sum())}

    def write(self, op: Op, made: Quantized) -> dict[str, Any]:
        """Write a quantized linear. Returns what the journal says of it beside its hashes."""
        plan = self.plans[op.source]
        tensors = encoded(self.layout, made.words, made.params, plan.scheme, self.packer)
        for suffix, array in tensors.items():
            self.files.write(self.files.tensors[f"{plan.name}.{suffix}"], 0, array)
        return dict(made.report)

    def finished(self, number: int, op: Op, report: Mapping[str, Any]) -> Finished:
        """Hash what an operation has written."""
        hashes = {name: self.files.digest(self.files.tensors[name]) for name in op.outputs}
        return Finished(number, hashes, report)

    def changed(self, item: Finished) -> str | None:
        """Return the name of a tensor that is not what the journal says of it; None: all are."""
        wrong = [n for n, sha in item.hashes.items() if self.files.digest(self.files.tensors[n]) != sha]
        return wrong[0] if wrong else None

    def sync(self, items: list[Finished]) -> None:
        """Bring what operations have written to the disk."""
        self.files.sync(sorted({self.files.tensors[n].shard for item in items for n in item.hashes}))

    def weights(self, name: str) -> torch.Tensor:
        """Return the weights (N, K) float32 that a finished linear's stored codes stand for."""
        plan = self.plans[name]
        tensors = {
            suffix: self.read(self.files.tensors[f"{plan.name}.{suffix}"])
            for suffix in self.layout.specs(plan.scheme)
        }
        return torch.from_numpy(np.ascontiguousarray(decoded(self.layout, tensors, plan.scheme).T))

    def read(self, tensor: OutTensor) -> NDArray[Any]:
        """Return a tensor as it lies in the file."""
        return self.files.read(tensor).view(dtypes.numpy_dtype(tensor.dtype)).reshape(tensor.shape)
