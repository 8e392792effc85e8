"""Launches of the kernels of the quantized cache. Nothing here waits for the card or depends on lengths."""

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch

from w4pack.convert.rotate.constructions import matrix
from w4pack.kernels import arguments, launch
from w4pack.kernels.checks import require
from w4pack.kernels.quarot import kv_layout, kv_tiles
from w4pack.kernels.quarot.calls import Append, Attention
from w4pack.kernels.quarot.transform import Transform, outside_capture

if TYPE_CHECKING:
    from torch import Tensor

Argument = ctypes.c_int32 | ctypes.c_float | int
_int, _float = ctypes.c_int32, ctypes.c_float


@cache
def _factors(transform: str) -> tuple[np.ndarray, int]:
    """Return (matrix of what comes before the trailing powers of two, log2 of those)."""
    factors, log_r = list(Transform.of(transform).factors), 0
    while factors and factors[-1][1] == "sylvester":
        log_r += factors.pop()[0].bit_length() - 1
    dense = np.ones((1, 1), np.int8)
    for order, construction in factors:
        dense = np.kron(dense, matrix(order, construction))
    return dense, log_r


def sign_words(transform: str) -> np.ndarray:
    """Return the signs of the dense factor, a bit each: int32, rows of whole words."""
    dense, _ = _factors(transform)
    padded = np.zeros((dense.shape[0], -(-dense.shape[1] // 32) * 32), np.uint8)
    padded[:, : dense.shape[1]] = dense < 0
    return np.packbits(padded, axis=1, bitorder="little").view(np.int32).copy()


@cache
def _signs(transform: str, index: int) -> torch.Tensor:
    """Return the signs of a transform on a card; kept for good."""
    outside_capture(transform)
    return torch.from_numpy(sign_words(transform)).to(f"cuda:{index}")


def _turn(transform: str, head_dim: int, index: int) -> tuple[Argument, ...]:
    """Return the kernels' arguments for R3: table of signs, its order, log2 of the rest, block, scale."""
    dense, log_r = _factors(transform)
    m, found = dense.shape[0], Transform.of(transform)
    if head_dim & (head_dim - 1) == 0:  # butterflies alone
        require(m == 1, "the transform has no kernel", "transform", "Sylvester's matrix", transform)
    pointer = _signs(transform, index).data_ptr() if m > 1 else 0
    return (pointer, _int(m), _int(log_r), _int(found.block), _float(found.scale))


def append(given: Append) -> None:
    """Quantize k and v into their pages; the arguments were checked.

    Raises:
        UsageError: the transform has no kernel.
    """
    k, v, codes, params, block_table, start, transform, clip_k, clip_v, bits, guide = given
    batch, heads, tokens, size = k.shape
    if k.numel() == 0:
        return
    index = k.get_device()
    with torch.cuda.device(index):
        card = launch.device(index)
        launch.start(
            card,
            kv_tiles.append_entry(size),
            (kv_tiles.append_blocks(batch, tokens * heads * 2, card.multiprocessors), batch),
            32 * kv_tiles.APPEND_ROWS,
            0,
            arguments.current_stream(index),
            k.data_ptr(),
            v.data_ptr(),
            codes.data_ptr(),
            params.data_ptr(),
            block_table.data_ptr(),
            start.data_ptr(),
            arguments.pointer(guide),
            *_turn(transform, size, index),
            *k.stride()[:3],
            *v.stride()[:3],
            _int(heads),
            _int(tokens),
            _int(block_table.shape[1]),
            _int(codes.shape[0]),
            _int(bits),
            _int(k.dtype == torch.bfloat16),
            _float(clip_k),
            _float(clip_v),
        )


@dataclass(frozen=True, slots=True)
class _Attention:
    """A launch of attention: what it was given, and the arguments that its kernels share.

    pages  addresses of codes, parameters and the block table
    turn   R3: see ``_turn``
    shape  heads, KV heads, pages of a sequence
    rule   window, whether q is bf16, scale, soft cap
    """

    card: launch.Device
    stream: int
    given: Attention
    out: "Tensor"
    pages: tuple[int, int, int]
    turn: tuple[Argument, ...]
    shape: tuple[Argument, ...]
    rule: tuple[Argument, ...]

    @property
    def span(self) -> tuple[int, int]:
        """Addresses of the lengths, and of where each sequence begins or 0."""
        return self.given.lengths.data_ptr(), arguments.pointer(self.given.first)

    @property
    def slots(self) -> int:
        """What the block table has room for."""
        return self.given.block_table.shape[1] * kv_layout.PAGE


def attention(given: Attention) -> "Tensor":
    """Return (B, T, heads, head_dim); the arguments were checked.

    Raises:
        UsageError: the transform has no kernel.
    """
    q, codes = given.q, given.codes
    batch, heads, tokens, size = q.shape
    out = torch.empty((batch, tokens, heads, size), dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    index = q.get_device()
    with torch.cuda.device(index):
        card = launch.device(index)
        call = _Attention(
            card,
            arguments.current_stream(index),
            given,
            out,
            (codes.data_ptr(), given.params.data_ptr(), given.block_table.data_ptr()),
            _turn(given.transform, size, index),
            (_int(heads), _int(codes.shape[2]), _int(given.block_table.shape[1])),
            (_int(given.window), _int(q.dtype == torch.bfloat16), _float(given.scale), _float(given.softcap)),
        )
        unpacks = kv_tiles.unpacks(card.arch, size, tokens, heads // codes.shape[2])
        (_decode if tokens == 1 else _prefill_unpacked if unpacks else _prefill)(call)
    return out


def _decode(call: _Attention) -> None:
    """One query token a sequence: parts of the context side by side, joined by the last block of a row."""
    card, q, bits, kv_heads = call.card, call.given.q, call.given.bits, call.given.codes.shape[2]
    batch, heads, _, size = q.shape
    units = kv_heads * -(-heads // kv_heads // kv_tiles.HEADS)
    warps = kv_tiles.decode_warps(card.arch, size, bits)
    splits = kv_tiles.splits(batch * units, call.slots, card.multiprocessors, warps)
    parts = torch.empty(
        batch * units * splits * kv_tiles.result_bytes(size) // 4 if splits > 1 else 0,
        dtype=torch.float32,
        device=q.device,
    )
    launch.start(
        card,
        kv_tiles.decode_entry(size, bits),
        (splits * units, batch),
        32 * warps,
        kv_tiles.decode_shared(size, bits, warps),
        call.stream,
        q.data_ptr(),
        *call.pages,
        *call.span,
        call.out.data_ptr(),
        parts.data_ptr(),
        card.workspace(call.stream).flags,
        *call.turn,
        q.stride(0),
        q.stride(1),
        *call.shape,
        _int(splits),
        *call.rule,
    )


def _prefill(call: _Attention) -> None:
    """Several query tokens a sequence: blocks of them for each head."""
    q, bits = call.given.q, call.given.bits
    batch, heads, tokens, size = q.shape
    launch.start(
        call.card,
        kv_tiles.prefill_entry(size, bits),
        (batch * heads, -(-tokens // kv_tiles.QUERIES)),
        32 * kv_tiles.WARPS,
        kv_tiles.prefill_shared(size, bits),
        call.stream,
        q.data_ptr(),
        *call.pages,
        *call.span,
        call.out.data_ptr(),
        *call.turn,
        *q.stride()[:3],
        *call.shape,
        _int(tokens),
        *call.rule,
    )


def _prefill_unpacked(call: _Attention) -> None:
    """Many query tokens: K and V of some sequences and KV heads to fp16 tiles, then attention over those."""
    card, q, bits, kv_heads = call.card, call.given.q, call.given.bits, call.given.codes.shape[2]
    batch, heads, tokens, size = q.shape
    group, every = heads // kv_heads, batch * kv_heads
    items = group * -(-tokens // kv_tiles.flash_queries(size))  # of one sequence and KV head
    tiles, pair_bytes = kv_tiles.flash_tiles(size, call.slots)
    at_once = kv_tiles.pairs_at_once(every, pair_bytes, items, card.multiprocessors)
    unpacked = torch.empty(at_once * pair_bytes, dtype=torch.uint8, device=q.device)
    for first in range(0, every, at_once):
        pairs = min(at_once, every - first)
        launch.start(
            card,
            kv_tiles.unpack_entry(size, bits),
            (2 * tiles, pairs),
            kv_tiles.UNPACK_THREADS,
            0,
            call.stream,
            *call.pages,
            *call.span,
            unpacked.data_ptr(),
            *call.shape[1:],
            _int(tokens),
            call.rule[0],
            _int(first),
        )
        launch.start(
            card,
            kv_tiles.flash_entry(size),
            min(card.multiprocessors, items * pairs),
            kv_tiles.flash_threads(size),
            kv_tiles.flash_shared(size),
            call.stream,
            q.data_ptr(),
            unpacked.data_ptr(),
            *call.span,
            call.out.data_ptr(),
            *call.turn,
            *q.stride()[:3],
            *call.shape,
            _int(tokens),
            *call.rule,
            _int(tiles),
            _int(first),
            _int(pairs),
            _int(kv_tiles.section(pairs, group, pair_bytes)),
        )
