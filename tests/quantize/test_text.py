"""Calibration text and evaluation: what is used, what is measured, what is refused."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from quantize import sources
from quantize.test_outputs import FEW, manifest, quantize
from runner import run
from w4pack.convert import evaluate
from w4pack.convert.errors import UsageError
from w4pack.convert.quantize import calibration, texts


def tokens(count: int) -> torch.Tensor:
    return torch.arange(count)


@pytest.mark.parametrize(
    ("samples", "seed", "firsts"),
    [(2, 0, [0, 10]), (2, 1, [20, 30]), (3, 1, [30, 40, 0]), (9, 0, [0, 10, 20, 30, 40])],
)
def test_windows_follow_each_other_and_the_seed_moves_on(samples: int, seed: int, firsts: list[int]) -> None:
    found = calibration.cut(tokens(57), samples, 10, seed)
    assert found[:, 0].tolist() == firsts
    assert all(row.tolist() == list(range(row[0], row[0] + 10)) for row in found)


def test_f72_a_text_shorter_than_a_window_is_one_window() -> None:
    assert calibration.cut(tokens(4), 128, 2048, 3).tolist() == [[0, 1, 2, 3]]


def test_f72_a_sample_of_four_tokens_runs_and_warns_with_the_numbers(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("word")
    done = quantize(llama, tmp_path / "out", text=tmp_path / "t.txt").expect(0)
    warning = next(e for e in done.events if e.get("code") == "calibration-few")
    assert "4 tokens" in warning["found"] and "128" in warning["expected"]
    assert manifest(tmp_path / "out")["quantization"]["calibration"]["tokens"] == 4


@pytest.mark.parametrize("content", ["", "  \n\n"])
def test_f72_an_empty_text_is_a_usage_error(content: str, llama: Path, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text(content)
    done = quantize(llama, tmp_path / "out", text=tmp_path / "t.txt").expect(2)
    assert done.error["where"] == str(tmp_path / "t.txt")
    assert not (tmp_path / "out").exists()


def test_f72_short_lines_are_left_out_and_the_digest_covers_what_is_used(llama: Path, tmp_path: Path) -> None:
    lines = ["a", "hello world", "", "b", "more of it"]
    (tmp_path / "t.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in lines))
    (tmp_path / "u.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in lines if len(t) > 1))
    tokenizer = AutoTokenizer.from_pretrained(llama)
    one, two = (
        calibration.calibrate(str(tmp_path / name), tokenizer, samples=2, seqlen=8, seed=0)
        for name in ("t.jsonl", "u.jsonl")
    )
    assert (one.skipped, two.skipped) == (3, 0)
    assert one.record()["digest"] == two.record()["digest"]
    joined = "hello worldmore of it"
    assert one.windows[0].tolist() == tokenizer(joined)["input_ids"][:8]


@pytest.mark.parametrize("line", ["{", "[]", '{"content": "x"}', '{"text": 3}'])
def test_a_line_that_is_no_text_is_named(line: str, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"text": "good"}\n' + line)
    with pytest.raises(UsageError) as caught:
        list(texts.Texts(str(tmp_path / "t.jsonl")))
    assert caught.value.where == f"{tmp_path / 't.jsonl'}: line 2"


@pytest.mark.parametrize("half", ["ud800", "udfff"])
def test_half_of_a_surrogate_pair_is_told_with_its_line(half: str, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"text": "\\ud83d\\ude00"}\n{"text": "a\\' + half + '"}')
    with pytest.raises(UsageError, match="half of a surrogate pair") as caught:
        list(texts.Texts(str(path)))
    assert (caught.value.where, caught.value.found) == (f"{path}: line 2", f"\\{half}")


def test_numbers_beside_the_text_may_be_of_any_length(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"id": ' + "9" * 10_000 + ', "x": 1e999, "text": "words"}')
    assert list(texts.Texts(str(path))) == ["words"]


def test_too_little_text_is_told_with_a_way_on(llama: Path, book: Path, tmp_path: Path) -> None:
    done = quantize(llama, tmp_path / "out", "--samples", 10_000, "--dry-run", text=book).expect(0)
    (short,) = [e for e in done.events if e["event"] == "warning" and e["code"] == "calibration-short"]
    count = short["found"].partition(" ")[0]
    assert f"`--samples {count}` asks for what there is" in short["text"]
    again = quantize(llama, tmp_path / "out", "--samples", count, "--dry-run", text=book).expect(0)
    assert not [e for e in again.events if e.get("code") == "calibration-short"]


@pytest.mark.parametrize(("seqlen", "told"), [(256, []), (257, ["windows of 257 tokens"])])
def test_windows_beyond_the_model_s_positions_are_told(
    seqlen: int, told: list[str], llama: Path, book: Path, tmp_path: Path
) -> None:
    done = quantize(llama, tmp_path / "out", "--seqlen", seqlen, "--dry-run", text=book).expect(0)
    long = [e for e in done.events if e["event"] == "warning" and e["code"] == "windows-long"]
    assert [e["found"] for e in long] == told
    words = ("eval", llama, "--text", book, "--windows", 1, "--threads", 1, "--seqlen", seqlen)
    assert ("`--seqlen 256` stays within them" in run(*words).expect(0).err) == bool(told)


@pytest.mark.parametrize(("positions", "length"), [(64, 64), (256, 256), (2048, 512), (1, 512), (None, 512)])
def test_windows_nobody_asked_for_stay_within_the_model_s_positions(
    positions: int | None, length: int, llama: Path, book: Path, tmp_path: Path
) -> None:
    shutil.copytree(llama, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    changed = {**config, "max_position_embeddings": positions}
    if positions is None:
        del changed["max_position_embeddings"]
    (tmp_path / "model" / "config.json").write_text(json.dumps(changed))
    found = evaluate(tmp_path / "model", book, windows=1, workers=1)
    assert (found["seqlen"], found["warnings"]) == (length, [])


@pytest.mark.parametrize("make", [None, "folder", "binary"])
def test_a_text_that_cannot_be_read_is_named(make: str | None, tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    if make == "folder":
        path.mkdir()
    if make == "binary":
        path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError) as caught:
        list(texts.Texts(str(path)))
    assert caught.value.where == str(path)


def test_the_built_in_sample_is_text() -> None:
    (text,) = texts.Texts(None)
    assert len(text) > 100_000 and texts.Texts(None).name == texts.NAME


def test_a_sketch_sees_shared_passages_and_no_others() -> None:
    generator = np.random.default_rng(0)
    one, two = generator.integers(0, 50_000, 5000), generator.integers(0, 50_000, 5000)
    record = {"sketch": calibration.sketch(one)}
    assert calibration.overlap(record, one) == 1.0
    assert calibration.overlap(record, two) == 0.0
    assert 0.3 < calibration.overlap(record, np.concatenate([two, one[:2500]])) < 0.7


# ---- evaluation --------------------------------------------------------------------------------------


def test_perplexity_is_that_of_transformers_on_each_window_alone(llama: Path, book: Path) -> None:
    told = run(
        "eval", llama, "--text", book, "--windows", 5, "--seqlen", 50, "--threads", 1, "--json"
    ).expect(0)
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    ids = torch.tensor(list(book.read_bytes()))
    ids = torch.tensor(AutoTokenizer.from_pretrained(llama)(book.read_text())["input_ids"])
    total = 0.0
    for i in range(5):
        window = ids[50 * i : 50 * i + 50].unsqueeze(0)
        with torch.no_grad():
            logits = model(window).logits[0].double()
        total += float(torch.nn.functional.cross_entropy(logits[:-1], window[0, 1:], reduction="sum"))
    assert told.data["scored"] == 5 * 49
    assert told.data["perplexity"] == pytest.approx(math.exp(total / (5 * 49)), rel=1e-5)


def test_a_model_against_itself_differs_by_nothing(llama: Path, book: Path) -> None:
    value = run(
        "eval", llama, "--text", book, "--windows", 3, "--seqlen", 64, "--against", llama, "--json"
    ).expect(0)
    assert value.data["kl_mean"] == 0 and value.data["nats"] == 0 and value.data["top1_agreement"] == 1


def test_divergence_is_that_of_float64() -> None:
    from w4pack.convert.quantize.evaluation import divergence

    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(300, 40, generator=generator) * 3 for _ in range(2))
    p, q = a.double().softmax(-1), b.double().softmax(-1)
    assert torch.allclose(divergence(a, b).double(), (p * (p / q).log()).sum(-1), atol=1e-5)


@pytest.mark.parametrize("count", [2, 40])
def test_intervals_are_those_of_student(count: int) -> None:
    from w4pack.convert.quantize.evaluation import interval

    values = np.random.default_rng(1).normal(0.1, 0.03, count)
    mean, half = interval(list(values))
    factor = {2: 12.71, 40: 2.02}[count]  # tables, 1 and 39 degrees of freedom
    assert mean == pytest.approx(values.mean())
    assert half == pytest.approx(factor * values.std(ddof=1) / count**0.5)


def test_f82_measuring_on_the_calibration_text_is_said(llama: Path, book: Path, tmp_path: Path) -> None:
    quantize(llama, tmp_path / "out", text=book).expect(0)
    words = ("eval", tmp_path / "out", "--windows", 8, "--seqlen", 64)
    told = run(*words, "--text", book)
    told.expect(0, "calibrated with", "100%")
    other = sources.text(tmp_path / "other.txt", seed=11)
    assert "calibrated with" not in run(*words, "--text", other).expect(0).text


def test_a_text_without_one_window_is_a_usage_error(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("short")
    done = run("eval", llama, "--text", tmp_path / "t.txt", "--json").expect(2)
    assert done.error["expected"] == "at least 256 tokens" and done.error["found"] == "5 tokens"


def test_every_packed_form_of_one_source_has_one_perplexity(demo: Path, book: Path, tmp_path: Path) -> None:
    """The act-order GPTQ demo, its artifact and its dense model are the same numbers."""
    found: list[Any] = []
    run("convert", demo, tmp_path / "marlin", "--to", "marlin").expect(0)
    run("convert", demo, tmp_path / "dense", "--to", "dense", "--dtype", "float32").expect(0)
    for folder in (demo, tmp_path / "marlin", tmp_path / "dense"):
        if not (folder / "tokenizer.json").exists():
            pytest.skip("needs a tokenizer in the demo")
        done = run("eval", folder, "--text", book, "--windows", 2, "--seqlen", 32, "--json").expect(0)
        found.append(done.data["perplexity"])
    assert found[0] == found[1] == found[2]


# ---- bits per weight ---------------------------------------------------------------------------------


def test_bpw_meets_its_target_from_below_and_says_what_it_chose(
    llama: Path, book: Path, tmp_path: Path
) -> None:
    source = sources.save(sources.llama(hidden_size=128, intermediate_size=256), tmp_path / "src")
    words = ("--quantize", "gptq", "--bpw", 5.0, "--calibration", book, *FEW, "--json")
    done = run("convert", source, tmp_path / "out", *words).expect(0)
    value = manifest(tmp_path / "out")
    assert 4.6 < value["quantization"]["bits_per_weight"] <= 5.0
    schemes = {n: e["scheme"] for n, e in value["layers"].items()}
    assert len(set(schemes.values())) > 1
    for layer in range(2):
        base = f"model.layers.{layer}."
        assert len({schemes[f"{base}self_attn.{p}_proj"] for p in "qkv"}) == 1
        assert schemes[f"{base}mlp.gate_proj"] == schemes[f"{base}mlp.up_proj"]
    chosen = value["quantization"]["chosen"]
    assert chosen.keys() == schemes.keys()
    raised = {n for n, why in chosen.items() if why["error"] < why["error_cheapest"]}
    assert raised == {n for n, why in chosen.items() if schemes[n] != why["cheapest"]}
    assert raised
    told = [e["text"] for e in done.events if e["event"] == "note" and e["text"].startswith("--bpw: ")]
    assert sum(int(line.split()[1]) for line in told) == len(chosen)
    for name in raised:
        kind = name.rpartition(".")[2]
        assert any(f"x {kind}: {schemes[name]};" in line and "with the cheapest" in line for line in told)
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"{len(raised)} of {len(chosen)} linears have more bits" in card
    listed = [
        name for name in raised if re.search(rf"`{re.escape(name)}` \| \S+ \| \S+ with 4 bit g128 sym", card)
    ]
    assert len(listed) == min(len(raised), 10)


@pytest.mark.parametrize(
    ("options", "code"), [(("--bpw", 4.05), 3), (("--bpw", 3), 2), (("--bpw", 5, "--group-size", 32), 2)]
)
def test_bpw_that_cannot_be_met_is_refused(
    options: tuple[Any, ...], code: int, llama: Path, tmp_path: Path
) -> None:
    done = run("convert", llama, tmp_path / "out", "--quantize", "rtn", "--json", *options).expect(code)
    assert done.error["where"] == "--bpw"


def test_of_what_has_no_end_no_more_is_read_than_is_used() -> None:
    from w4pack.convert.quantize.texts import beginning

    text, more = beginning(Path("/dev/zero"), 1000)
    assert (text, more) == ("\0" * 1000, True)
