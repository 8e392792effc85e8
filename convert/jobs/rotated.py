"""Tensors of a rotated model, written and compared. torch is imported here, and only for such a job."""

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from w4pack.convert.core import dtypes
from w4pack.convert.errors import require_extra
from w4pack.convert.files.provider import CheckpointProvider, torch_dtype
from w4pack.convert.jobs.outfiles import OutFiles
from w4pack.convert.planning.options import ConvertOptions
from w4pack.convert.planning.plan import OutTensor, Plan
from w4pack.convert.planning.rotation import rotation_of
from w4pack.convert.source.detect import Source

if TYPE_CHECKING:
    from w4pack.convert.rotate.rotated import Rotated

# Of how many values a tensor made again may differ by its last bit: float64 sums in another order (another
# machine, another number of threads) move a value across a rounding border about once in 10^11.
RARE = 1e-4


def rotated_model(source: Source, plan: Plan) -> "Rotated":
    """Return the provider of the planned model's tensors. Raises UsageError without torch."""
    require_extra("making rotated weights", ("torch",), "quantize")
    from w4pack.convert.rotate.rotated import Rotated

    options = ConvertOptions.from_chosen(dict(plan.options))
    return Rotated(CheckpointProvider(source.checkpoint), rotation_of(source, options))


def carrier(model: "Rotated", target: OutTensor) -> NDArray[Any]:
    """Return a tensor in the carrier dtype of its tag, rounded once."""
    import torch

    values = model.get(target.name, torch_dtype(target.dtype)).contiguous()
    flat = values.reshape(-1).view(torch.uint8).numpy()
    return flat.view(dtypes.numpy_dtype(target.dtype)).reshape(target.shape)


def write(model: "Rotated", out: OutFiles, target: OutTensor, report: dict[str, Any]) -> None:
    """Make a tensor and write it; of one that is only cast, report how many values become 0."""
    made = carrier(model, target)
    lost = model.flushed(target.name, made == 0) if target.dtype == "F16" else 0
    if lost:
        report["flushed"] = lost
    out.write(target, 0, made)


def difference(wanted: NDArray[Any], found: NDArray[Any], tag: str) -> tuple[str, str] | None:
    """Compare a tensor made again with the stored one. Returns (expected, found) in words, or None if equal.

    A few values may differ by one unit in the last place: see ``RARE``.
    """
    steps = np.abs(_ordered(wanted, tag) - _ordered(found, tag))
    wrong = int((steps > 0).sum())
    if wrong <= RARE * steps.size and not (steps > 1).any():
        return None
    first = int(np.argmax(steps.reshape(-1) > (0 if wrong > RARE * steps.size else 1)))
    place = [int(i) for i in np.unravel_index(first, wanted.shape)]
    values = [float(dtypes.to_f32(a.reshape(-1)[first : first + 1], tag)[0]) for a in (wanted, found)]
    return f"{values[0]!r} at {place}", f"{values[1]!r}; {wrong} of {steps.size} differ"


def _ordered(values: NDArray[Any], tag: str) -> NDArray[np.int64]:
    """Return integers that grow with the values, neighbours one apart; both zeros are 0."""
    size = values.dtype.itemsize
    bits = np.ascontiguousarray(values).view(f"<i{size}").astype(np.int64)
    magnitude = bits & ((1 << (8 * size - 1)) - 1)
    return np.where(bits < 0, -magnitude, magnitude)
