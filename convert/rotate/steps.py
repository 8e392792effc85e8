"""What is done to one tensor: a list of small steps, each along one axis. Plain data, no arithmetic.

Shapes are the checkpoint's: a weight is (out, in), axis 0 its rows, axis 1 its columns; a bias or a norm has
axis 0 alone. All steps of a tensor are done in float64, and the result is rounded once.
"""

from dataclasses import dataclass

from w4pack.convert.rotate.rotation import Rotation


@dataclass(frozen=True, slots=True)
class Gain:
    """Multiply columns by a norm's gain: 1 + weight for ``plus_one``."""

    norm: str
    plus_one: bool


@dataclass(frozen=True, slots=True)
class Center:
    """Subtract the mean along an axis: the writers of a LayerNorm model add nothing to the stream's mean."""

    axis: int


@dataclass(frozen=True, slots=True)
class Turn:
    """Rotate vectors along an axis.

    start   first element of the range that is turned
    stride  elements from one vector to the next
    count   number of vectors
    offset  of the vector in its stride
    apart   elements between two neighbours of a vector: 1, or the head size for a rotation across heads
    online  the other half runs in front of the linear, at run time
    """

    axis: int
    rotation: Rotation
    start: int = 0
    stride: int = 0
    count: int = 1
    offset: int = 0
    apart: int = 1
    online: bool = False


@dataclass(frozen=True, slots=True)
class Shift:
    """Add what a norm's bias becomes behind a linear: ``b + W β``, W as it is in the source."""

    weight: str
    norm_bias: str


@dataclass(frozen=True, slots=True)
class Divide:
    """Divide a norm's bias by its gain, which readers have taken: ``β / g``."""

    norm: str


@dataclass(frozen=True, slots=True)
class Fill:
    """Set every element: what a norm's weight is once its gain has left it."""

    value: float


Step = Gain | Center | Turn | Shift | Divide | Fill


def whole(axis: int, rotation: Rotation, *, online: bool = False) -> Turn:
    """Return the step that rotates the whole axis as one vector."""
    return Turn(axis, rotation, stride=rotation.n, online=online)


def row_axes(steps: tuple[Step, ...]) -> set[int]:
    """Return the axes along which a weight's steps mix elements; across the others it can be cut in bands."""
    axes = {step.axis for step in steps if isinstance(step, Turn | Center)}
    return axes | ({1} if any(isinstance(step, Gain) for step in steps) else set())
