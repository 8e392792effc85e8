"""Codes of a layer, block by block: read from any layout, re-ordered, padded, widened, ready for any other.

A block is a rectangle of output rows (K) and columns (N). The common case, natural order and no padding, is
one read, one unpack (often a view) and one pack; everything else costs only where it is needed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm
from typing import Any

import numpy as np
from numpy.typing import NDArray

from w4pack.convert import formats
from w4pack.convert.core import bitpack
from w4pack.convert.core.order import natural_group
from w4pack.convert.core.params import PADDING
from w4pack.convert.core.quantlinear import GroupParams
from w4pack.convert.core.scheme import QuantScheme
from w4pack.convert.files.checkpoint import Checkpoint
from w4pack.convert.source.layers import SourceLayer

BLOCK_CODES = (
    8 << 20
)  # per block: 4 MiB packed at 4 bit, large enough for the disk, small enough to stay flat
NARROW = 2048  # columns per block where source and target run along different axes: runs of at least a page

Index = slice | NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Block:
    """Output rows [k0, k1) and columns [n0, n1)."""

    k0: int
    k1: int
    n0: int
    n1: int


class CodeReader:
    """Reads canonical words of one source layer for any natural rows and columns. Safe in threads.

    ``place`` maps a natural row to the row where the file stores it, for layouts that store rows sorted.
    """

    def __init__(self, checkpoint: Checkpoint, layer: SourceLayer, place: NDArray[np.int32] | None) -> None:
        self.checkpoint = checkpoint
        self.layer = layer
        self.bits = layer.scheme.bits
        self.grid = layer.module.grid(self.bits)
        self.name = layer.tensors[self.grid.suffix].name
        self.place = place

    def words(self, rows: Index, cols: Index) -> NDArray[np.uint32]:
        """Return words (ceil(rows * bits / 32), cols). Indices must be real: no padding here."""
        scheme, grid = self.layer.scheme, self.grid
        stored = _stored_rows(rows, self.place)
        unit = lcm(grid.k_unit, scheme.codes_per_word)
        k_elements, k_local = _elements(stored, scheme.in_features, grid.k_unit, grid.k_elems, unit)
        n_elements, n_local = _elements(cols, scheme.out_features, grid.n_unit, grid.n_elems, grid.n_unit)
        first, second = (k_elements, n_elements) if grid.k_axis == 0 else (n_elements, k_elements)
        block = self.checkpoint.rect(self.name, first, second)
        words: NDArray[np.uint32] = self.layer.module.unpack(block, self.bits)
        return _pick(words, self.bits, k_local, n_local)


def _stored_rows(rows: Index, place: NDArray[np.int32] | None) -> Index:
    if place is None:
        return rows
    index = place[rows]
    if index.size and bool((np.diff(index) == 1).all()):
        return slice(int(index[0]), int(index[-1]) + 1)
    return index


def _elements(index: Index, size: int, unit: int, elems: int, step: int) -> tuple[Index, Index]:
    """Return (elements of the axis to read, position of each wanted code in what was read)."""
    if isinstance(index, slice):
        low, high = index.start // step * step, -(-index.stop // step) * step
        high = min(high, -(-size // unit) * unit)
        return slice(low // unit * elems, high // unit * elems), slice(index.start - low, index.stop - low)
    steps = np.unique(index // step)
    per = step // unit * elems
    elements = (steps[:, None] * per + np.arange(per)).reshape(-1)
    elements = elements[elements < -(-size // unit) * elems]
    local = np.searchsorted(steps, index // step) * step + index % step
    return elements.astype(np.int64), local.astype(np.int32)


def _pick(words: NDArray[np.uint32], bits: int, rows: Index, cols: Index) -> NDArray[np.uint32]:
    """Take rows (in codes) and columns of a block of words; fields past the last row become zero."""
    if not (isinstance(cols, slice) and cols.start == 0 and cols.stop == words.shape[1]):
        words = np.ascontiguousarray(words[:, cols])
    per = 32 // bits
    if isinstance(rows, slice) and rows.start % per == 0:
        picked = words[rows.start // per : -(-rows.stop // per)]
        return _without_fill(picked, bits, rows.stop % per) if rows.stop % per else picked
    order = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
    return bitpack.permute_rows(words, bits, order)


def _without_fill(words: NDArray[np.uint32], bits: int, codes: int) -> NDArray[np.uint32]:
    """Return the words with only ``codes`` codes left in the last row of words."""
    last = words[-1:] & np.uint32((1 << (codes * bits)) - 1)
    return np.concatenate([words[:-1], last])


@dataclass(frozen=True, slots=True, eq=False)
class CodeMap:
    """How output codes are made from a source layer.

    rows, cols  full maps of the output's natural extent (K, N), PADDING where padded; None: identity
    out         scheme of the output
    zeros       (G', N') zero points of the output with its padding, for the codes of padded elements
    group       (K_out,) group map of the output, None: natural
    moved       parameters of the source where the conversion widens 4 to 8 bit: q8 = q - z + 128
    restored    parameters of the output where such a layer goes back: q = q8 + z - 128
    """

    reader: CodeReader
    out: QuantScheme
    rows: NDArray[np.int32] | None
    cols: NDArray[np.int32] | None
    zeros: NDArray[np.uint8]
    group: NDArray[np.int32] | None
    moved: GroupParams | None = None
    restored: GroupParams | None = None

    def words(self, block: Block) -> NDArray[np.uint32]:
        """Return the output's canonical words for a block, padding included."""
        scheme = self.reader.layer.scheme
        rows = _range(self.rows, block.k0, block.k1, min(scheme.in_features, self.out.in_features))
        cols = _range(self.cols, block.n0, block.n1, min(scheme.out_features, self.out.out_features))
        whole = _length(rows) == block.k1 - block.k0 and _length(cols) == block.n1 - block.n0
        if whole and self.out.bits == scheme.bits and not _has_padding(rows) and not _has_padding(cols):
            return self.reader.words(rows, cols)
        return self._padded(block, rows, cols)

    def stored(self, block: Block) -> NDArray[Any] | None:
        """Return the block as the file stores it, for direct repacking; None if its codes need more."""
        scheme, grid = self.reader.layer.scheme, self.reader.grid
        inside = block.k1 <= scheme.in_features and block.n1 <= scheme.out_features
        plain = (
            self.rows is None
            and self.cols is None
            and self.reader.place is None
            and self.out.bits == scheme.bits
        )
        if not (inside and plain):
            return None
        rows, _ = _elements(
            slice(block.k0, block.k1), scheme.in_features, grid.k_unit, grid.k_elems, grid.k_unit
        )
        cols, _ = _elements(
            slice(block.n0, block.n1), scheme.out_features, grid.n_unit, grid.n_elems, grid.n_unit
        )
        first, second = (rows, cols) if grid.k_axis == 0 else (cols, rows)
        return self.reader.checkpoint.rect(self.reader.name, first, second)

    def _padded(self, block: Block, rows: Index, cols: Index) -> NDArray[np.uint32]:
        groups = (natural_group(block.k1, self.out.group_size) if self.group is None else self.group)[
            block.k0 : block.k1
        ]
        codes = self.zeros[groups, block.n0 : block.n1]
        real_rows, at_rows = _real(rows)
        real_cols, at_cols = _real(cols)
        if _length(real_rows) and _length(real_cols):
            words = self.reader.words(real_rows, real_cols)
            source = bitpack.unpack_rows(words, self.reader.bits, _length(real_rows))
            codes[_cross(at_rows, at_cols)] = self._moved(source, real_rows, real_cols, block)
        return bitpack.pack_rows(codes, self.out.bits)

    def _moved(self, codes: NDArray[np.uint8], rows: Index, cols: Index, block: Block) -> NDArray[np.uint8]:
        """Move zero points into the codes, or out of them again."""
        if self.moved is not None:
            codes = codes + np.uint8(128) - _zeros_of(self.moved, self.reader.layer.scheme, rows, cols)
        elif self.restored is not None:
            here = _zeros_of(self.restored, self.out, slice(block.k0, block.k1), slice(block.n0, block.n1))
            codes = codes + here - np.uint8(128)
        return codes


def _zeros_of(params: GroupParams, scheme: QuantScheme, rows: Index, cols: Index) -> NDArray[np.uint8]:
    """Return the zero point of every element of a block."""
    if params.zeros is None:
        return np.full((1, 1), scheme.midpoint, np.uint8)
    group = params.group if params.group is not None else natural_group(scheme.in_features, scheme.group_size)
    return params.zeros[group[rows]][:, cols]


def _range(index: NDArray[np.int32] | None, start: int, stop: int, size: int) -> Index:
    if index is not None:
        return index[start:stop]
    return slice(min(start, size), min(stop, size))


def _length(index: Index) -> int:
    return int(index.stop - index.start) if isinstance(index, slice) else index.shape[0]


def _has_padding(index: Index) -> bool:
    return not isinstance(index, slice) and bool((index == PADDING).any())


def _real(index: Index) -> tuple[Index, Index]:
    """Return (source indices of the real elements, their positions in the block)."""
    if isinstance(index, slice):
        return index, slice(0, index.stop - index.start)
    at = np.flatnonzero(index != PADDING).astype(np.int32)
    return index[at], at


def _cross(rows: Index, cols: Index) -> tuple[Any, ...]:
    """Return the index of the elements at every pair of ``rows`` and ``cols``."""
    if isinstance(rows, slice) or isinstance(cols, slice):
        return rows, cols
    return np.ix_(rows, cols)


def blocks(
    code_map: CodeMap, target: formats.Grid, in_features: int, out_features: int, codes: int = BLOCK_CODES
) -> Iterator[Block]:
    """Divide K x N (padding included) into blocks that start at units of both grids.

    ``codes`` is the size aimed at. A re-ordered axis is spanned whole where the source runs across it: each
    stored row is then read once.
    """
    source = code_map.reader.grid
    k_step, n_step = lcm(source.k_unit, target.k_unit, 8), lcm(source.n_unit, target.n_unit)
    reordered_rows = code_map.rows is not None or code_map.reader.place is not None
    if source.k_axis == 0 and (target.k_axis == 0 or code_map.cols is not None):
        width = out_features
    elif source.k_axis == 1 and reordered_rows:
        width = max(codes // max(in_features, 1) // n_step, 1) * n_step
    else:
        width = min(out_features, -(-NARROW // n_step) * n_step)
    height = max(codes // max(width, 1) // k_step, 1) * k_step
    for k0 in range(0, in_features, height):
        for n0 in range(0, out_features, width):
            yield Block(k0, min(k0 + height, in_features), n0, min(n0 + width, out_features))
