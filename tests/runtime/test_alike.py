"""Both ways into transformers, ``load`` and ``from_pretrained``, give one model, whatever a file holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

import w4pack  # noqa: E402
from runtime import models, quarot_models  # noqa: E402
from w4pack.convert import convert  # noqa: E402
from w4pack.convert.errors import SourceError  # noqa: E402

NAME = "gptqmodel-w4g32-asym-desc-qwen2"
EXPERTS = "gptqmodel-w4g32-sym-desc-mixtral"
WAYS: dict[str, Callable[..., Any]] = {
    "load": w4pack.load,
    "from_pretrained": AutoModelForCausalLM.from_pretrained,
}
way = pytest.mark.parametrize("way", WAYS)


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    w4pack.register()


def converted(name: str, place: Path) -> Path:
    convert(models.source(name, place), place / "out")
    return place / "out"


def added(folder: Path, **tensors: torch.Tensor) -> None:
    """Put tensors into an artifact as an older tool would have: its manifest knows none of them."""
    path = folder / "model.safetensors"
    save_file(load_file(path) | tensors, path, metadata={"format": "pt"})


# ---- tables that models compute ---------------------------------------------------------------------------


@pytest.mark.parametrize("table", ["inv_freq", "cos_cached", "sin_cached"])
@pytest.mark.parametrize("owner", ["model.rotary_emb", "model.layers.0.self_attn.rotary_emb"])
@way
def test_tables_that_models_compute_are_left_aside(way: str, owner: str, table: str, tmp_path: Path) -> None:
    folder = converted(NAME, tmp_path)
    before = w4pack.load(folder)
    frequencies, logits = before.model.rotary_emb.inv_freq, models.logits(before)
    added(folder, **{f"{owner}.{table}": torch.ones(frequencies.shape, dtype=torch.bfloat16)})
    model = WAYS[way](folder)
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(model.model.rotary_emb.inv_freq, frequencies)
    assert torch.equal(models.logits(model), logits)


@way
def test_any_other_buffer_that_no_file_has_is_a_tensor_too_many(way: str, tmp_path: Path) -> None:
    folder = converted(NAME, tmp_path)
    name = "model.rotary_emb.original_inv_freq"
    added(folder, **{name: w4pack.load(folder).model.rotary_emb.inv_freq.clone()})
    with pytest.raises(SourceError) as caught:
        WAYS[way](folder)
    assert (caught.value.code, caught.value.where) == ("extra-tensor", name)


# ---- numbers that are there -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [NAME, EXPERTS, "online"])
@way
def test_weights_that_were_loaded_are_not_drawn_anew(way: str, name: str, tmp_path: Path) -> None:
    online = name == "online"
    folder = (
        quarot_models.artifact("llama", tmp_path, **quarot_models.SMALL)
        if online
        else converted(name, tmp_path)
    )
    model = WAYS[way](folder)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    logits = models.logits(model)
    model.init_weights()
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    assert torch.equal(models.logits(model), logits)
