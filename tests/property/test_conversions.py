"""Random layers through random pairs of formats: what comes out decodes to what went in.

One example is a checkpoint with a few unrelated linears of different schemes; the tests' own decoder judges.
"""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from compare import same_numbers
from hypothesis import given, note, settings
from hypothesis import strategies as st

import builders as b
import oracle
from oracle import Linear
from runner import convert, run


@dataclass
class Shape:
    """How one linear is drawn."""

    k: int
    n: int
    bits: int
    group: int
    sym: bool
    tag: str
    ordered: bool
    bias: bool


@st.composite
def layer_shapes(draw: st.DrawFn, *, bits: int | None = None, k_step: int = 8, n_step: int = 8) -> Shape:
    """Draw sizes around the tile's borders: one to three tiles, and off by a step."""
    width = bits or draw(st.sampled_from((4, 8)))
    k = draw(st.sampled_from((64, 128, 192, 256))) + draw(st.sampled_from((0, 0, -k_step, k_step)))
    n = draw(st.sampled_from((64, 128, 192))) + draw(st.sampled_from((0, 0, -n_step, n_step)))
    group = draw(st.sampled_from((-1, 32, 64, 128)))
    if group != -1 and k % group:
        group = -1
    return Shape(
        k,
        n,
        width,
        group,
        draw(st.booleans()),
        draw(st.sampled_from(("F16", "BF16"))),
        draw(st.booleans()),
        False,
    )


def drawn(shape: Shape, rng: np.random.Generator, ordered: bool) -> Linear:
    """Make the linear."""
    order = rng.permutation(shape.k) if ordered and shape.ordered and shape.group != -1 else None
    made = b.layer(
        rng, shape.k, shape.n, bits=shape.bits, group=shape.group, sym=shape.sym, tag=shape.tag, order=order
    )
    if rng.integers(3) == 0:
        made.scales = np.ascontiguousarray(
            np.where(rng.integers(2, size=made.scales.shape), made.scales, 0)
        ).astype(made.scales.dtype)
    return made


SOURCES: dict[str, tuple[b.Writer, Any]] = {
    "gptq_v2": (
        b.gptq_v2,
        lambda s: b.gptq_config(bits=s.bits, group=s.group, sym=s.sym, checkpoint_format="gptq_v2"),
    ),
    "compressed": (b.compressed, lambda s: b.compressed_config(bits=s.bits, group=s.group, sym=s.sym)),
    "awq": (b.awq_gemm, lambda s: b.awq_config(group=s.group)),
}


def checkpoint(
    folder: Path, kind: str, shapes: list[Shape], seed: int, ordered: bool
) -> tuple[Path, dict[str, Linear]]:
    """Write a checkpoint whose linears have nothing to do with each other."""
    rng = np.random.default_rng(seed)
    config = b.llama_config(vocab_size=16, hidden_size=64)
    model = b.Model(config, b.skeleton(rng, config))
    for i, shape in enumerate(shapes):
        model.linears[f"tower.blocks.{i}.proj"] = drawn(shape, rng, ordered)
    writer, settings_of = SOURCES[kind]
    return b.write(folder, model, writer, settings_of(shapes[0])), model.linears


@given(
    kind=st.sampled_from(("gptq_v2", "compressed")),
    target=st.sampled_from(("marlin", "gptq", "compressed-tensors", "dense")),
    shapes=st.lists(layer_shapes(), min_size=1, max_size=3),
    seed=st.integers(0, 2**32 - 1),
)
def test_decode_of_convert_is_what_went_in(kind: str, target: str, shapes: list[Shape], seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source, want = checkpoint(Path(folder) / "src", kind, shapes, seed, ordered=False)
        out = Path(folder) / "out"
        convert(source, out, target, "--threads", 1 + seed % 3).expect(0)
        compare_all(out, target, want)
        run("verify", out, "--against", source).expect(0)


@given(
    target=st.sampled_from(("marlin", "gptq", "awq", "compressed-tensors", "dense")),
    shapes=st.lists(layer_shapes(bits=4), min_size=1, max_size=3),
    seed=st.integers(0, 2**32 - 1),
)
def test_awq_reaches_every_target(target: str, shapes: list[Shape], seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source, want = checkpoint(Path(folder) / "src", "awq", shapes, seed, ordered=False)
        done = convert(source, Path(folder) / "out", target).expect(0)
        mixed = target == "awq" and not one_size(
            want
        )  # its config has one size; what cannot be split is dense
        assert not (mixed and done.events[-1]["lossless"])
        compare_all(Path(folder) / "out", target, want, mixed=mixed)


def one_size(linears: dict[str, Linear]) -> bool:
    """Return whether all groups are of one size, or can be split to one of 32, 64 or 128 rows."""
    counts = {(x.k, x.scales.shape[0]) for x in linears.values()}
    sizes = {-1 if groups == 1 else k // groups for k, groups in counts}
    return len(sizes) == 1 or math.gcd(*(k // groups for k, groups in counts)) % 32 == 0


@given(shapes=st.lists(layer_shapes(), min_size=1, max_size=3), seed=st.integers(0, 2**32 - 1))
def test_artifact_and_back_with_act_order(shapes: list[Shape], seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source, want = checkpoint(Path(folder) / "src", "gptq_v2", shapes, seed, ordered=True)
        out, back = Path(folder) / "out", Path(folder) / "back"
        convert(source, out, "marlin").expect(0)
        compare_all(out, "marlin", want)
        run("unpack", out, back).expect(0)
        assert oracle.read_folder(back) == oracle.read_folder(source)


def compare_all(out: Path, target: str, want: dict[str, Linear], *, mixed: bool = False) -> None:
    """Compare packed linears bit for bit; dense ones are rounded once. ``mixed``: some may be left dense."""
    tensors = oracle.read_folder(out)
    got = oracle.decode_folder(out)
    for name, linear in want.items():
        if target == "dense":
            weight = tensors[f"{name}.weight"]
            assert oracle.same_floats(weight.array(), linear.weight(weight.tag), weight.tag), name
        elif name in got:
            note(f"{name}: {linear.codes.shape} {linear.bits} bit")
            same_numbers(got[name], linear, name)
        else:  # a portable format that packs along an axis which does not divide: that layer alone is dense
            per_word = 32 // linear.bits
            assert target in ("gptq", "awq")
            assert mixed or linear.k % per_word or linear.n % per_word, name
            weight = tensors[f"{name}.weight"]
            assert oracle.same_floats(weight.array(), linear.weight(weight.tag), weight.tag), name


@settings(max_examples=20)
@given(
    seed=st.integers(0, 2**32 - 1), target=st.sampled_from(("marlin", "gptq", "awq", "compressed-tensors"))
)
def test_there_and_back_is_the_same_file(seed: int, target: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        shape = Shape(128, 128, 4, 64, True, "F16", False, False)
        source, _ = checkpoint(Path(folder) / "src", "gptq_v2", [shape, shape], seed, ordered=False)
        one, two, three = (Path(folder) / name for name in ("one", "two", "three"))
        convert(source, one, "gptq").expect(0)
        convert(one, two, target).expect(0)
        convert(two, three, "gptq").expect(0)
        assert (three / "model.safetensors").read_bytes() == (one / "model.safetensors").read_bytes()
