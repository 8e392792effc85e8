"""Linear layers of the engine over our operators: q/k/v, gate/up, o, down, and a packed output head."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from vllm.model_executor.layers.linear import LinearMethodBase
from vllm.model_executor.utils import is_weights_pre_processed

from w4pack.convert.errors import Refused, SourceError, name_some
from w4pack.kernels import modules, orders
from w4pack.kernels.vllm import parts as parts_of
from w4pack.kernels.vllm.parts import Part, Rank, Wanted
from w4pack.kernels.vllm.source import Source
from w4pack.kernels.vllm.stores import Layout, Store

QKV = ("q", "k", "v")  # what the engine calls the parts of its attention layers


class W4PackLinearMethod(LinearMethodBase):
    """One layer of the engine, of one module of the file or of several side by side.

    The card is not made ready here but by the engine's first run of the model: what is allocated while
    weights load belongs to them, and is given up with them when the engine sleeps.

    Args:
        source: what the file holds.
        members: the modules of the file, in the layer's order.
        is_head: the output head, whose columns the engine pads.
        is_read: the parameters are filled from the file, not with dummies.
    """

    supports_pre_processed_weights = True  # held by another process (``vllm preload``): they are as loaded

    def __init__(
        self, source: Source, members: tuple[str, ...], *, is_head: bool = False, is_read: bool = True
    ) -> None:
        self.source = source
        self.members = members
        self.is_head = is_head
        self.is_read = is_read

    @property
    def packed(self) -> tuple[str, ...]:
        """The packed modules of the file that the layer is."""
        return tuple(name for name in self.members if name in self.source.specs)

    # ---- before loading --------------------------------------------------------------------------

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Make the layer's parameters: what this rank holds, as it lies in the file.

        Raises:
            Refused: a partition that cuts a tile or a group, or rows of a layer with an act-order.
            SourceError: modules of other sizes than the layer's; a bias that the layer does not have.
        """
        wanted = Wanted(layer.prefix, input_size_per_partition, tuple(output_partition_sizes))
        rank = Rank(layer.tp_rank, layer.tp_size)
        found = self._parts(layer, wanted, rank)
        for part in found:
            self._check_bias(layer, part)
        layout = Layout("", parts_of.runs(found, self.source.order), params_dtype)
        layer.w4pack = Store(layer, layout)
        for suffix in layout.suffixes:
            getattr(layer, suffix).weight_loader = self._loader(layer, suffix)

    def _parts(self, layer: Any, wanted: Wanted, rank: Rank) -> tuple[Part, ...]:
        source = self.source
        if self.is_head:
            (name,) = self.members
            return (parts_of.head(name, source.specs[name], wanted, rank, source.scales(name)),)
        if len(self.members) == 1 and len(wanted.outputs) > 1:
            (name,) = self.members
            sections = _sections(layer)
            return parts_of.fused_in_file(
                name, source.specs[name], sections, wanted, rank, source.scales(name)
            )
        if len(self.members) != len(wanted.outputs):
            raise Refused(
                "the engine fuses a layer in a way that the plugin does not know",
                code="fuse",
                where=wanted.name,
                expected=f"{len(self.members)} parts: {', '.join(self.members)}",
                found=f"{len(wanted.outputs)} parts",
            )
        return tuple(self._part(name, n, wanted, rank) for n, name in enumerate(self.members))

    def _part(self, name: str, shard: int, wanted: Wanted, rank: Rank) -> Part:
        spec = self.source.specs.get(name)
        if spec is not None:
            return parts_of.packed(name, shard, spec, wanted, rank, self.source.scales(name))
        return parts_of.dense(name, shard, self.source.dense_shape(name), wanted, rank)

    def _check_bias(self, layer: Any, part: Part) -> None:
        has = getattr(layer, "has_bias", False)
        held = self.source.has_bias(part.module)
        if held == has:
            return
        raise SourceError(
            "a layer of the engine has no place for a bias of the file"
            if held
            else "a bias of the engine's layer is missing in the file",
            code="extra-tensor" if held else "missing-tensor",
            where=f"{part.module}.bias",
        )

    def _loader(self, layer: Any, suffix: str) -> Callable[..., None]:
        # The engine puts another tensor in the place of ``param``, by this name, when weights are reloaded.
        def load(param: nn.Parameter, loaded_weight: torch.Tensor, loaded_shard_id: Any = None) -> None:
            number = QKV.index(loaded_shard_id) if loaded_shard_id in QKV else loaded_shard_id
            layer.w4pack.fill(param, suffix, loaded_weight, shard=number)

        return load

    # ---- after loading ---------------------------------------------------------------------------

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check that everything came; nothing is repacked.

        Raises:
            SourceError: a tensor that did not come, an act-order that is none.
        """
        if not self.is_read:
            return
        if not is_weights_pre_processed():
            check_loaded(layer.w4pack.missing())
        layout: Layout = layer.w4pack.layout
        names = [run.parts[0].module for run in layout.runs]
        held = zip(names, layout.tensors(layer), strict=True)
        orders.check({name: tensors["act_perm"] for name, tensors in held if "act_perm" in tensors})

    def tie_weights(self, layer: Any, embed_tokens: nn.Module) -> nn.Module:
        """Leave the head as it is: a packed head is its own, whatever config.json says.

        The releases that are tested unset ``tie_word_embeddings`` by themselves where a file has a head, and
        so ask for this only when no file is read. Were it asked for otherwise, the engine would not hand the
        head's tensors over, and loading would name them as missing.
        """
        own: nn.Module = layer
        return own

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return (..., outputs of this rank) of x (..., inputs of this rank), in x's dtype."""
        layout: Layout = layer.w4pack.layout
        found, start = [], 0
        for run, tensors in zip(layout.runs, layout.tensors(layer), strict=True):
            stop = start + run.width
            part = None if bias is None else bias[start:stop]
            if run.spec is None:
                found.append(functional.linear(x, tensors["weight"], part))
            else:
                found.append(modules.product(run.spec, tensors, x, part))
            start = stop
        return found[0] if len(found) == 1 else torch.cat(found, dim=-1)


def check_loaded(missing: list[str]) -> None:
    """Raise a SourceError that names tensors that did not come."""
    if missing:
        raise SourceError(
            "tensors of packed layers did not come",
            code="missing-tensor",
            where=name_some(missing),
            expected="all tensors of the layer",
            hint="w4pack verify OUT",
        )


def _sections(layer: Any) -> tuple[int, ...]:
    """Return the columns of each part of a layer that the file holds fused, over all ranks."""
    if hasattr(layer, "total_num_kv_heads"):
        heads, size = layer.total_num_kv_heads, layer.head_size
        values = getattr(layer, "v_head_size", size)
        return (layer.total_num_heads * size, heads * size, heads * values)
    return tuple(layer.output_sizes)
