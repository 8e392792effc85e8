"""Where every byte of a file goes on the device: pure arithmetic, no torch, no file access.

A *target* is a tensor that will exist: a file's tensor, a slice of it (``take``), several side by side
(``concat``: q/k/v, gate/up), several on top of each other (``stack``: experts). Targets are values made from
headers; nothing is read. Example, the experts of a layer, gate and up fused:

    stack([concat([take(gate[e]), take(up[e])], 1) for e in range(experts)])

``make_plan`` turns targets into *chunks*: what to read from a file into a staging buffer, and what to copy
from there to the device. Tensors that are taken whole and lie together in a file move as one piece and
become views of one arena; fused and stacked ones are filled by pitched copies from the same buffers. So no
tensor exists twice, and nothing happens per tensor while bytes move.
"""

import gc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from w4pack.convert.files.tensorfile import BITS, TensorInfo
from w4pack.kernels.chunks import CHUNK, GAP, Chunk, Cutter, Move

ALIGN = 256  # bytes, of every target that starts a run: what device allocators give, and more than loads need
KEPT_ALIGN = 16  # bytes: the widest load of a kernel. A tensor less aligned within its file starts a run
Range = tuple[int, int]


class Part(NamedTuple):
    """A rectangle of a file that fills a rectangle of a target. All in bytes, but for ``rows``.

    name    the file's tensor, for messages and to know what is used
    offset  of the first row from the start of ``file``; the next row lies ``pitch`` further
    width   of a row
    at      of the first row from the start of the target; the next row lies ``step`` further
    """

    name: str
    file: str
    offset: int
    pitch: int
    width: int
    rows: int
    at: int
    step: int


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor to be: safetensors dtype, shape, and the parts that fill it completely."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * BITS[self.dtype] // 8


class Place(NamedTuple):
    """Where a target lies: arena number, byte offset in it, safetensors dtype, shape (row-major)."""

    arena: int
    offset: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """What to read and where it goes.

    places        key -> place
    arenas        size in bytes of each device allocation; one for each file that gives something
    chunks        work items, in file order; any thread may do any of them
    bytes_needed  of the targets, shared ones once
    bytes_read    from the files: more than needed where rows are too short to skip between them
    """

    places: dict[str, Place] = field(repr=False)
    arenas: tuple[int, ...]
    chunks: tuple[Chunk, ...] = field(repr=False)
    bytes_needed: int
    bytes_read: int

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files that are read, in order."""
        return tuple(dict.fromkeys(chunk.file for chunk in self.chunks))


# ---------------------------------------------------------------- targets


def take(info: TensorInfo, cuts: Mapping[int, Range] | None = None) -> Target:
    """Return a tensor of a file, or a slice of it.

    cuts  dimension -> (start, stop), for dimension 0 and one other at most
    Raises ValueError for a cut out of range, or through the middle of a byte.
    """
    cuts = {d: c for d, c in cuts.items() if c != (0, info.shape[d])} if cuts else {}
    if not cuts:
        return Target(info.dtype, info.shape, _parts(info, 0, info.nbytes, info.nbytes, 1))
    for d, (start, stop) in cuts.items():
        if not 0 <= start <= stop <= info.shape[d]:
            raise ValueError(f"{info.name}: cut {start}:{stop} of dimension {d} of {list(info.shape)}")
    shape = tuple(cuts[d][1] - cuts[d][0] if d in cuts else n for d, n in enumerate(info.shape))
    inner = [d for d in cuts if d > 0]
    if len(inner) > 1:
        raise ValueError(f"{info.name}: cuts of dimensions {inner}")
    axis = inner[0] if inner else 0  # rows of the rectangle run over the dimensions before it
    pitch = _bytes(info, prod(info.shape[axis:]))
    cell = prod(info.shape[axis + 1 :])
    start, stop = cuts.get(axis, (0, info.shape[axis]))
    first = cuts[0][0] * prod(info.shape[1:]) if inner and 0 in cuts else 0
    begin, width = _bytes(info, first + start * cell), _bytes(info, (stop - start) * cell)
    return Target(info.dtype, shape, _parts(info, begin, pitch, width, prod(shape[:axis])))


def _bytes(info: TensorInfo, elements: int) -> int:
    whole, rest = divmod(elements * BITS[info.dtype], 8)
    if rest:
        raise ValueError(f"{info.name}: {elements} elements of {info.dtype} do not fill whole bytes")
    return whole


def _parts(info: TensorInfo, begin: int, pitch: int, width: int, rows: int) -> tuple[Part, ...]:
    if not width * rows:
        return ()
    pitch = width if rows == 1 else pitch
    return (Part(info.name, info.file, info.offset + begin, pitch, width, rows, 0, width),)


def concat(targets: Sequence[Target], dim: int) -> Target:
    """Return targets one after another along a dimension. Raises ValueError unless the others are equal."""
    first = targets[0]
    outside = (first.dtype, first.shape[:dim], first.shape[dim + 1 :])
    if any((t.dtype, t.shape[:dim], t.shape[dim + 1 :]) != outside for t in targets):
        raise ValueError(f"cannot put {[(t.dtype, t.shape) for t in targets]} side by side along {dim}")
    outer = prod(first.shape[:dim])
    total = sum(t.nbytes for t in targets) // outer if outer else 0
    parts: list[Part] = []
    base = 0
    for t in targets:
        inner = t.nbytes // outer if outer else 0
        parts += (_widen(part, inner, total, base, outer) for part in t.parts)
        base += inner
    shape = (*first.shape[:dim], sum(t.shape[dim] for t in targets), *first.shape[dim + 1 :])
    return Target(first.dtype, shape, tuple(parts))


def _widen(part: Part, inner: int, total: int, base: int, outer: int) -> Part:
    """Move a part from a matrix with rows of ``inner`` bytes to column ``base`` of one with ``total``."""
    name, file, offset, pitch, width, rows, at, step = part
    if outer == 1:
        return Part(name, file, offset, pitch, width, rows, at + base, step)
    if width > inner and width == step == pitch and width % inner == 0:  # rows that lie together: cut them
        rows *= width // inner
        width = step = pitch = inner
    row, col = divmod(at, inner)
    if col + width > inner or (rows > 1 and step % inner):
        raise ValueError(f"{name}: rows of {width} bytes do not fit into rows of {inner}")
    return Part(name, file, offset, pitch, width, rows, row * total + base + col, step // inner * total)


def stack(targets: Sequence[Target]) -> Target:
    """Return targets of one shape and dtype as one with a new first dimension."""
    first = targets[0]
    if any((t.dtype, t.shape) != (first.dtype, first.shape) for t in targets):
        raise ValueError(f"cannot stack {sorted({(t.dtype, t.shape) for t in targets})}")
    size = first.nbytes
    parts = (Part(*p[:6], p.at + i * size, p.step) for i, t in enumerate(targets) for p in t.parts)
    return Target(first.dtype, (len(targets), *first.shape), tuple(parts))


def rest(tensors: Mapping[str, TensorInfo], used: Iterable[Target]) -> dict[str, Target]:
    """Return whole targets, under their own names, for the tensors that no target of ``used`` takes from."""
    names = {part.name for target in used for part in target.parts}
    return {name: take(info) for name, info in tensors.items() if name not in names}


# ---------------------------------------------------------------- the plan


def make_plan(targets: Mapping[str, Target], *, chunk: int = CHUNK, gap: int = GAP) -> Plan:
    """Place targets and divide the work.

    chunk  bytes of a staging buffer
    gap    bytes between two rows of a slice that are read along rather than skipped
    Two keys of one tensor (tied weights) share one place.
    """
    collecting = gc.isenabled()
    gc.disable()  # nothing here is garbage; the collector would walk 100,000 new tuples again and again
    try:
        return _make_plan(targets, Cutter(chunk, gap))
    finally:
        if collecting:
            gc.enable()


def _make_plan(targets: Mapping[str, Target], cutter: Cutter) -> Plan:
    unique = {t.parts: t for t in targets.values() if t.parts}.values()
    arenas = _Arenas(sorted({part.file for t in unique for part in t.parts}))
    arenas.add_runs([t for t in unique if _is_run(t)])
    for target in unique:
        if not _is_run(target):
            arenas.add(target)
    starts = arenas.starts
    places = {key: Place(*starts.get(t.parts, (0, 0)), t.dtype, t.shape) for key, t in targets.items()}
    for move in sorted(arenas.moves):
        cutter.add(move)
    chunks = cutter.close()
    needed = sum(move.width * move.rows for move in arenas.moves)
    read = sum(r.nbytes * r.rows for c in chunks for r in c.reads)
    sizes = tuple(_up(size, ALIGN) for size in arenas.sizes) or (0,)
    return Plan(places, sizes, chunks, needed, read)


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _is_run(target: Target) -> bool:
    """Whether a target is one piece of a file, byte for byte."""
    part = target.parts[0]
    return len(target.parts) == 1 and (part.rows == 1 or part.pitch == part.width == part.step)


class _Arenas:
    """One arena a file: how much is in it, where each target starts, what must be moved there."""

    def __init__(self, files: Sequence[str]) -> None:
        self._number = {file: i for i, file in enumerate(files)}
        self.sizes = [0] * len(files)
        self.starts: dict[tuple[Part, ...], tuple[int, int]] = {}  # parts -> arena, offset
        self.moves: list[Move] = []

    def add_runs(self, targets: Iterable[Target]) -> None:
        """Place pieces of files. Those that follow each other in a file do so in the arena: one move."""
        for target in sorted(targets, key=lambda t: (t.parts[0].file, t.parts[0].offset)):
            (part,) = target.parts
            arena, nbytes = self._number[part.file], part.width * part.rows
            last = self.moves[-1] if self.moves else None
            if (
                last is not None
                and (last.file, last.offset + last.width) == (part.file, part.offset)
                and self.sizes[arena] % KEPT_ALIGN == 0
            ):
                start, width = self.sizes[arena], last.width + nbytes
                self.moves[-1] = Move(part.file, last.offset, width, width, 1, arena, last.to, width)
            else:
                start = _up(self.sizes[arena], ALIGN)
                self.moves.append(Move(part.file, part.offset, nbytes, nbytes, 1, arena, start, nbytes))
            self.sizes[arena] = start + nbytes
            self.starts[target.parts] = arena, start

    def add(self, target: Target) -> None:
        """Place any other target behind what is in the arena of its first part's file."""
        arena = self._number[target.parts[0].file]
        start = _up(self.sizes[arena], ALIGN)
        for p in target.parts:
            self.moves.append(Move(p.file, p.offset, p.pitch, p.width, p.rows, arena, start + p.at, p.step))
        self.sizes[arena] = start + target.nbytes
        self.starts[target.parts] = arena, start
