"""The module that replaces a linear layer: it holds the artifact's tensors and runs the operators on them.

Parameter names are the artifact's, so that a state dictionary of the file fits as it is. A module is made on
the ``meta`` device and filled from the file; nothing is repacked.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from w4pack.kernels import ops


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """What the artifact's config says of one linear layer; ``stored_*`` are the padded sizes of the file."""

    in_features: int
    out_features: int
    bits: int = 4
    group_size: int = 128
    sym: bool = True
    act_order: bool = False
    bias: bool = False
    stored_in: int | None = None
    stored_out: int | None = None

    @property
    def k(self) -> int:
        """Rows of the packed weight."""
        return self.stored_in or self.in_features

    @property
    def n(self) -> int:
        """Columns of the packed weight."""
        return self.stored_out or self.out_features

    @property
    def groups(self) -> int:
        """Rows of the scales; the last group may be short."""
        return 1 if self.group_size == -1 else -(-self.k // self.group_size)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor, by the name it has in the file after the module's."""
        shapes: dict[str, tuple[int, ...]] = {
            "weight": (self.k // 16, self.n * self.bits // 2),
            "weight_scale": (self.groups, self.n),
        }
        if not self.sym:
            shapes["weight_zero_point"] = (self.groups, self.n * self.bits // 32)
        if self.act_order:
            shapes["act_perm"] = (self.in_features,)
        if self.bias:
            shapes["bias"] = (self.out_features,)
        return shapes


class PackedLinear(nn.Module):
    """y = x W + b with W in the Marlin tile; x and y have any leading dimensions."""

    weight: nn.Parameter
    weight_scale: nn.Parameter
    weight_zero_point: nn.Parameter | None
    act_perm: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        spec: LinearSpec,
        *,
        dtype: torch.dtype = torch.float16,
        scale_dtype: torch.dtype | None = None,
        device: torch.device | str = "meta",
    ) -> None:
        super().__init__()
        self.spec = spec
        dtypes = {"weight_scale": scale_dtype or dtype, "bias": dtype}
        shapes = spec.shapes()
        for name in ("weight", "weight_scale", "weight_zero_point", "act_perm", "bias"):
            tensor = None
            if name in shapes:
                empty = torch.empty(shapes[name], dtype=dtypes.get(name, torch.int32), device=device)
                tensor = nn.Parameter(empty, requires_grad=False)
            self.register_parameter(name, tensor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (..., out_features) of x (..., in_features), in x's dtype."""
        spec = self.spec
        rows = self._rows(x.reshape(-1, spec.in_features))
        bias: torch.Tensor | None = self.bias
        if bias is not None and spec.n != spec.out_features:
            bias = functional.pad(bias, (0, spec.n - spec.out_features))
        y: torch.Tensor = ops.gemm(
            rows, self.weight, self.weight_scale, self.weight_zero_point, bias, spec.bits, spec.group_size
        )
        return y[:, : spec.out_features].reshape(*x.shape[:-1], spec.out_features)

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        """Bring activations into the order and width of the packed rows."""
        if self.act_perm is not None:
            gathered: torch.Tensor = ops.gather(x, self.act_perm, self.spec.k)
            return gathered
        if self.spec.k != self.spec.in_features:
            return functional.pad(x, (0, self.spec.k - self.spec.in_features))
        return x.contiguous()

    def extra_repr(self) -> str:
        """Say what the layer is in a printed model."""
        s = self.spec
        kind = "symmetric" if s.sym else "zero points"
        order = ", act-order" if s.act_order else ""
        return f"{s.in_features} -> {s.out_features}, {s.bits} bit, groups of {s.group_size}, {kind}{order}"
