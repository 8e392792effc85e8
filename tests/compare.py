"""What a conversion must keep, and what formats allow: the rules the golden and failure tests share.

Everything is stated on decoded linears of the tests' own oracle.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import oracle
from oracle import Linear, Tensor

TARGETS = ("marlin", "marlin-legacy", "gptq", "awq", "compressed-tensors", "dense")
EXPERT = re.compile(
    r"\.(mlp|block_sparse_moe)\.experts\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)(?=\.|$)"
)
MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
FUSED = re.compile(r"\.(q|k|v)_proj$|\.(gate|up)_proj$|\.(w1|w3)$")


def written_name(name: str, config: dict[str, Any]) -> str:
    """Return the name a target writes: the experts' spelling of the model class."""
    if config.get("model_type") != "mixtral":
        return name
    name = EXPERT.sub(
        lambda m: f".block_sparse_moe.experts.{m[2]}.{MIXTRAL.get(m[3], m[3])}",
        name,
    )
    return re.sub(r"\.mlp\.gate\.", ".block_sparse_moe.gate.", name)


def is_down(name: str) -> bool:
    """Return whether a module's input order can move into gate and up."""
    return name.endswith((".down_proj", ".w2"))


def group_of(linear: Linear) -> int:
    """Return g, or -1 for one group."""
    count = linear.scales.shape[0]
    return -1 if count == 1 else -(-linear.k // count)


def order_class(linear: Linear) -> str:
    """Return ``none``, ``block`` or ``groups`` for the group map."""
    gi, count = linear.gi, linear.scales.shape[0]
    size = group_of(linear)
    if count == 1 or np.array_equal(gi, np.arange(linear.k) // size):
        return "none"
    for block in (128, 64, 32):
        if linear.k % block == 0 and block <= size and (gi.reshape(-1, block) == gi[::block, None]).all():
            return "block"
    return "groups"


def fold_of(linear: Linear) -> NDArray[np.int64]:
    """Return the order that makes the group map plain."""
    return np.argsort(linear.gi, kind="stable")


def take_rows(linear: Linear, order: NDArray[Any]) -> Linear:
    """Permute the input rows."""
    return Linear(
        linear.codes[order],
        linear.zeros,
        linear.scales,
        linear.gi[order],
        linear.bits,
        linear.tag,
        linear.bias,
    )


def take_columns(linear: Linear, order: NDArray[Any]) -> Linear:
    """Permute the output columns, bias included."""
    bias = linear.bias
    if bias is not None:
        bias = Tensor(bias.tag, bias.shape, np.ascontiguousarray(bias.array()[order]).tobytes())
    return Linear(
        linear.codes[:, order],
        linear.zeros[:, order],
        linear.scales[:, order],
        linear.gi,
        linear.bits,
        linear.tag,
        bias,
    )


def folded(linears: dict[str, Linear]) -> dict[str, Linear]:
    """Return the linears with every down_proj's order moved into its gate and up."""
    out = dict(linears)
    for name, linear in linears.items():
        if not is_down(name) or order_class(linear) != "groups":
            continue
        order = fold_of(linear)
        out[name] = take_rows(linear, order)
        stem, last = name.rsplit(".", 1)
        for part in ("w1", "w3") if last == "w2" else ("gate_proj", "up_proj"):
            out[f"{stem}.{part}"] = take_columns(out[f"{stem}.{part}"], order)
    return out


def same_numbers(got: Linear, want: Linear, where: str = "") -> None:
    """Check that codes, zeros and scales of every row are equal, however the groups are cut."""
    assert got.bits == want.bits, where
    for part, mine, theirs in zip(("codes", "zeros"), got.per_row(), want.per_row(), strict=False):
        wrong = np.argwhere(mine != theirs)
        assert mine.shape == theirs.shape, (where, part, mine.shape, theirs.shape)
        assert not wrong.size, (where, part, len(wrong), wrong[0].tolist())
    scales = [oracle.widen(x.scales, x.tag)[x.gi] for x in (got, want)]
    assert np.array_equal(scales[0], scales[1]), (where, "scales")
    if want.tag != "F32":
        assert got.tag == want.tag, (where, got.tag, want.tag)
        assert np.array_equal(got.per_row()[2], want.per_row()[2]), (where, "scale bits")


def siblings(name: str) -> list[str]:
    """Return the modules that engines fuse with this one, itself included: all packed, or none."""
    stem, _, last = name.rpartition(".")
    for group in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3")):
        if last in group:
            return [f"{stem}.{part}" for part in group]
    return [name]


@dataclass
class Verdict:
    """What the losslessness table says of one module and one target: ``ok``, ``refuse`` or ``shape``."""

    kind: str
    reason: str = ""


def verdict(name: str, linear: Linear, target: str) -> Verdict:
    """Apply the table to one module (zeros that are all the midpoint count as symmetric)."""
    if target == "dense":
        return Verdict("ok")
    order, size = order_class(linear), group_of(linear)
    if order == "block":
        sizes = [b for b in (128, 64, 32) if (linear.gi.reshape(-1, b) == linear.gi[::b, None]).all()]
        size = sizes[0]
    if target == "marlin":
        return Verdict("ok" if size == -1 or size % 32 == 0 else "refuse", f"group size {size}")
    if order == "groups" and not is_down(name):
        return Verdict("refuse", "act-order")
    if target == "awq" and name == "lm_head":
        return Verdict("shape", "no engine but one takes it: in 16 bit")
    if target in ("awq", "marlin-legacy") and linear.bits != 4:
        return Verdict("refuse", "8 bit")
    if target == "marlin-legacy":
        if not linear.sym or (size != -1 and size % 128):
            return Verdict("refuse", "symmetric, -1 or 128")
        return Verdict("ok" if linear.k % 128 == 0 and linear.n % 256 == 0 else "shape", "256")
    fields = 8 if target == "awq" else 32 // linear.bits
    fits = linear.n % fields == 0 and (target == "awq" or linear.k % fields == 0)
    return Verdict("ok" if fits or target == "compressed-tensors" else "shape")


def check_dense_tensors(source: Path, out: Path, linears: dict[str, Linear]) -> None:
    """Check that everything outside quantized linears travelled byte for byte, and nothing appeared."""
    config = oracle.read_config(source)
    ours, theirs = oracle.read_folder(out), oracle.read_folder(source)
    packed = tuple(f"{name}." for name in linears)
    written = tuple(f"{written_name(name, config)}." for name in linears)
    for name, tensor in theirs.items():
        if name.startswith(packed):
            continue
        got = ours.pop(written_name(name, config), None)
        assert got is not None, f"{name} is lost"
        assert got == tensor, name
    extra = [name for name in ours if not name.startswith(written)]
    assert not extra, extra
