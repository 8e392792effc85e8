"""A slow reader and decoder for every layout, written from the format descriptions without any product code.

Loops run over the positions inside one packed word or tile; numpy only carries the repetition. Everything is
decoded to `Linear`: codes (K, N) uint8, zeros (G, N) uint8, scales (G, N), group of each row (K,) int32.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

CARRIER = {
    "F16": "<f2", "BF16": "<u2", "F32": "<f4", "F64": "<f8", "I8": "<i1", "U8": "<u1", "I16": "<i2",
    "I32": "<i4", "I64": "<i8", "BOOL": "<u1", "F8_E4M3": "<u1", "F8_E5M2": "<u1",
}  # fmt: skip
TORCH_TAG = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of an AWQ gemm word holds column O[i] of its eight


@dataclass
class Tensor:
    """Bytes of one tensor with its safetensors tag."""

    tag: str
    shape: tuple[int, ...]
    data: bytes

    def array(self) -> NDArray[Any]:
        """Return the numpy view; BF16 and 8-bit floats as their bit patterns."""
        return np.frombuffer(self.data, dtype=CARRIER[self.tag]).reshape(self.shape)


@dataclass
class Linear:
    """One decoded linear. ``zeros`` is always filled; ``tag`` names the dtype of ``scales``."""

    codes: NDArray[np.uint8]
    zeros: NDArray[np.uint8]
    scales: NDArray[Any]
    gi: NDArray[np.int32]
    bits: int
    tag: str
    bias: Tensor | None = None

    @property
    def k(self) -> int:
        """Input features."""
        return int(self.codes.shape[0])

    @property
    def n(self) -> int:
        """Output features."""
        return int(self.codes.shape[1])

    @property
    def sym(self) -> bool:
        """Return whether every zero point is the midpoint."""
        return bool((self.zeros == 1 << (self.bits - 1)).all())

    def weight64(self) -> NDArray[np.float64]:
        """Return (q - z) * s as (N, K) float64: exact for 16-bit scales."""
        steps = self.codes.astype(np.float64) - self.zeros.astype(np.float64)[self.gi]
        return np.ascontiguousarray((steps * widen(self.scales, self.tag)[self.gi]).T)

    def weight(self, tag: str | None = None) -> NDArray[Any]:
        """Return W (N, K), rounded once to ``tag`` (default: the dtype of the scales)."""
        return round_once(self.weight64(), tag or self.tag)

    def recorded(self, tag: str) -> NDArray[Any]:
        """Return W rounded once to the dtype of the scales, then stored as ``tag``: the fixtures' rule."""
        own = self.weight()
        return own if tag == self.tag else round_once(widen(own, self.tag), tag)

    def per_row(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Return codes, zeros and scale bits of each row: equal however groups are cut or merged."""
        return self.codes, self.zeros[self.gi], bits_of(self.scales)[self.gi]


def widen(values: NDArray[Any], tag: str) -> NDArray[np.float64]:
    """Return the exact float64 values of a carrier array."""
    if tag == "BF16":
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    return values.astype(np.float64)


def round_once(values: NDArray[np.float64], tag: str) -> NDArray[Any]:
    """Round float64 once, to nearest even, into the carrier of ``tag``."""
    if tag != "BF16":
        with np.errstate(over="ignore", under="ignore"):
            return values.astype(CARRIER[tag])
    bits = np.ascontiguousarray(values).view(np.uint64)
    drop = np.uint64(52 - 7)  # bfloat16 keeps 7 fraction bits; no subnormal results in these tests
    half = (np.uint64(1) << (drop - np.uint64(1))) - np.uint64(1)
    kept = ((bits + half + ((bits >> drop) & np.uint64(1))) >> drop) << drop
    with np.errstate(over="ignore", under="ignore"):
        narrow = kept.view(np.float64).astype(np.float32)
    return (narrow.view(np.uint32) >> np.uint32(16)).astype("<u2")


def bits_of(values: NDArray[Any]) -> NDArray[Any]:
    """View floats as integers of the same width, so that comparison means bits."""
    values = np.ascontiguousarray(values)
    return values.view({2: "<u2", 4: "<u4", 8: "<u8"}[values.dtype.itemsize])


def digest(values: NDArray[Any]) -> str:
    """Hash an array as the fixtures do: -0.0 becomes +0.0, little endian, contiguous."""
    values = np.ascontiguousarray(values)
    if values.dtype.kind == "f":
        values = values + np.zeros((), values.dtype)
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()


def digest_tagged(values: NDArray[Any], tag: str) -> str:
    """Hash a float carrier; for BF16 the sign of zero is cleared in the bit pattern."""
    if tag == "BF16":
        values = np.where(values == 0x8000, np.uint16(0), values).astype("<u2")
    return digest(values)


def same_floats(one: NDArray[Any], two: NDArray[Any], tag: str) -> bool:
    """Compare two carriers bit for bit, except that the sign of a zero does not count."""
    if tag == "BF16":
        return np.array_equal(np.where(one == 0x8000, 0, one), np.where(two == 0x8000, 0, two))
    return np.array_equal(one, two)


# --- files ------------------------------------------------------------------------------------------------


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the JSON header and the offset of the data."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return json.loads(file.read(length)), 8 + length


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Read every tensor of one file."""
    header, start = read_header(path)
    raw = path.read_bytes()[start:]
    out = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            out[name] = Tensor(entry["dtype"], tuple(entry["shape"]), raw[begin:end])
    return out


def weight_files(folder: Path) -> list[Path]:
    """Return the files the index names, or the one safetensors file that is not the oracle's own."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    return [p for p in sorted(folder.glob("*.safetensors")) if p.name != "expected.safetensors"]


def read_folder(folder: Path) -> dict[str, Tensor]:
    """Read every tensor of a checkpoint."""
    out: dict[str, Tensor] = {}
    for path in weight_files(folder):
        out.update(read_safetensors(path))
    return out


def read_config(folder: Path) -> dict[str, Any]:
    """Return config.json."""
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def quant_config(folder: Path) -> dict[str, Any]:
    """Return the quantization settings, wherever they live."""
    found = read_config(folder).get("quantization_config")
    for name in ("quantize_config.json", "quant_config.json"):
        if found is None and (folder / name).exists():
            found = json.loads((folder / name).read_text())
    return found or {}


# --- words ------------------------------------------------------------------------------------------------


def unpack_words(words: NDArray[Any], bits: int, axis: int) -> NDArray[np.uint8]:
    """Spread the fields of 32-bit words along ``axis``, low bits first."""
    words = np.ascontiguousarray(words).view("<u4")
    per_word = 32 // bits
    shape = list(words.shape)
    shape[axis] *= per_word
    out = np.zeros(shape, np.uint8)
    for slot in range(per_word):
        where: list[Any] = [slice(None)] * words.ndim
        where[axis] = slice(slot, None, per_word)
        out[tuple(where)] = (words >> np.uint32(bits * slot)) & np.uint32((1 << bits) - 1)
    return out


def marlin_place(kk: int, nn: int, bits: int) -> tuple[int, int]:
    """Return (word within the 64-column chunk, slot) of code (kk, nn) of a 16 x 64 tile."""
    lane = (nn % 8) * 4 + (kk % 8) // 2
    if bits == 4:
        return lane * 4 + nn // 16, (kk % 2) * 4 + (nn // 8) % 2 * 2 + kk // 8
    return lane * 8 + nn // 16 * 2 + (nn // 8) % 2, (kk % 2) * 2 + kk // 8


def marlin_codes(words: NDArray[Any], bits: int) -> NDArray[np.uint8]:
    """Decode the tile layout: int32 (K/16, N*bits/2) to codes (K, N)."""
    words = np.ascontiguousarray(words).view("<u4")
    chunk = 32 * bits
    k, n = words.shape[0] * 16, words.shape[1] * 2 // bits
    out = np.zeros((k, n), np.uint8)
    for kk in range(16):
        for nn in range(64):
            word, slot = marlin_place(kk, nn, bits)
            out[kk::16, nn::64] = (words[:, word::chunk] >> np.uint32(bits * slot)) & np.uint32(
                (1 << bits) - 1
            )
    return out


def grouped_order(values: NDArray[Any]) -> NDArray[Any]:
    """Undo the 64-column order of grouped scales: position 8*(n%8) + n//8 of a chunk holds column n."""
    out = np.zeros_like(values)
    for n in range(64):
        out[:, n::64] = values[:, 8 * (n % 8) + n // 8 :: 64]
    return out


def channel_order(values: NDArray[Any]) -> NDArray[Any]:
    """Undo the 32-column order of per-channel scales."""
    out = np.zeros_like(values)
    for n in range(32):
        out[:, n::32] = values[:, 8 * ((n % 8) // 2) + 2 * (n // 8) + n % 2 :: 32]
    return out


def marlin_zeros(words: NDArray[Any], bits: int) -> NDArray[np.uint8]:
    """Decode packed zero points: int32 (G, N*bits/32) to (G, N)."""
    words = np.ascontiguousarray(words).view("<u4")
    chunk = 2 * bits
    out = np.zeros((words.shape[0], words.shape[1] * 32 // bits), np.uint8)
    for n in range(64):
        jj = n // 8
        if bits == 4:
            word, slot = n % 8, jj // 2 + 4 * (jj % 2)
        else:
            word, slot = 2 * (n % 8) + jj // 4, (0, 2, 1, 3)[jj % 4]
        out[:, n::64] = (words[:, word::chunk] >> np.uint32(bits * slot)) & np.uint32((1 << bits) - 1)
    return out


# --- formats ----------------------------------------------------------------------------------------------


def plain_groups(k: int, count: int, group_size: int | None = None) -> NDArray[np.int32]:
    """Return k // g, with g from the shapes unless the last group is short."""
    if k % count == 0:
        group_size = k // count
    if group_size is None or count != -(-k // group_size):
        raise ValueError(f"{count} groups do not fit {k} rows")
    return (np.arange(k) // group_size).astype(np.int32)


def midpoint(shape: tuple[int, ...], bits: int) -> NDArray[np.uint8]:
    """Return the zero points of a symmetric layer."""
    return np.full(shape, 1 << (bits - 1), np.uint8)


def decode_gptq(t: dict[str, Tensor], p: str, *, v2: bool, group_size: int | None = None) -> Linear:
    """Decode one GPTQ linear. v1 zeros come back by adding one to every field of the whole word."""
    scales = t[f"{p}.scales"]
    stored = np.ascontiguousarray(t[f"{p}.qzeros"].array()).view("<u4")
    bits = 32 * stored.shape[1] // scales.shape[1]
    if not v2:
        stored = stored + np.uint32({4: 0x11111111, 8: 0x01010101}[bits])
    codes = unpack_words(t[f"{p}.qweight"].array(), bits, 0)
    gi = t.get(f"{p}.g_idx")
    groups = (
        plain_groups(codes.shape[0], scales.shape[0], group_size)
        if gi is None
        else gi.array().astype(np.int32)
    )
    return Linear(
        codes, unpack_words(stored, bits, 1), scales.array(), groups, bits, scales.tag, t.get(f"{p}.bias")
    )


def decode_awq_gemm(t: dict[str, Tensor], p: str) -> Linear:
    """Decode AWQ gemm: packed along N with the eight-column interleave."""
    scales = t[f"{p}.scales"]
    unpacked = [unpack_words(t[f"{p}.{part}"].array(), 4, 1) for part in ("qweight", "qzeros")]
    codes, zeros = (np.zeros_like(u) for u in unpacked)
    for slot, column in enumerate(AWQ_ORDER):
        codes[:, column::8] = unpacked[0][:, slot::8]
        zeros[:, column::8] = unpacked[1][:, slot::8]
    gi = plain_groups(codes.shape[0], scales.shape[0])
    return Linear(codes, zeros, scales.array(), gi, 4, scales.tag, t.get(f"{p}.bias"))


def decode_awq_gemv(t: dict[str, Tensor], p: str, group_size: int) -> Linear:
    """Decode AWQ gemv: rows of N, groups padded to whole words."""
    scales = t[f"{p}.scales"]
    codes = unpack_words(t[f"{p}.qweight"].array(), 4, 1).T
    count = codes.shape[0] // group_size
    zeros = unpack_words(t[f"{p}.qzeros"].array(), 4, 1)[:, :count].T
    s = np.ascontiguousarray(scales.array()[:, :count].T)
    return Linear(codes, zeros, s, plain_groups(codes.shape[0], count), 4, scales.tag, t.get(f"{p}.bias"))


def gemv_fast_place(k: int, n: int) -> tuple[int, int]:
    """Return (word within its row, nibble) of code (k, n) for k < 64 and n < 4."""
    b = k % 32
    p1 = 8 * ((b % 8) // 2) + 2 * (b // 8) + b % 2
    x = p1 % 8
    position = 64 * n + 32 * (k // 32) + 8 * (p1 // 8) + 4 * (x % 2) + x // 2
    return position // 4, position % 4


def decode_awq_gemv_fast(t: dict[str, Tensor], p: str, group_size: int) -> Linear:
    """Decode AWQ gemv_fast: four rows woven into 16-bit words, zeros stored as -(z * s)."""
    words = np.ascontiguousarray(t[f"{p}.qweight"].array()).view("<u2")
    k, n = words.shape[1], words.shape[0] * 4
    codes = np.zeros((k, n), np.uint8)
    for kk in range(64):
        for nn in range(4):
            word, nibble = gemv_fast_place(kk, nn)
            codes[kk::64, nn::4] = ((words[:, word::64] >> np.uint16(4 * nibble)) & np.uint16(15)).T
    scales = t[f"{p}.scales"]
    s = scales.array()[: k // group_size]
    wide = s.astype(np.float64)
    product = t[f"{p}.qzeros"].array()[: k // group_size].astype(np.float64)
    zeros = np.where(wide == 0, 0, np.rint(-product / np.where(wide == 0, 1, wide))).astype(np.uint8)
    return Linear(codes, zeros, s, plain_groups(k, k // group_size), 4, scales.tag, t.get(f"{p}.bias"))


def decode_tiles(t: dict[str, Tensor], p: str, weight: str, scale: str) -> Linear:
    """Decode legacy Marlin (``B``, ``s``) and AWQ marlin (``qweight``, ``scales``)."""
    codes = marlin_codes(t[f"{p}.{weight}"].array(), 4)
    scales = t[f"{p}.{scale}"]
    order = channel_order if scales.shape[0] == 1 else grouped_order
    s = order(scales.array())
    gi = plain_groups(codes.shape[0], s.shape[0])
    return Linear(codes, midpoint(s.shape, 4), s, gi, 4, scales.tag, t.get(f"{p}.bias"))


def decode_compressed(t: dict[str, Tensor], p: str, group_size: int | None = None) -> Linear:
    """Decode compressed-tensors pack-quantized: offset binary, packed along K; zeros along N."""
    n, k = (int(v) for v in t[f"{p}.weight_shape"].array())
    packed = t[f"{p}.weight_packed"].array()
    bits = 8 if packed.shape[1] == -(-k * 8 // 32) else 4
    codes = unpack_words(packed, bits, 1)[:, :k].T
    scales = t[f"{p}.weight_scale"]
    s = np.ascontiguousarray(scales.array().T)
    zeros = midpoint(s.shape, bits)
    if f"{p}.weight_zero_point" in t:
        zeros = unpack_words(t[f"{p}.weight_zero_point"].array(), bits, 0)[:n].T
    gi = t.get(f"{p}.weight_g_idx")
    groups = plain_groups(k, s.shape[0], group_size) if gi is None else gi.array().astype(np.int32)
    return Linear(codes, zeros, s, groups, bits, scales.tag, t.get(f"{p}.bias"))


def decode_artifact(t: dict[str, Tensor], p: str, q: dict[str, Any]) -> tuple[Linear, Linear]:
    """Decode one linear of our artifact: as the source meant it, and as stored with its padding."""
    own = {**{k: q[k] for k in ("bits", "group_size", "sym", "act_order")}, **q.get("modules", {}).get(p, {})}
    bits = own["bits"]
    codes = marlin_codes(t[f"{p}.weight"].array(), bits)
    scales = t[f"{p}.weight_scale"]
    s = grouped_order(scales.array())
    zero = t.get(f"{p}.weight_zero_point")
    if (zero is None) != own["sym"]:
        raise ValueError(
            f"{p}: sym is {own['sym']} and the zero tensor is {'absent' if zero is None else 'there'}"
        )
    zeros = midpoint(s.shape, bits) if zero is None else marlin_zeros(zero.array(), bits)
    rows = np.arange(codes.shape[0])
    gi = (rows * 0 if own["group_size"] == -1 else rows // own["group_size"]).astype(np.int32)
    if gi.max() != s.shape[0] - 1:
        raise ValueError(
            f"{p}: {s.shape[0]} scale rows for {codes.shape[0]} stored rows of g {own['group_size']}"
        )
    stored = Linear(codes, zeros, s, gi, bits, scales.tag, t.get(f"{p}.bias"))
    k, n = own.get("in_features", codes.shape[0]), own.get("out_features", codes.shape[1])
    perm_tensor = t.get(f"{p}.act_perm")
    if (perm_tensor is not None) != own["act_order"]:
        raise ValueError(f"{p}: act_order is {own['act_order']} and act_perm disagrees")
    perm = np.arange(k) if perm_tensor is None else perm_tensor.array()
    if sorted(perm.tolist()) != list(range(k)):
        raise ValueError(f"{p}: act_perm is no permutation of {k} rows")
    natural_codes, natural_gi = np.zeros((k, n), np.uint8), np.zeros(k, np.int32)
    natural_codes[perm] = codes[:k, :n]
    natural_gi[perm] = gi[:k]
    used = int(gi[:k].max()) + 1
    linear = Linear(natural_codes, zeros[:used, :n], s[:used, :n], natural_gi, bits, scales.tag, stored.bias)
    check_padding(p, stored, k, n)
    return linear, stored


def check_padding(p: str, stored: Linear, k: int, n: int) -> None:
    """Check the bytes of the padding: whole columns and groups hold the midpoint and scale +0.0."""
    mid, used = 1 << (stored.bits - 1), int(stored.gi[:k].max()) + 1
    pad_scales = np.concatenate([stored.scales[:, n:].ravel(), stored.scales[used:].ravel()])
    pad_zeros = np.concatenate([stored.zeros[:, n:].ravel(), stored.zeros[used:].ravel()])
    rows = stored.codes[k:, :n] - stored.zeros[stored.gi[k:], :n]
    if (
        bits_of(pad_scales).any()
        or (pad_zeros != mid).any()
        or (stored.codes[:, n:] != mid).any()
        or rows.any()
    ):
        raise ValueError(f"{p}: the padding is not neutral")


# --- folders ----------------------------------------------------------------------------------------------

PARTS = re.compile(r"\.(qweight|weight_packed|B|weight_scale)$")


def modules_of(tensors: dict[str, Tensor]) -> list[str]:
    """Return the prefixes that have packed weights."""
    return sorted({PARTS.sub("", name) for name in tensors if PARTS.search(name)})


def rounds_to_awq(q: dict[str, Any]) -> bool:
    """Return whether an AutoRound config says AWQ bytes."""
    return "awq" in str(q.get("packing_format", "")).lower()


def stores_true_zeros(q: dict[str, Any]) -> bool:
    """Return whether GPTQ zeros are stored as they are (v2)."""
    packing = q.get("packing_format")
    if q.get("quant_method") == "auto-round":
        return packing in ("auto_round", "auto_round:gptqmodel")
    return (q.get("checkpoint_format") or q.get("format")) == "gptq_v2"


def decode_module(t: dict[str, Tensor], p: str, q: dict[str, Any]) -> Linear:
    """Decode one module by its tensors; the config only settles what tensors cannot say."""
    if f"{p}.B" in t:
        return decode_tiles(t, p, "B", "s")
    if f"{p}.weight_packed" in t:
        return decode_compressed(t, p, q.get("group_size"))
    if f"{p}.weight_scale" in t:
        return decode_artifact(t, p, q)[0]
    weight, scales = t[f"{p}.qweight"], t[f"{p}.scales"]
    group = q.get("group_size", q.get("q_group_size"))
    if weight.tag == "I16":
        return decode_awq_gemv_fast(t, p, group)
    if f"{p}.qzeros" not in t:
        return decode_tiles(t, p, "qweight", "scales")
    if (
        q.get("quant_method") == "awq"
        and scales.shape[0] == weight.shape[0]
        and scales.shape[1] != 8 * weight.shape[1]
    ):
        return decode_awq_gemv(t, p, group)
    if weight.shape[1] * 8 == scales.shape[1]:
        return decode_awq_gemm(t, p)
    return decode_gptq(t, p, v2=stores_true_zeros(q), group_size=group)


def decode_folder(folder: Path) -> dict[str, Linear]:
    """Decode every quantized linear of a checkpoint folder."""
    tensors, q = read_folder(folder), quant_config(folder)
    return {p: decode_module(tensors, p, q) for p in modules_of(tensors)}
