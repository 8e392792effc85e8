"""Experts of the engine over our grouped product, with or without an act-order of each expert's own."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, MoEActivation, RoutedExperts
from vllm.model_executor.layers.fused_moe.activation import apply_moe_activation
from vllm.model_executor.utils import is_weights_pre_processed

from w4pack.convert.errors import Refused
from w4pack.kernels import experts, orders
from w4pack.kernels.vllm import parts as parts_of
from w4pack.kernels.vllm.kinds import Kind, Names, Places, kinds
from w4pack.kernels.vllm.lazy import seen
from w4pack.kernels.vllm.linear import check_loaded
from w4pack.kernels.vllm.parts import Part, Rank, Run, Wanted
from w4pack.kernels.vllm.source import Source
from w4pack.kernels.vllm.stores import Layout, Store

FIRST, LAST = "w13_", "w2_"  # the engine's names of gate and up together, and of down
SHARDS = {"w1": (FIRST, 0), "w3": (FIRST, 1), "w2": (LAST, 0)}
ACTIVATIONS = (MoEActivation.SILU, MoEActivation.GELU, MoEActivation.GELU_TANH)


def is_experts(layer: Any) -> bool:
    """Tell whether a layer of the engine is the experts of a decoder layer."""
    return isinstance(layer, RoutedExperts)


def method(
    source: Source, layer: Any, prefix: str, *, is_read: bool = True, adapters: Any = None
) -> "W4PackMoEMethod | None":
    """Return how experts compute; None: they are left in 16 bit.

    adapters  the engine's settings for LoRA: it wraps every layer that they do not leave out

    Raises:
        Refused: adapters on packed experts.
    """
    base = prefix.removesuffix(".routed_experts")
    leaves = {"w1": layer.ckpt_gate_proj_name, "w2": layer.ckpt_down_proj_name, "w3": layer.ckpt_up_proj_name}

    def name(expert: int, leaf: str) -> str:
        return f"{base}.{expert}.{leaves[leaf]}"

    count = layer.moe_config.num_logical_experts
    if not any(name(e, leaf) in source.specs for e in range(count) for leaf in SHARDS):
        return None
    if adapters is not None and adapters.target_modules is None:
        raise Refused(
            "adapters on packed experts do not run",
            code="lora-experts",
            where=base,
            expected="--enable-lora for other layers only",
            found="all layers",
            hint="vllm serve OUT --enable-lora --lora-target-modules qkv_proj o_proj",
        )
    return W4PackMoEMethod(source, name, layer.moe_config, is_read=is_read)


class W4PackMoEMethod(FusedMoEMethodBase):
    """The experts of one decoder layer, stacked kind by kind; gate and up are one product where they fit."""

    supports_pre_processed_weights = True  # as of linear layers

    def __init__(self, source: Source, name: Names, config: Any, *, is_read: bool = True) -> None:
        super().__init__(config)
        self.source = source
        self.name = name
        self.is_read = is_read

    @property
    def packed(self) -> tuple[str, ...]:
        """The packed modules of the file that the layer is, on all ranks."""
        return tuple(self.name(e, leaf) for e in range(self.moe.num_logical_experts) for leaf in SHARDS)

    # ---- before loading --------------------------------------------------------------------------

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Make the stacks' parameters.

        Raises:
            Refused: an activation that is not known, a partition that cuts a tile or a group, or rows of a
                layer with an act-order.
            SourceError: experts of other sizes than the engine's.
        """
        _check_layer(layer, self.name(0, "w1"))
        experts = range(self.moe.num_logical_experts)
        numbers = {e: layer._map_global_expert_id_to_local_expert_id(e) for e in experts}
        layer.w4pack_kinds = kinds(self.source, self.name, {e: n for e, n in numbers.items() if n != -1})
        layer.w4pack_places = Places(layer.w4pack_kinds, len(experts))
        inner = intermediate_size_per_partition
        first = Wanted(layer.layer_name, hidden_size, (inner, inner))
        last = Wanted(layer.layer_name, inner, (hidden_size,))
        layer.w4pack = {}
        for prefix, leaves, wanted in ((FIRST, ("w1", "w3"), first), (LAST, ("w2",), last)):
            runs = [run for kind in layer.w4pack_kinds for run in self._runs(kind, leaves, wanted)]
            layout = Layout(prefix, tuple(runs), params_dtype, self._suffixes(leaves))
            layer.w4pack[prefix] = Store(layer, layout)
            for suffix in layout.suffixes:
                getattr(layer, prefix + suffix).weight_loader = self._loader(layer, suffix)

    def _suffixes(self, leaves: Sequence[str]) -> frozenset[str]:
        """Return the kinds of tensors that some layers of the experts of all ranks have."""
        modules = (self.name(e, leaf) for e in range(self.moe.num_logical_experts) for leaf in leaves)
        specs = {self.source.specs.get(module) for module in modules}
        return frozenset(suffix for spec in specs if spec is not None for suffix in spec.shapes())

    def _runs(self, kind: Kind, leaves: Sequence[str], wanted: Wanted) -> Iterator[Run]:
        """Yield the stacks of some layers of the experts of a kind."""
        parts = [self._part(self.name(kind.experts[0], leaf), SHARDS[leaf][1], wanted) for leaf in leaves]
        for run in parts_of.runs(parts, kind.order(self.source, self.name)):
            yield replace(run, experts=kind.numbers)

    def _part(self, module: str, shard: int, wanted: Wanted) -> Part:
        """Return the share of one layer of every expert that is like this one."""
        config = self.moe.moe_parallel_config
        rank = Rank(config.tp_rank, config.tp_size)
        spec = self.source.specs.get(module)
        if spec is None:
            return parts_of.dense(module, shard, self.source.dense_shape(module), wanted, rank)
        return parts_of.packed(module, shard, spec, wanted, rank, self.source.scales(module))

    def _loader(self, layer: Any, suffix: str) -> Callable[..., bool | None]:
        # The engine knows these arguments by name, and gives another ``param`` when weights are reloaded.
        def load(
            param: nn.Parameter,
            loaded_weight: torch.Tensor,
            weight_name: str,
            shard_id: str,
            expert_id: int,
            return_success: bool = False,
        ) -> bool | None:
            """Copy a tensor of one expert into the stacks; not if another rank has the expert."""
            local = layer._map_global_expert_id_to_local_expert_id(expert_id)
            if local == -1:
                seen(loaded_weight)
            else:
                prefix, shard = SHARDS[shard_id]
                module = self.name(expert_id, shard_id)
                store = layer.w4pack[prefix]
                store.fill(param, suffix, loaded_weight, shard=shard, expert=(local, module))
            return local != -1 if return_success else None

        return load

    # ---- after loading ---------------------------------------------------------------------------

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check that every expert of this rank came; nothing is repacked.

        Raises:
            SourceError: a tensor that did not come, an act-order that is none.
        """
        if self.is_read and not is_weights_pre_processed():
            check_loaded(list(self._missing(layer)))
        perms = {}
        for prefix, store in layer.w4pack.items():
            for run, tensors in zip(store.layout.runs, store.layout.tensors(layer), strict=True):
                if "act_perm" in tensors:
                    perms[f"{run.parts[0].module} ({prefix}act_perm)"] = tensors["act_perm"]
        orders.check(perms)

    def _missing(self, layer: Any) -> Iterator[str]:
        for kind in layer.w4pack_kinds:
            for leaf, (prefix, shard) in SHARDS.items():
                store = layer.w4pack[prefix]
                run = next(r for r in _of(kind, store.layout) if shard in [p.shard for p in r.parts])
                for module in (self.name(expert, leaf) for expert in kind.experts):
                    yield from (f"{module}.{s}" for s in run.shapes() if not store.came(module, s))

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """Return nothing: the engine's own expert kernels are not used."""

    @property
    def topk_indices_dtype(self) -> torch.dtype | None:
        """Dtype of the routing: as the router gives it."""
        return None

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the sum of the chosen experts of this rank, (T, hidden), in x's dtype."""
        results = (self._of_kind(layer, number, x, topk_ids) for number in range(len(layer.w4pack_kinds)))
        return experts.weighted(reduce(torch.Tensor.add_, results), topk_weights).to(x.dtype)

    def _of_kind(self, layer: Any, number: int, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Return fp32 (T, k, hidden): what the experts of a kind make of the tokens that chose them."""
        kind: Kind = layer.w4pack_kinds[number]
        first, (last,) = _products(layer, kind, FIRST), _products(layer, kind, LAST)
        count, gated = len(kind.numbers), partial(_gated, layer.activation, first)
        return experts.by_choice(x, _chosen(layer, number, count, chosen), count, gated, last)


def _chosen(layer: Any, kind: int, count: int, experts: torch.Tensor) -> torch.Tensor:
    """Return which of the ``count`` experts of a kind are chosen; ``count``: one of another kind or rank."""
    if len(layer.w4pack_kinds) > 1:
        places: Places = layer.w4pack_places
        return places.chosen(kind, experts)
    if layer.expert_map is None:
        return experts
    chosen = layer.expert_map[experts.long()]
    return torch.where(chosen < 0, count, chosen)  # behind all of ours


def _gated(
    activation: Any,
    products: Sequence[experts.Layer],
    x: torch.Tensor,
    rows: torch.Tensor,
    offsets: torch.Tensor,
) -> torch.Tensor:
    """Return the activation of gate times up, (R, inner)."""
    outputs = [product(x, rows, offsets) for product in products]
    both = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
    out = both.new_empty((both.shape[0], both.shape[1] // 2))
    apply_moe_activation(activation, out, both.contiguous())
    return out


def _of(kind: Kind, layout: Layout) -> list[Run]:
    """Return the stacks of a kind."""
    return [run for run in layout.runs if run.experts == kind.numbers]


def _products(layer: Any, kind: Kind, prefix: str) -> list[experts.Layer]:
    layout: Layout = layer.w4pack[prefix].layout
    pairs = zip(layout.runs, layout.tensors(layer), strict=True)
    return [_product(run, tensors) for run, tensors in pairs if run.experts == kind.numbers]


def _product(run: Run, tensors: dict[str, torch.Tensor]) -> experts.Layer:
    if run.spec is None:
        return partial(experts.dense_product, tensors["weight"])
    return partial(experts.product, run.spec, tensors)


def _check_layer(layer: Any, where: str) -> None:
    """Refuse what the grouped product does not do, at start."""
    wanted = {
        "activation": (layer.activation in ACTIVATIONS, layer.activation),
        "weights on the input": (not layer.apply_router_weight_on_input, True),
        "clamped activations": (getattr(layer, "swiglu_limit", None) is None, "swiglu_limit"),
        "biases": (not getattr(layer.moe_config, "has_bias", False), True),
    }
    for what, (holds, found) in wanted.items():
        if not holds:
            raise Refused(
                "the model class computes its experts in a way that the packed ones do not",
                code="experts",
                where=where,
                expected="gate, up, SiLU or GELU, down; no biases",
                found=f"{what}: {found}",
            )
