"""The experts of a layer as one module: per-expert tensors of the file, stacked, and a grouped product.

It stands where the model has its fused experts and is called as they are: with tokens, the experts chosen
for each token, and their weights. Everything stays on the device and has shapes that do not depend on the
routing, so it can be captured and compiled.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import reduce

import torch
from torch import nn
from torch.nn import functional

from w4pack.kernels import gradient, moe_ops
from w4pack.kernels.modules import PackedLinear, PackedTensors, side_by_side
from w4pack.kernels.spec import SUFFIXES, LinearSpec

STACKED = SUFFIXES[:-1]  # no bias
Layer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # x, rows, offsets -> pairs


class StackedLinear(PackedTensors):
    """One linear layer of every expert, all of one spec; the expert is the first dimension of each tensor."""

    def __init__(self, spec: LinearSpec, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(spec)
        for name in STACKED:
            self.register_parameter(name, None)
            if name in tensors:
                self._put(name, tensors[name])

    def _put(self, name: str, tensor: torch.Tensor) -> None:
        self._parameters[name] = nn.Parameter(tensor, requires_grad=False)

    def forward(self, x: torch.Tensor, rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Return (R, out_features): pair r of its expert's layer on x[rows[r]]; see ``moe_ops``."""
        return product(self.spec, {name: getattr(self, name) for name in STACKED}, x, rows, offsets)


def product(
    spec: LinearSpec,
    tensors: Mapping[str, torch.Tensor | None],
    x: torch.Tensor,
    rows: torch.Tensor,
    offsets: torch.Tensor,
) -> torch.Tensor:
    """Return (R, out_features): pair r of its expert's layer on x[rows[r]]; see ``moe_ops``.

    Args:
        spec: of one expert's layer.
        tensors: ``weight``, ``weight_scale`` and what else there is, the expert as first dimension.
        x: (T, in_features).
        rows: int32 (R,), which row of x a pair reads.
        offsets: int32 (experts + 1,), where each expert's pairs begin.
    """
    if gradient.wanted(x):
        return gradient.refused(x, product(spec, tensors, x.detach(), rows, offsets))
    act_perm = tensors.get("act_perm")
    if act_perm is not None:
        x = moe_ops.moe_gather(x.contiguous(), rows, offsets, act_perm, spec.k)
        rows = torch.arange(rows.shape[0], dtype=torch.int32, device=rows.device)
    elif spec.k != spec.in_features:
        x = functional.pad(x, (0, spec.k - spec.in_features))
    y: torch.Tensor = moe_ops.moe_gemm(
        x.contiguous(),
        tensors["weight"],
        tensors["weight_scale"],
        tensors.get("weight_zero_point"),
        rows,
        offsets,
        spec.bits,
        spec.group_size,
    )
    return y[:, : spec.out_features]


def dense_product(
    weight: torch.Tensor, x: torch.Tensor, rows: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """Return (R, out_features): as ``product``, of experts left in 16 bit; ``weight`` (experts, out, in).

    Every expert is run on all pairs and its own are kept: right for any routing without waiting for the
    device, and made for the few experts of a layer that a quantizer has left out.
    """
    taken = x[rows.long()]
    pairs = torch.arange(rows.shape[0], dtype=offsets.dtype, device=rows.device).unsqueeze(-1)
    out = x.new_zeros((rows.shape[0], weight.shape[1]))
    for expert, matrix in enumerate(weight.to(x.dtype)):
        mine = (pairs >= offsets[expert]) & (pairs < offsets[expert + 1])
        out = torch.where(mine, taken @ matrix.t(), out)
    return out


class PackedExperts(nn.Module):
    """All experts of a layer: y = sum over chosen experts of weight * down(act(gate(x)) * up(x)).

    Args:
        gate_up: gate and up, side by side in one stack, or as two.
        down: the second layer.
        act_fn: the activation.
    """

    def __init__(
        self,
        gate_up: Sequence[StackedLinear],
        down: StackedLinear,
        act_fn: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        super().__init__()
        names = ("gate_up_proj",) if len(gate_up) == 1 else ("gate_proj", "up_proj")
        for name, layer in zip(names, gate_up, strict=True):
            self.add_module(name, layer)
        self.first = names
        self.down_proj = down
        self.act_fn = act_fn
        self.num_experts = down.weight.shape[0]

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return (T, H) of tokens (T, H), chosen experts (T, k) and their weights (T, k).

        The sum over a token's experts is in fp32, in the order of ``top_k_index``, rounded once: it depends
        neither on other tokens nor on the order in which pairs were computed.
        """
        return weighted(self.choices(hidden_states, top_k_index), top_k_weights).to(hidden_states.dtype)

    def choices(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Return fp32 (T, k, H): what each chosen expert makes of its token; see ``by_choice``."""
        return by_choice(x, chosen, self.num_experts, self._gated, self.down_proj)

    def _gated(self, x: torch.Tensor, rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        outputs = [getattr(self, name)(x, rows, offsets) for name in self.first]
        gate, up = outputs if len(outputs) == 2 else outputs[0].chunk(2, dim=-1)
        gated: torch.Tensor = self.act_fn(gate) * up
        return gated


class MixedExperts(nn.Module):
    """All experts of a layer whose schemes differ: stacks of each kind. Called as ``PackedExperts`` are.

    Args:
        kinds: of each kind its experts, in the order of its stacks, and the stacks.
    """

    places: torch.Tensor

    def __init__(self, kinds: Sequence[tuple[Sequence[int], PackedExperts]]) -> None:
        super().__init__()
        self.kinds = nn.ModuleList(stacks for _, stacks in kinds)
        self.num_experts = sum(len(experts) for experts, _ in kinds)
        table = places([experts for experts, _ in kinds], self.num_experts)
        self.register_buffer("places", torch.tensor(table, dtype=torch.int32), persistent=False)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return (T, H); as ``PackedExperts``, bit for bit what one stack of all of them would give."""
        made = []
        for stacks, chosen in zip(self.kinds, self.places[:, top_k_index.long()], strict=True):
            assert isinstance(stacks, PackedExperts)
            made.append(stacks.choices(hidden_states, chosen))
        return weighted(reduce(torch.add, made), top_k_weights).to(hidden_states.dtype)


def places(kinds: Sequence[Sequence[int]], experts: int) -> list[list[int]]:
    """Return for each kind, given by the numbers of its experts, where in its stacks it has each expert of
    the model; how many it has stands for nobody.
    """
    rows = [[len(kind)] * experts for kind in kinds]
    for row, kind in zip(rows, kinds, strict=True):
        for place, expert in enumerate(kind):
            row[expert] = place
    return rows


def routed(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    num_experts: int,
    gated: Layer,
    down: Layer,
) -> torch.Tensor:
    """Return (T, H): for each token the sum over its experts of weight * down(gated(x)).

    Args:
        x: tokens (T, H).
        chosen: experts (T, k), integers; ``num_experts`` means nobody here, and adds nothing.
        weights: (T, k).
        num_experts: in the stacks.
        gated: the first layers and the activation, (R, inner).
        down: the last layer.

    The sum over a token's experts is in fp32, in the order of ``chosen``, rounded once: it depends neither
    on other tokens nor on the order in which pairs were computed.
    """
    return weighted(by_choice(x, chosen, num_experts, gated, down), weights).to(x.dtype)


def by_choice(
    x: torch.Tensor, chosen: torch.Tensor, num_experts: int, gated: Layer, down: Layer
) -> torch.Tensor:
    """Return fp32 (T, k, H): what each chosen expert makes of its token, zeros where nobody is chosen.

    As ``routed``, which adds them up. Experts in several stacks, of one scheme each, are run stack by stack,
    the others' choices as nobody's: the sum of the results is exact, for all but one are zero.
    """
    tokens, choices = chosen.shape
    experts, order = torch.sort(chosen.reshape(-1), stable=True)
    borders = torch.arange(num_experts + 1, device=experts.device, dtype=experts.dtype)
    offsets = torch.searchsorted(experts, borders, out_int32=True)
    rows = (order // choices).to(torch.int32)
    inner = gated(x, rows, offsets)
    pairs = torch.arange(tokens * choices, dtype=torch.int32, device=rows.device)
    y = down(inner, pairs, offsets)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    return y[places].view(tokens, choices, -1).float()


def weighted(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return fp32 (T, H), the sum over a token's choices of weight (T, k) * value (T, k, H)."""
    return (values * weights.float().unsqueeze(-1)).sum(1)


class ExpertParts(nn.Module):
    """The experts as the file has them, single packed layers: what is filled before they are stacked."""

    def __init__(
        self, layers: Mapping[str, PackedLinear], act_fn: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        super().__init__()
        for name, layer in layers.items():  # "3.w1"
            expert, _, leaf = name.partition(".")
            if expert not in self._modules:
                self.add_module(expert, nn.Module())
            self.get_submodule(expert).add_module(leaf, layer)
        self.act_fn = act_fn


def stacked(rows: Sequence[Sequence[PackedLinear]]) -> dict[str, torch.Tensor]:
    """Return copies of the tensors of experts as a stack; of each expert, layers that lie side by side."""
    joined = [side_by_side(layers) for layers in rows]
    return {name: torch.stack([tensors[name] for tensors in joined]) for name in joined[0]}
