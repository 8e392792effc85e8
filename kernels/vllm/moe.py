"""Experts of the engine over our grouped product, with or without an act-order of each expert's own."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, MoEActivation, RoutedExperts
from vllm.model_executor.layers.fused_moe.activation import apply_moe_activation
from vllm.model_executor.utils import is_weights_pre_processed

from w4pack.convert.errors import Refused
from w4pack.kernels import experts, orders
from w4pack.kernels.vllm import parts as parts_of
from w4pack.kernels.vllm.lazy import seen
from w4pack.kernels.vllm.linear import check_loaded
from w4pack.kernels.vllm.parts import Part, Rank, Wanted
from w4pack.kernels.vllm.source import Source
from w4pack.kernels.vllm.stores import Layout, Store

FIRST, LAST = "w13_", "w2_"  # the engine's names of gate and up together, and of down
SHARDS = {"w1": (FIRST, 0), "w3": (FIRST, 1), "w2": (LAST, 0)}
ACTIVATIONS = (MoEActivation.SILU, MoEActivation.GELU, MoEActivation.GELU_TANH)
Names = Callable[[int, str], str]  # expert, "w1" | "w2" | "w3" -> module of the file


def is_experts(layer: Any) -> bool:
    """Tell whether a layer of the engine is the experts of a decoder layer."""
    return isinstance(layer, RoutedExperts)


def method(
    source: Source, layer: Any, prefix: str, *, is_read: bool = True, adapters: Any = None
) -> "W4PackMoEMethod | None":
    """Return how experts compute; None: they are left in 16 bit.

    adapters  the engine's settings for LoRA: it wraps every layer that they do not leave out

    Raises:
        Refused: some experts of a layer are packed and others are not; adapters on packed experts.
    """
    base = prefix.removesuffix(".routed_experts")
    leaves = {"w1": layer.ckpt_gate_proj_name, "w2": layer.ckpt_down_proj_name, "w3": layer.ckpt_up_proj_name}

    def name(expert: int, leaf: str) -> str:
        return f"{base}.{expert}.{leaves[leaf]}"

    wanted = [name(e, leaf) for e in range(layer.moe_config.num_logical_experts) for leaf in SHARDS]
    found = [module for module in wanted if module in source.specs]
    if not found:
        return None
    if len(found) < len(wanted):
        raise Refused(
            "some experts of a layer are packed and others are not",
            code="experts",
            where=next(module for module in wanted if module not in source.specs),
            expected=f"{len(wanted)} packed layers in {base}",
            found=str(len(found)),
            hint=f"w4pack convert SOURCE OUT --ignore 're:{base}.*' leaves all of them in 16 bit",
        )
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
    """The experts of one decoder layer, stacked; gate and up as one product where they are alike."""

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
            Refused: experts that differ, an activation that is not known, a partition that cuts a tile or
                a group, or rows of a layer with an act-order.
            SourceError: experts of other sizes than the engine's.
        """
        _check_layer(layer, self.name(0, "w1"))
        config = self.moe.moe_parallel_config
        rank = Rank(config.tp_rank, config.tp_size)
        inner = intermediate_size_per_partition
        first = Wanted(layer.layer_name, hidden_size, (inner, inner))
        last = Wanted(layer.layer_name, inner, (hidden_size,))
        gate_up = (self._part("w1", 0, first, rank), self._part("w3", 1, first, rank))
        layouts = (
            Layout(FIRST, parts_of.runs(gate_up, self._order), params_dtype, num_experts),
            Layout(
                LAST, parts_of.runs([self._part("w2", 0, last, rank)], self._order), params_dtype, num_experts
            ),
        )
        layer.w4pack = {layout.prefix: Store(layer, layout) for layout in layouts}
        for layout in layouts:
            for suffix in layout.suffixes:
                getattr(layer, layout.prefix + suffix).weight_loader = self._loader(layer, suffix)

    def _part(self, leaf: str, shard: int, wanted: Wanted, rank: Rank) -> Part:
        """Return the share of one layer of every expert, which must all be alike."""
        kinds = {}
        for expert in range(self.moe.num_logical_experts):
            module = self.name(expert, leaf)
            kinds[self.source.specs[module], self.source.scales(module)] = module
        if len(kinds) > 1:
            raise Refused(
                "the experts of a layer are packed in different ways",
                code="experts-mixed",
                where=", ".join(kinds.values()),
                expected="the same bits, groups, symmetry, order and scale dtype in every expert of a layer",
                found=" and ".join(f"{s.bits} bit g{s.group_size}, scales {dtype}" for s, dtype in kinds),
            )
        ((spec, scales),) = kinds
        return parts_of.packed(self.name(0, leaf), shard, spec, wanted, rank, scales)

    def _order(self, module: str) -> bytes | None:
        """Return the orders of a layer of all experts, by the module of the first one."""
        leaf = next(leaf for leaf in SHARDS if self.name(0, leaf) == module)
        found = [self.source.order(self.name(e, leaf)) for e in range(self.moe.num_logical_experts)]
        known = [order for order in found if order is not None]
        return b"".join(known) if len(known) == len(found) else None

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

    def _missing(self, layer: Any) -> list[str]:
        here = [
            expert
            for expert in range(self.moe.num_logical_experts)
            if layer._map_global_expert_id_to_local_expert_id(expert) != -1
        ]
        found = []
        for leaf, (prefix, shard) in SHARDS.items():
            store = layer.w4pack[prefix]
            part = next(p for run in store.layout.runs for p in run.parts if p.shard == shard)
            for module in (self.name(expert, leaf) for expert in here):
                suffixes = part.spec.shapes() if part.spec is not None else ()
                found += [f"{module}.{suffix}" for suffix in suffixes if not store.came(module, suffix)]
        return found

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
        chosen = topk_ids if layer.expert_map is None else layer.expert_map[topk_ids.long()]
        count = layer.w4pack[FIRST].layout.experts
        if layer.expert_map is not None:
            chosen = torch.where(chosen < 0, count, chosen)  # another rank's: behind all of ours
        first, last = (_products(layer, prefix) for prefix in (FIRST, LAST))

        def gated(x: torch.Tensor, rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
            outputs = [product(x, rows, offsets) for product in first]
            both = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
            out = both.new_empty((both.shape[0], both.shape[1] // 2))
            apply_moe_activation(layer.activation, out, both.contiguous())
            return out

        return experts.routed(x, chosen, topk_weights, count, gated, last[0])


def _products(layer: Any, prefix: str) -> list[experts.Layer]:
    layout: Layout = layer.w4pack[prefix].layout
    pairs = zip(layout.runs, layout.tensors(layer), strict=True)
    return [partial(experts.product, run.spec, tensors) for run, tensors in pairs if run.spec is not None]


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
