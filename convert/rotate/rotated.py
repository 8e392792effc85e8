"""The rotated model as a provider: each tensor is folded and rotated when it is asked for.

All steps of a tensor are done in float64 and rounded once, to nearest even, to the dtype that is asked for.
"""

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from w4pack.convert.core.families import natural_key
from w4pack.convert.errors import Refused, SourceError
from w4pack.convert.files.provider import Provider, is_finite, torch_dtype
from w4pack.convert.files.tensorfile import TensorInfo, tensor_nbytes
from w4pack.convert.rotate.plan import RotationPlan
from w4pack.convert.rotate.steps import Center, Divide, Fill, Gain, Shift, Turn, row_axes
from w4pack.convert.rotate.transform import rotate

BAND = 1 << 18  # float64 elements worked on at a time where a tensor can be cut: 2 MiB, which caches hold
BAND_CUDA = 1 << 25  # enough to keep a GPU busy


Other = Center | Turn | Shift | Divide | Fill  # steps that need nothing but the tensor and the source


class Rotated:
    """A provider of the tensors of a rotated model, new ones included. See ``files.provider.Provider``.

    device  where the arithmetic is done and the results lie
    """

    def __init__(self, source: Provider, plan: RotationPlan, device: str | torch.device = "cpu") -> None:
        self.source, self.plan, self.device = source, plan, torch.device(device)

    def names(self) -> Iterable[str]:
        """See ``Provider``."""
        return sorted({*self.source.names(), *self.plan.added}, key=natural_key)

    def info(self, name: str) -> TensorInfo:
        """See ``Provider``. Of a tensor that the source does not have: no file, no offset."""
        start = self.plan.added.get(name)
        if start is None:
            return self.source.info(name)
        info = self.source.info(start)
        return TensorInfo(name, info.dtype, info.shape, "", 0, tensor_nbytes(info.dtype, info.shape))

    def get(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """See ``Provider``. The tensor lies on the device.

        Raises Refused for a value that the dtype cannot hold, or for a norm whose gain of 0 hides a bias.
        """
        info = self.info(name)
        wanted = dtype or torch_dtype(info.dtype)
        values = self.source.get(self.plan.added.get(name, name)).to(self.device)
        steps = self.plan.steps.get(name, ())
        if not steps:
            return values if values.dtype == wanted else self._cast(values, wanted, name)
        self._refuse_nonfinite(values, name)
        made = torch.empty(values.shape, dtype=wanted, device=self.device)
        gains = {s.norm: self._gain(s.norm, plus_one=s.plus_one) for s in steps if isinstance(s, Gain)}
        for part, target in self._bands(values, made, row_axes(steps)):
            exact = part.to(torch.float64)
            for step in steps:
                exact = exact * gains[step.norm] if isinstance(step, Gain) else self._one(exact, step, name)
            target.copy_(round_once(exact, wanted))
        self._refuse_overflow(made, name)
        return made

    def flushed(self, name: str, zero: NDArray[np.bool_]) -> int:
        """Return how many values are 0 in another dtype that the source's are not; 0 of a rotated tensor.

        Rotation makes values of any size, so there a 0 says nothing.
        """
        if self.plan.steps.get(name):
            return 0
        source = self.source.get(self.plan.added.get(name, name))
        return int((torch.from_numpy(zero) & (source != 0).cpu()).sum())

    def _refuse_nonfinite(self, values: torch.Tensor, name: str) -> None:
        """A NaN or an infinity would spread over every vector that it lies in."""
        if not is_finite(values):
            finite = torch.isfinite(values)
            place = [int(i) for i in (~finite).nonzero()[0]]
            raise SourceError(
                "a weight is not a finite number, and rotating it would spread it",
                code="nonfinite",
                where=f"{self.plan.added.get(name, name)}{place}",
                expected="finite weights",
                found=f"{int((~finite).sum())} of {finite.numel()} not finite",
            )

    def _bands(
        self, values: torch.Tensor, made: torch.Tensor, axes: set[int]
    ) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """Cut a matrix across the axis that nothing mixes, if there is one."""
        free = {0, 1} - axes
        if values.dim() != 2 or not free:
            return [(values, made)]
        axis = min(free)
        band = BAND if self.device.type == "cpu" else BAND_CUDA
        width = max(band // max(values.shape[1 - axis], 1), 1)
        return zip(torch.split(values, width, axis), torch.split(made, width, axis), strict=True)

    def _one(self, values: torch.Tensor, step: Other, name: str) -> torch.Tensor:
        match step:
            case Center():
                return values - values.mean(step.axis, keepdim=True)
            case Turn():
                return turn(values, step)
            case Shift():
                weight, bias = self._exact(step.weight), self._exact(step.norm_bias)
                return values + weight @ bias
            case Divide():
                return self._divide(values, step, name)
            case Fill():
                return torch.full_like(values, step.value)

    def _gain(self, norm: str, *, plus_one: bool) -> torch.Tensor:
        return self._exact(norm) + (1.0 if plus_one else 0.0)

    def _exact(self, name: str) -> torch.Tensor:
        """Return a tensor of the source in float64."""
        return self.source.get(name).to(self.device, torch.float64)

    def _divide(self, bias: torch.Tensor, step: Divide, name: str) -> torch.Tensor:
        gain = self._gain(step.norm, plus_one=False)
        lost = (gain == 0) & (bias != 0)
        if bool(lost.any()):
            place = int(lost.nonzero()[0, 0])
            raise Refused(
                "a norm adds a bias where its gain is 0, which no rotated norm can",
                code="norm-bias",
                where=f"{name}[{place}]",
                expected=f"a gain that is not 0 in {step.norm}",
                found=f"gain 0, bias {float(bias[place]):g}",
                hint="`--rotate none` leaves the weights as they are",
            )
        return torch.where(bias == 0, bias, bias / torch.where(gain == 0, torch.ones_like(gain), gain))

    def _cast(self, values: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
        """Return a tensor that nothing is done to in another dtype; what was not finite may stay so."""
        made = values.to(dtype)
        if is_finite(values):
            self._refuse_overflow(made, name)
        return made

    def _refuse_overflow(self, made: torch.Tensor, name: str) -> None:
        """Finite weights must come out finite: only the dtype can be too small for them."""
        if not is_finite(made):
            finite = torch.isfinite(made)
            place = [int(i) for i in (~finite).nonzero()[0]]
            exact = float(self.get(name, torch.float64)[tuple(place)])
            raise Refused(
                f"a weight is too large for {str(made.dtype).removeprefix('torch.')}",
                code="overflow",
                where=f"{name}{place}",
                expected=f"at most {torch.finfo(made.dtype).max:g}",
                found=f"{exact:.6g}; too large are {int((~finite).sum())} of {made.numel()} values",
                hint="`--dtype bfloat16` holds them",
            )


def turn(values: torch.Tensor, step: Turn) -> torch.Tensor:
    """Rotate the vectors that a step names, the rest of the tensor kept. Returns a new tensor."""
    vectors = _vectors(values, step)
    turned = rotate(vectors, step.rotation, step.axis + 1)
    if vectors.numel() == values.numel():
        return turned.reshape(values.shape)
    made = values.clone()
    _vectors(made, step).copy_(turned)
    return made


def _vectors(values: torch.Tensor, step: Turn) -> torch.Tensor:
    """Return the vectors that a step names, as a view: they lie along the axis behind the step's."""
    n = step.rotation.n
    part = values.narrow(step.axis, step.start, step.stride * step.count)
    before, after = part.shape[: step.axis], part.shape[step.axis + 1 :]
    if step.apart > 1:
        return part.view(*before, step.count, n, step.apart, *after)
    return part.view(*before, step.count, step.stride, *after).narrow(step.axis + 1, step.offset, n)


def round_once(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``values`` rounded once to ``dtype``, to nearest, ties to even.

    From float64 torch goes to 16 bits by way of float32, which rounds twice. Here the step to float32 rounds
    to odd (an inexact result gets its last bit set), after which the second rounding decides as one would.
    """
    if values.dtype != torch.float64 or dtype not in (torch.float16, torch.bfloat16):
        return values.to(dtype)
    single = values.to(torch.float32)
    back = single.to(torch.float64)
    bits = single.view(torch.int32)  # changed in place: it is ``single``
    bits.sub_((back.abs() > values.abs()).to(torch.int32))  # towards zero
    bits.bitwise_or_((back != values).to(torch.int32))
    return single.to(dtype)
