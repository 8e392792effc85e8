"""A tied head that the file stores all the same: one rule for rotating and for quantizing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from quantize import sources
from runner import Run, run

RTN = ("--quantize", "rtn", "--group-size", 32)
JOBS = {
    "rtn": RTN,
    "rotated": ("--to", "dense", "--rotate", "offline"),
    "both": (*RTN, "--rotate", "offline"),
    "gptq": ("--quantize", "gptq", "--group-size", 32, "--samples", 2, "--seqlen", 32),
}


def with_head(folder: Path, factor: float, *, said: bool = True) -> Path:
    """Save a tied Llama with a head that is the table times ``factor``. ``said``: the config ties them."""
    source = sources.save(sources.llama(tie_word_embeddings=True), folder)
    tensors = safetensors.torch.load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone() * factor
    safetensors.torch.save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": said}))
    return source


def convert(source: Path, out: Path, job: str) -> Run:
    return run("convert", source, out, *JOBS[job], "--threads", 1, "--json")


@pytest.mark.parametrize("job", JOBS)
def test_another_head_is_refused_by_whatever_computes_with_the_weights(job: str, tmp_path: Path) -> None:
    error = convert(with_head(tmp_path / "src", 2.0), tmp_path / "out", job).expect(3).error
    assert (error["code"], error["where"]) == ("tied-differs", "model.safetensors, lm_head.weight")
    assert "tie_word_embeddings: false" in error["hint"]
    assert [p.name for p in tmp_path.iterdir()] == ["src"]


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize(("factor", "said"), [(1.0, True), (2.0, False)], ids=["the table", "not tied"])
def test_the_same_head_and_a_head_of_its_own_are_taken(
    factor: float, said: bool, job: str, tmp_path: Path
) -> None:
    source = with_head(tmp_path / "src", factor, said=said)
    convert(source, tmp_path / "out", job).expect(0)
    if job == "rtn":  # copied as it is
        made, own = (safetensors.torch.load_file(f / "model.safetensors") for f in (tmp_path / "out", source))
        assert torch.equal(made["lm_head.weight"], own["lm_head.weight"])


def test_a_class_that_nobody_describes_has_the_rule_too(tmp_path: Path) -> None:
    source = with_head(tmp_path / "src", 2.0)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"architectures": ["UnheardOfForCausalLM"]}))
    assert convert(source, tmp_path / "out", "rtn").expect(3).error["code"] == "tied-differs"
