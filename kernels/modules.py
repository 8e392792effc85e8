"""The module that replaces a linear layer: it holds the artifact's tensors and runs the operators on them.

Parameter names are the artifact's, so that a state dictionary of the file fits as it is. A module is made on
the ``meta`` device and filled from the file; nothing is repacked.
"""

import torch
from torch import nn
from torch.nn import functional

from w4pack.kernels import ops
from w4pack.kernels.spec import LinearSpec


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
