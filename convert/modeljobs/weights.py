"""Any checkpoint that w4pack reads, as plain numbers: packed linears become the weights they mean."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import torch

from w4pack.convert.core.families import natural_key
from w4pack.convert.errors import Refused
from w4pack.convert.files.provider import CheckpointProvider
from w4pack.convert.files.tensorfile import TensorInfo, tensor_nbytes
from w4pack.convert.jobs.codes import Block
from w4pack.convert.jobs.layerjob import job_of
from w4pack.convert.jobs.work import weights_of
from w4pack.convert.planning.decisions import LayerPlan
from w4pack.convert.source.detect import Source


class Numbers:
    """See ``files.provider.Provider``. Packed linears are float32: the exact products, not rounded.

    ``online``: the weights are wanted of an artifact whose runtime does more than multiply, too.

    Raises what is wrong with the source; Refused for such an artifact otherwise.
    """

    def __init__(self, source: Source, *, online: bool = False) -> None:
        if source.problems:
            raise Refused.together(source.problems)
        records = (source.quant_config or {}).get("online")
        if records and not online:
            raise Refused(
                "this model needs a runtime that applies its online transforms",
                code="rotate-online",
                where=source.checkpoint.label,
                found=f"{len(records)} records",
                hint="`w4pack eval` and `w4pack.load` apply them",
            )
        self.source = source
        self.plain = CheckpointProvider(source.checkpoint)
        self.packed = {f"{layer.name}.weight": layer for layer in source.layers}
        self.layers = {layer.name: layer for layer in source.layers}
        dense = [t.name for t in source.dense]
        biases = [layer.bias.name for layer in source.layers if layer.bias is not None]
        self._names = sorted({*dense, *biases, *self.packed}, key=natural_key)

    def names(self) -> Iterable[str]:
        """See ``Provider``."""
        return self._names

    def info(self, name: str) -> TensorInfo:
        """See ``Provider``."""
        layer = self.packed.get(name)
        if layer is None:
            return self.plain.info(name)
        shape = (layer.scheme.out_features, layer.scheme.in_features)
        return TensorInfo(name, "F32", shape, "", 0, tensor_nbytes("F32", shape))

    def get(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """See ``Provider``."""
        layer = self.packed.get(name)
        if layer is None:
            return self.plain.get(name, dtype)
        scheme = replace(layer.scheme, act_order=False)
        plan = LayerPlan(layer.name, layer.name, "dense", scheme)
        job = job_of(self.source.checkpoint, self.layers, plan, None)
        block = Block(0, scheme.in_features, 0, scheme.out_features)
        values = torch.from_numpy(np.ascontiguousarray(weights_of(job.codes, job.params, block, "F32").T))
        return values if dtype is None else values.to(dtype)
