"""Tensor parallelism: a slice of the artifact is the artifact of the slice, for every layer that may be cut.

One checkpoint holds a linear and its slices as linears of their own; its artifact must hold the same numbers
at the same places. Nothing is decoded: tensors are compared as they lie in the file.
"""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from hypothesis import assume, event, example, given, note
from hypothesis import strategies as st
from numpy.typing import NDArray

import builders as b
import oracle
from oracle import Linear
from runner import convert

PARTS = ("weight", "weight_scale", "weight_zero_point", "act_perm")
TILE = 64


@dataclass
class Cut:
    """A linear, how many ranks share it, and along which axis. ``experts``: so many linears, as experts."""

    k: int
    n: int
    group: int
    bits: int
    sym: bool
    tp: int
    axis: str
    ordered: bool
    experts: int
    tag: str
    seed: int

    @property
    def borders(self) -> list[int]:
        """Where the ranks' parts begin and end; the last part may be short."""
        size, step = (self.n, TILE) if self.axis == "n" else (self.k, self.row_step)
        part = step * -(-size // (self.tp * step))
        return [min(size, part * rank) for rank in range(self.tp)] + [size]

    @property
    def row_step(self) -> int:
        """Rows between two places where K may be cut."""
        return TILE if self.group == -1 else math.lcm(TILE, self.group)


@st.composite
def cuts(draw: st.DrawFn) -> Cut:
    """Draw a cut: columns of anything; rows of what has no activation order."""
    axis = draw(st.sampled_from("nk"))
    tp = draw(st.sampled_from((2, 4)))
    group = draw(st.sampled_from((-1, 32, 64, 128)))
    cut = Cut(
        k=8 * draw(st.integers(1, 24)),
        n=8 * draw(st.integers(1, 24)),
        group=group,
        bits=draw(st.sampled_from((4, 8))),
        sym=draw(st.booleans()),
        tp=tp,
        axis=axis,
        ordered=axis == "n" and draw(st.booleans()),
        experts=draw(st.sampled_from((0, 0, 2))),
        tag=draw(st.sampled_from(("F16", "BF16"))),
        seed=draw(st.integers(0, 2**32 - 1)),
    )
    short = 8 * draw(st.integers(0, 7))  # the last part may end anywhere in its last tile
    whole = draw(st.integers(1, 2))
    if axis == "n":
        cut.n = TILE * tp * whole - short
    else:
        cut.k = cut.row_step * tp * whole - short
        assume(cut.k <= 1024)
    return cut


def drawn(cut: Cut, rng: np.random.Generator) -> Linear:
    """Make one linear; no part of it is all midpoints by accident."""
    order = rng.permutation(cut.k) if cut.ordered and cut.group != -1 else None
    made = b.layer(rng, cut.k, cut.n, bits=cut.bits, group=cut.group, sym=cut.sym, order=order, tag=cut.tag)
    if not cut.sym:
        made.zeros[:, ::8] = 3
    made.scales[:, 1::5] = 0
    return made


def part_of(linear: Linear, cut: Cut, rank: int) -> Linear:
    """Return one rank's slice, with the groups that its rows use."""
    here = slice(cut.borders[rank], cut.borders[rank + 1])
    rows, columns = (slice(None), here) if cut.axis == "n" else (here, slice(None))
    gi = linear.gi[rows]
    groups = slice(int(gi.min()), int(gi.max()) + 1)
    return Linear(
        linear.codes[rows, columns],
        linear.zeros[groups, columns],
        linear.scales[groups, columns],
        (gi - int(gi.min())).astype(np.int32),
        linear.bits,
        linear.tag,
    )


def cut_of(values: NDArray[np.generic], part: str, cut: Cut, rank: int) -> NDArray[np.generic]:
    """Return one rank's slice of a tensor of the artifact."""
    first, last = (math.ceil(x / TILE) * TILE for x in cut.borders[rank : rank + 2])  # stored sizes
    if cut.axis == "n":
        if part == "act_perm":
            return values
        width = {"weight": cut.bits / 2, "weight_scale": 1, "weight_zero_point": cut.bits / 32}[part]
        return values[:, int(first * width) : int(last * width)]
    if part == "weight":
        return values[first // 16 : last // 16]
    if cut.group == -1:
        return values  # every rank needs the one group
    return values[first // cut.group : -(-last // cut.group)]


def names_of(cut: Cut) -> list[str]:
    """Return the names of the linears within one layer."""
    leaf = "up_proj" if cut.axis == "n" else "down_proj"
    if cut.experts:
        return [f"mlp.experts.{e}.{leaf}" for e in range(cut.experts)]
    return [f"mlp.{leaf}"]


WIDE = Cut(128, 256, 64, 4, False, 4, "n", True, 2, "BF16", 1)
SHORT = Cut(1000, 64, 128, 8, False, 4, "k", False, 2, "F16", 2)


@example(WIDE)
@example(SHORT)
@given(cut=cuts())
def test_slices_of_the_artifact_are_artifacts_of_the_slices(cut: Cut) -> None:
    """Layer 0 is the whole, layer 1 + r what rank r would hold."""
    event(f"{cut.axis} tp {cut.tp}{' ordered' if cut.ordered else ''}")
    last = cut.borders[-1] - cut.borders[-2]
    assume(last > 0)
    assume(cut.axis == "n" or cut.group != 32 or last > 32)  # a layer of one group is stored as one group
    rng = np.random.default_rng(cut.seed)
    config = b.qwen3_moe_config(vocab_size=16, hidden_size=64, num_hidden_layers=1 + cut.tp)
    model = b.Model(config, {"model.norm.weight": b.dense(rng, 64)})
    for name in names_of(cut):
        whole = drawn(cut, rng)
        model.linears[f"model.layers.0.{name}"] = whole
        for rank in range(cut.tp):
            model.linears[f"model.layers.{1 + rank}.{name}"] = part_of(whole, cut, rank)
    settings = b.gptq_config(
        bits=cut.bits, group=cut.group, sym=cut.sym, desc=cut.ordered, checkpoint_format="gptq_v2"
    )
    with tempfile.TemporaryDirectory() as folder:
        source = b.write(Path(folder) / "src", model, b.gptq_v2, settings)
        convert(source, Path(folder) / "out", "marlin").expect(0)
        tensors = oracle.read_folder(Path(folder) / "out")
    note(f"parts {cut.borders}")
    for name in names_of(cut):
        assert (f"model.layers.0.{name}.weight_zero_point" in tensors) is not cut.sym
        for rank in range(cut.tp):
            for part in PARTS:
                own = tensors.get(f"model.layers.{1 + rank}.{name}.{part}")
                of_whole = tensors.get(f"model.layers.0.{name}.{part}")
                assert (own is None) is (of_whole is None), (name, rank, part)
                if own is None or of_whole is None:
                    continue
                assert own.tag == of_whole.tag, (name, rank, part)
                want = cut_of(of_whole.array(), part, cut, rank)
                assert own.shape == want.shape, (name, rank, part)
                assert np.array_equal(own.array(), want), (name, rank, part)
