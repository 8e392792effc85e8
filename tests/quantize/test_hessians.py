"""Whole jobs over inputs that a Hessian cannot be made of, or that cannot be factored: no layer is lost."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from quantize import sources
from quantize.test_numbers import scheme
from quantize.test_outputs import manifest, quantize, weights
from runner import Run
from w4pack.convert.files.checkpoint import open_checkpoint
from w4pack.convert.files.local import LocalStore
from w4pack.convert.files.provider import CheckpointProvider
from w4pack.convert.quantize import grids, whole
from w4pack.convert.quantize.hessian import Statistics

DOWN = "model.layers.1.mlp.down_proj"


def notes(done: Run) -> list[str]:
    return [e["text"] for e in done.events if e["event"] == "note"]


def changed(monkeypatch: pytest.MonkeyPatch, width: int, at: int, edit: Any) -> None:
    """Let ``edit`` change the Hessian of the linear number ``at`` of those with ``width`` inputs."""
    original, seen = Statistics.hessian, []

    def other(self: Statistics) -> torch.Tensor:
        found = original(self)
        if found.shape[0] == width:
            seen.append(width)
            if len(seen) == at + 1:
                edit(found)
        return found

    monkeypatch.setattr(Statistics, "hessian", other)


@pytest.mark.parametrize(("inputs", "tokens"), [(256, 3), (2048, 64)])
def test_f71_fewer_tokens_than_inputs_are_enough(
    inputs: int, tokens: int, book: Path, tmp_path: Path
) -> None:
    """The Hessian of K inputs has the rank of the tokens."""
    source = sources.save(sources.llama(intermediate_size=inputs), tmp_path / "src")
    words = ("--samples", 1, "--seqlen", tokens)
    done = quantize(source, tmp_path / "out", *words, text=book).expect(0)
    entries = manifest(tmp_path / "out")["layers"]
    assert {(e["method"], e["tokens"], e["damping"]) for e in entries.values()} == {("gptq", tokens, 0.03)}
    assert all(e["error"] < e["rtn_error"] for e in entries.values())
    (few,) = [e for e in done.events if e.get("code") == "calibration-few"]
    assert f"{inputs} tokens" in few["expected"] and few["found"] == f"{tokens} tokens"


def negative(h: torch.Tensor) -> None:
    """One of the squares is below 0, by more than the first damping."""
    h[5] = h[:, 5] = 0.0
    h[5, 5] = -0.1 * float(h.diagonal().mean())


def beyond(h: torch.Tensor) -> None:
    h[3, 4] = h[4, 3] = 500 * float(h.diagonal().mean())


def slightly_negative(h: torch.Tensor) -> None:
    h[5] = h[:, 5] = 0.0
    h[5, 5] = -1e-3


@pytest.mark.parametrize(
    ("edit", "dampings"),
    [(slightly_negative, [0.03]), (negative, [0.03, 0.3]), (beyond, [0.03, 0.3, 3.0, None])],
)
def test_f71_each_step_of_the_damping_is_told_and_one_layer_is_rounded_at_the_worst(
    edit: Any, dampings: list[float | None], llama: Path, book: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    changed(monkeypatch, 128, 1, edit)
    done = quantize(llama, tmp_path / "out", text=book).expect(0)
    steps = [(a, "rounding to nearest" if b is None else f"a damping of {b:g}") for a, b in pairs(dampings)]
    assert [text for text in notes(done) if DOWN in text] == [
        f"{DOWN}: the Hessian cannot be factored with a damping of {a:g}; {then} comes next"
        for a, then in steps
    ]
    entries = manifest(tmp_path / "out")["layers"]
    own, card = entries.pop(DOWN), (tmp_path / "out" / "README.md").read_text()
    assert {e["method"] for e in entries.values()} == {"gptq"}
    assert own.get("failed_dampings", []) == pytest.approx([a for a, _ in pairs(dampings)])
    if dampings[-1] is None:
        assert own["method"] == "rtn" and own["error"] == own["rtn_error"] < 0.05
        assert f"- the Hessian cannot be factored at any damping: `{DOWN}`" in card
    elif len(dampings) > 1:
        assert own["damping"] == pytest.approx(dampings[-1])
        assert f"- `{DOWN}`: {own['damping']:.3g}" in card


def pairs(values: list[Any]) -> list[tuple[Any, Any]]:
    return list(pairwise(values))


def test_f71_a_linear_that_only_zeros_reached_keeps_its_weights(book: Path, tmp_path: Path) -> None:
    """GPTQ takes the weights of an input that is always 0 for 0: here it would be all of them."""
    model = sources.llama()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.zero_()
    source = sources.save(model, tmp_path / "src")
    quantize(source, tmp_path / "out", text=book).expect(0)
    own = manifest(tmp_path / "out")["layers"][DOWN]
    assert (own["method"], own["note"]) == ("rtn", "every input was 0")
    assert f"- every input was 0: `{DOWN}`" in (tmp_path / "out" / "README.md").read_text()
    exact = load_file(source / "model.safetensors")[f"{DOWN}.weight"].float().T
    grid = grids.search(exact, scheme(128, 64))  # with the search for the clipping, nothing weighed
    wanted = grids.dequantize(grids.nearest(exact, grid, scheme(128, 64)), grid, scheme(128, 64))
    assert np.array_equal(weights(tmp_path / "out")[DOWN], wanted.T.double().numpy())


# ---- what is no number (F73) -----------------------------------------------------------------------------


def stopped(done: Run, out: Path, where: str, found: str) -> None:
    """Check that the job ended at once, and published nothing."""
    done.expect(1)
    assert (done.error["code"], done.error["where"]) == ("activations", where)
    assert found in done.error["found"]
    assert not out.exists()


def test_f73_a_hessian_that_is_no_number_stops_the_job(
    llama: Path, book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed(monkeypatch, 128, 1, lambda h: h[0].fill_(float("nan")))
    done = quantize(llama, tmp_path / "out", text=book)
    stopped(done, tmp_path / "out", DOWN, "a Hessian that is not finite; the largest finite input is ")
    assert 1 < float(done.error["found"].rpartition(" ")[2]) < 100


def test_f73_inputs_whose_squares_no_sum_holds_stop_the_job(book: Path, tmp_path: Path) -> None:
    model = sources.llama()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1e20)
    source = sources.save(model, tmp_path / "src", torch.bfloat16)
    done = quantize(source, tmp_path / "out", text=book)
    stopped(done, tmp_path / "out", DOWN, "a Hessian that is not finite; the largest finite input is ")
    assert 1e20 < float(done.error["found"].rpartition(" ")[2]) < 1e22


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("shift", ["--gptaq", "--no-gptaq"])
def test_f73_a_layer_that_leaves_float16_is_named_with_the_largest_input(
    layer: int, shift: str, book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a card, which computes in the dtype of the weights; here the output of one layer is about 1e5."""
    model = sources.llama()
    with torch.no_grad():
        model.model.layers[layer].mlp.down_proj.weight.mul_(5e4)
    source = sources.save(model, tmp_path / "src")
    monkeypatch.setattr(whole, "compute_dtype", lambda *asked: torch.float16)
    done = quantize(source, tmp_path / "out", shift, text=book)
    stopped(done, tmp_path / "out", f"model.layers.{layer}", "NaN or infinity as output of the source")
    assert "--device cpu" in done.error["hint"] and "float16" in done.error["expected"]
    went_in = float(done.error["found"].rpartition(" ")[2])
    if layer == 0:  # the embeddings of the tokens that were used
        table = load_file(source / "model.safetensors")["model.embed_tokens.weight"]
        used = table[tokens_of(book)[: 8 * 64]]
        assert went_in == pytest.approx(float(used.abs().max()), rel=1e-3)
    else:
        assert 1 < went_in < 100


def tokens_of(book: Path) -> list[int]:
    """Return the tokens of a text, of which each is a byte, numbered in the order of the alphabet."""
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    spelled = {" ": "Ġ"}
    return [letters.index(spelled.get(c, c)) for c in book.read_text()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_f73_an_output_of_1e5_in_bfloat16_is_a_number(
    dtype: torch.dtype, book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """float32 is what a CPU computes in, bfloat16 a card."""
    model = sources.llama()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(1e5)
    source = sources.save(model, tmp_path / "src", torch.bfloat16)
    with open_checkpoint(LocalStore(source)) as checkpoint:
        provider = CheckpointProvider(checkpoint)
        assert whole.compute_dtype(torch.device("cuda"), provider, DOWN) is torch.bfloat16
    monkeypatch.setattr(whole, "compute_dtype", lambda *asked: dtype)
    outputs: list[float] = []
    original = whole.ModelRun._check_output

    def watching(self: whole.ModelRun, index: int, went_in: float) -> None:
        outputs.append(max(float(h.abs().max()) for h in self.stream.hidden))
        original(self, index, went_in)

    monkeypatch.setattr(whole.ModelRun, "_check_output", watching)
    quantize(source, tmp_path / "out", text=book).expect(0)
    assert outputs[1] > 1e5
    entries = manifest(tmp_path / "out")["layers"].values()
    assert all(np.isfinite([e["error"], e["rtn_error"]]).all() for e in entries)
    assert all(np.isfinite(value).all() for value in weights(tmp_path / "out").values())


def test_f73_a_weight_that_is_no_number_is_named(book: Path, tmp_path: Path) -> None:
    model = sources.llama()
    with torch.no_grad():
        model.model.layers[1].mlp.gate_proj.weight[3, 5] = float("inf")
    source = sources.save(model, tmp_path / "src")
    done = quantize(source, tmp_path / "out", text=book).expect(3)
    assert done.error["code"] == "weight-range" and done.error["found"] == "inf"
    assert "model.layers.1.mlp.gate_proj" in done.error["where"].split(", ")
    assert not (tmp_path / "out").exists()
