"""The launches of the quantize kernels: arguments were checked, ``quantize_plan`` chooses.

A transform's signs lie on the card from its first use on. That first use cannot be inside a graph capture;
``prepare`` makes it before.
"""

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from w4pack.kernels import arguments, launch, tensor_maps
from w4pack.kernels.quarot import flat_plan, quantize_plan, row_plan
from w4pack.kernels.quarot.calls import Form
from w4pack.kernels.quarot.quantize_checks import ACTIVATIONS
from w4pack.kernels.quarot.transform import Transform, outside_capture

if TYPE_CHECKING:
    from torch import Tensor

INPUTS = {**ACTIVATIONS, "norm": 3}  # what is read, as the kernels number it
GAINS = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}
_int, _float = ctypes.c_int32, ctypes.c_float
_long = ctypes.c_uint64


@dataclass(frozen=True, slots=True)
class Task:
    """What one launch does.

    x       16-bit rows; k: values of a row after the activation
    kind    a key of ``INPUTS``
    heads   the transform runs over, or 0: over the row
    """

    x: "Tensor"
    k: int
    kind: str
    gain: "Tensor | None"
    eps: float
    transform: Transform
    heads: int
    codes: "Tensor"
    scales: "Tensor"
    form: Form

    @property
    def ldx(self) -> int:
        """Values from one row's beginning to the next."""
        return self.x.stride(0) if self.x.shape[0] > 1 else self.x.shape[1]

    @property
    def size(self) -> int:
        """Channels of a head, or 1."""
        return self.k // self.heads if self.heads else 1

    @property
    def acts(self) -> bool:
        """Whether x is gate and up."""
        return self.kind not in ("none", "norm")

    @property
    def tail(self) -> tuple[object, ...]:
        """The arguments that every kernel takes last."""
        return (_int(self.form.width), _int(self.form.bits), _int(self.form.order), _float(self.form.clip))


@cache
def _shared_of_multiprocessor(index: int) -> int:
    """Return the bytes of shared memory that a multiprocessor of a card has."""
    properties: Any = torch.cuda.get_device_properties(index)
    return int(properties.shared_memory_per_multiprocessor)


def run(task: Task) -> None:
    """Launch the kernel of a task on the current stream of its card."""
    index = task.x.get_device()
    if task.x.shape[0] == 0:
        return
    with torch.cuda.device(index):
        card = launch.device(index)
        stream = arguments.current_stream(index)
        row = None if task.transform.factors else row_plan.choose(card.arch, task.form.width, task.acts)
        if row is not None:
            _row(card, stream, task, row)
            return
        spread = _spread(card, task)
        if spread is not None:
            _cluster(card, stream, task, *spread)
            return
        room = card.shared
        tiled = bool(task.transform.factors) and task.gain is None and task.form.width == task.k
        found = quantize_plan.dense(task.transform, task.heads, task.size, room) if tiled else None
        many = tiled and flat_plan.is_chosen(task.x.shape[0], found is not None)
        flat = _flat_of(card, task, room) if many else None
        if flat is not None:
            _flat(card, stream, task, flat)
        elif found is not None:
            _dense(card, stream, task, *found)
        else:
            _any(card, stream, task, room)


def _spread(card: launch.Device, task: Task) -> tuple[int, quantize_plan.Dense, int] | None:
    """Return how eight blocks share each row, or None: one block a row."""
    whole = task.heads == 0 and task.form.width == task.k and task.gain is None and task.kind != "norm"
    few = task.x.shape[0] <= quantize_plan.cluster_rows(card.arch, card.multiprocessors)
    return quantize_plan.cluster(task.transform) if whole and few else None


def _cluster(
    card: launch.Device, stream: int, task: Task, log_slice: int, form: quantize_plan.Dense, m: int
) -> None:
    dtype = arguments.NAMES[task.x.dtype]
    launch.start(
        card,
        quantize_plan.cluster_entry(dtype, log_slice),
        quantize_plan.CLUSTER_BLOCKS * task.x.shape[0],
        quantize_plan.CLUSTER_THREADS,
        0,
        stream,
        task.x.data_ptr(),
        _fragments_of(task, form, card.index),
        task.codes.data_ptr(),
        task.scales.data_ptr(),
        _long(task.ldx),
        _int(m),
        _int(INPUTS[task.kind]),
        _float(task.transform.scale),
        *task.tail,
    )


def _row(card: launch.Device, stream: int, task: Task, row: row_plan.Rows) -> None:
    launch.start(
        card,
        row.entry(arguments.NAMES[task.x.dtype]),
        min(task.x.shape[0], card.multiprocessors * row.blocks(task.form.width)),
        32 * row.warps_of(task.form.width),
        0,
        stream,
        task.x.data_ptr(),
        arguments.pointer(task.gain),
        task.codes.data_ptr(),
        task.scales.data_ptr(),
        _int(task.x.shape[0]),
        _long(task.ldx),
        _int(task.k),
        _int(INPUTS[task.kind]),
        _int(0 if task.gain is None else GAINS[task.gain.dtype]),
        _float(task.eps),
        _float(1 / task.k),
        *task.tail,
    )


def _dense(card: launch.Device, stream: int, task: Task, row: quantize_plan.Dense, m: int) -> None:
    shared = row.shared_bytes(m)
    fitting = _shared_of_multiprocessor(card.index) // (shared + row.fixed_bytes + quantize_plan.RESERVED)
    launch.start(
        card,
        row.entry(arguments.NAMES[task.x.dtype]),
        min(task.x.shape[0], card.multiprocessors * min(row.resident, fitting)),
        row.threads,
        shared,
        stream,
        *_transform_arguments(task, row, m, card.index),
    )


def _flat_of(card: launch.Device, task: Task, room: int) -> flat_plan.Flat | None:
    if card.arch != flat_plan.ARCH:
        return None
    return flat_plan.choose(task.transform, task.heads, task.size, task.acts, room)


def _flat(card: launch.Device, stream: int, task: Task, row: flat_plan.Flat) -> None:
    shared, m = row.shared_bytes(task.acts), row.m
    fitting = _shared_of_multiprocessor(card.index) // (shared + quantize_plan.RESERVED)
    rows, lines = task.x.shape[0], 2 * m if task.acts else m
    launch.start(
        card,
        row.entry(arguments.NAMES[task.x.dtype]),
        min(-(-rows // row.rows), card.multiprocessors * min(row.resident, fitting)),
        row.threads,
        shared,
        stream,
        tensor_maps.lines(card, task.x.data_ptr(), (rows, lines, row.columns), task.ldx, m),
        *_pointers(task, row, card.index),
        *_numbers(task, m),
    )


def _transform_arguments(task: Task, row: quantize_plan.Tiled, m: int, index: int) -> tuple[object, ...]:
    rows, *numbers = _numbers(task, m)
    return (task.x.data_ptr(), *_pointers(task, row, index), rows, _long(task.ldx), _int(m), *numbers)


def _pointers(task: Task, row: quantize_plan.Tiled, index: int) -> tuple[int, int, int]:
    return _fragments_of(task, row, index), task.codes.data_ptr(), task.scales.data_ptr()


def _numbers(task: Task, m: int) -> tuple[object, ...]:
    """Return rows, and what all transforms by tables take behind the sizes."""
    return (
        _int(task.x.shape[0]),
        _int(INPUTS[task.kind]),
        _float(task.transform.scale),
        _float(task.eps),
        _float(1 / (m * task.k)),
        *task.tail,
    )


def _any(card: launch.Device, stream: int, task: Task, room: int) -> None:
    entries, words = _tables(task.transform, task.size, card.index)
    grid = min(task.x.shape[0], 2 * card.multiprocessors)
    needed = 4 * task.k * quantize_plan.any_rows(task.transform)
    outside = needed > room - quantize_plan.ANY_FIXED
    scratch = torch.empty(grid * 2 * task.k, dtype=torch.float32, device=task.x.device) if outside else None
    launch.start(
        card,
        quantize_plan.any_entry(arguments.NAMES[task.x.dtype]),
        grid,
        quantize_plan.ANY_THREADS,
        0 if outside else needed,
        stream,
        task.x.data_ptr(),
        arguments.pointer(task.gain),
        entries.data_ptr(),
        words.data_ptr(),
        arguments.pointer(scratch),
        task.codes.data_ptr(),
        task.scales.data_ptr(),
        _int(task.x.shape[0]),
        _long(task.ldx),
        _int(task.k),
        _int(INPUTS[task.kind]),
        _int(0 if task.gain is None else GAINS[task.gain.dtype]),
        _float(task.transform.scale),
        _float(task.eps),
        _float(1 / task.k),
        *task.tail,
    )


@cache
def _fragments(
    transform: Transform, heads: int, size: int, index: int
) -> dict[tuple[quantize_plan.Tiled, str], "Tensor"]:
    """Return a transform's tables by form and dtype: of every form it takes, for few rows and for many."""
    outside_capture(transform.key)
    card, where = launch.device(index), torch.device("cuda", index)
    arch, room = card.arch, card.shared
    found: list[tuple[quantize_plan.Tiled, int] | None] = [quantize_plan.dense(transform, heads, size, room)]
    if arch == flat_plan.ARCH:
        flats = (flat_plan.choose(transform, heads, size, acts, room) for acts in (False, True))
        found += [(row, row.m) for row in flats if row is not None]
    spread = None if heads else quantize_plan.cluster(transform)
    found += [spread[1:]] if spread else []
    return {
        (form, dtype): torch.from_numpy(quantize_plan.fragments(transform, form, m, dtype)).to(where)
        for form, m in filter(None, found)
        for dtype in arguments.NAMES.values()
    }


def _fragments_of(task: Task, form: quantize_plan.Tiled, index: int) -> int:
    tables = _fragments(task.transform, task.heads, task.size, index)
    return tables[form, arguments.NAMES[task.x.dtype]].data_ptr()


@cache
def _tables(transform: Transform, size: int, index: int) -> tuple["Tensor", "Tensor"]:
    outside_capture(transform.key)
    entries, words = (torch.from_numpy(table) for table in quantize_plan.any_tables(transform, size))
    where = torch.device("cuda", index)
    return entries.to(where), words.to(where)


def prepare(transform: Transform, heads: int, size: int, index: int) -> None:
    """Bring a transform's signs to a card, so that a later graph capture finds them.

    Args:
        transform: of the operator to come.
        heads: it runs over, or 0.
        size: channels of a head, or 1.
        index: of the card.
    """
    with torch.cuda.device(index):
        if transform.factors:
            _fragments(transform, heads, size, index)
        _tables(transform, size, index)
