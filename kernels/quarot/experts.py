"""Experts on integer tensor cores: codes of each token once, then the grouped product of ``int_moe_ops``."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from w4pack.convert.core.scheme import WIDE
from w4pack.kernels import experts, gradient
from w4pack.kernels.experts import PackedExperts, StackedLinear
from w4pack.kernels.quarot import int_moe_ops
from w4pack.kernels.quarot.fronts import Front
from w4pack.kernels.quarot.modules import order_of


@dataclass(frozen=True)
class _Side:
    """One linear of every expert behind its front."""

    stack: StackedLinear
    front: Front

    def __call__(self, x: torch.Tensor, rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Return (R, out_features): pair r of its expert's layer on the front of x[rows[r]]."""
        if self.front.bits == WIDE:
            y: torch.Tensor = self.stack(self.front.values(x), rows, offsets)
            return y
        if gradient.wanted(x):
            return gradient.refused(x, self(x.detach(), rows, offsets))
        spec = self.stack.spec
        codes, scales = self.front.codes(x, order_of(spec, x.device, self.front.bits), spec.k)
        made: torch.Tensor = int_moe_ops.int_moe_gemm(
            codes,
            scales,
            self.stack.weight,
            self.stack.weight_scale,
            rows,
            offsets,
            spec.bits,
            self.front.bits,
            spec.group_size,
            order_of(spec, x.device, self.front.bits),
            spec.k,
            x.dtype,
        )
        return made[:, : spec.out_features]


class QuantizedExperts(PackedExperts):
    """All experts of a layer, called as ``PackedExperts`` are, with fronts before both of their linears.

    Args:
        made: the experts as they were loaded; their stacks are taken over.
        first: before gate and up; reads tokens.
        last: before down; reads gate and up side by side, or what the activation made of them.
        gated: ``last`` has the activation in it.
    """

    def __init__(self, made: PackedExperts, first: Front, last: Front, *, gated: bool) -> None:
        stacks = [getattr(made, name) for name in made.first]
        super().__init__(stacks, made.down_proj, made.act_fn)
        self.sides: Sequence[_Side] = [_Side(stack, first) for stack in stacks]
        self.last, self.gated = _Side(self.down_proj, last), gated

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return (T, H) of tokens (T, H), chosen experts (T, k) and their weights (T, k)."""
        return experts.routed(
            hidden_states, top_k_index, top_k_weights, self.num_experts, self._gate_up, self.last
        )

    def _gate_up(self, x: torch.Tensor, rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        outputs = [side(x, rows, offsets) for side in self.sides]
        if not self.gated:
            gate, up = outputs if len(outputs) == 2 else outputs[0].chunk(2, dim=-1)
            return self.act_fn(gate) * up
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
