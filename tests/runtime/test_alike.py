"""Both ways into transformers, ``load`` and ``from_pretrained``, give one model, whatever a file holds."""

from __future__ import annotations

import copy
import json
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402

import w4pack  # noqa: E402
from runtime import models, quarot_models  # noqa: E402
from runtime.ways import EXPERTS, NAME, WAYS, converted, way  # noqa: E402
from w4pack.convert.errors import SourceError  # noqa: E402


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    w4pack.register()


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
    with told():
        model = WAYS[way](folder)
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(model.model.rotary_emb.inv_freq, frequencies)
    assert torch.equal(models.logits(model), logits)


def rotary(dtype: torch.dtype, theta: float, rows: int = 300) -> dict[str, torch.Tensor]:
    """The tables of heads of 16 as old models kept them, in one precision."""
    frequencies = torch.tensor([theta ** (-2 * i / 16) for i in range(8)], dtype=torch.float64)
    angles = torch.outer(torch.arange(rows, dtype=torch.float64), frequencies)
    angles = torch.cat([angles, angles], -1)[None, None]
    tables = {"inv_freq": frequencies, "cos_cached": angles.cos(), "sin_cached": angles.sin()}
    owner = "model.layers.0.self_attn.rotary_emb"
    return {f"{owner}.{name}": table.to(dtype) for name, table in tables.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@way
def test_a_table_that_the_model_computes_too_is_left_aside_in_silence(
    way: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    folder = converted(NAME, tmp_path)
    added(folder, **rotary(dtype, 10000.0))
    with told() as texts:
        WAYS[way](folder)
    assert [text for text in texts if "computed-table" in text] == []


OTHER_TABLES: dict[str, Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]] = {
    "theta": lambda tables: rotary(torch.float32, 11000.0),
    "size": lambda tables: {name: table[..., :4].contiguous() for name, table in tables.items()},
    "dtype": lambda tables: {name: table.int() for name, table in tables.items()},
    "nan": lambda tables: {name: table * torch.nan for name, table in tables.items()},
    "empty": lambda tables: {name: table[..., :0].contiguous() for name, table in tables.items()},
    "one value": lambda tables: {name: table.reshape(-1)[0] for name, table in tables.items()},
}


@pytest.mark.parametrize("case", OTHER_TABLES)
@way
def test_a_table_that_the_model_does_not_compute_is_told(way: str, case: str, tmp_path: Path) -> None:
    folder = converted(NAME, tmp_path)
    logits = models.logits(w4pack.load(folder))
    tables = OTHER_TABLES[case](rotary(torch.float32, 10000.0))
    added(folder, **tables)
    with told() as texts:
        model = WAYS[way](folder)
    (text,) = [text for text in texts if "computed-table" in text]
    assert all(name in text for name in tables) and "which is left aside" in text
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
    for other in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other.init_weights()
        other.apply(other._init_weights)
        other.model.apply(other.model._init_weights)
        assert all(torch.equal(tensor, before[key]) for key, tensor in other.state_dict().items())
        assert torch.equal(models.logits(other), logits)


@way
def test_tensors_that_are_joined_are_counted_once(way: str, tmp_path: Path) -> None:
    made = WAYS[way](converted("autoawq-gemm-w4g64-tied-qwen2", tmp_path))
    for model in (made, copy.deepcopy(made)):
        held = {tensor.data_ptr(): tensor.nbytes for tensor in model.parameters()}
        assert model.get_memory_footprint(return_buffers=False) == sum(held.values())
        frequencies = 2 * model.model.rotary_emb.inv_freq.nbytes  # and the original ones
        assert model.get_memory_footprint() == sum(held.values()) + frequencies
        assert model.model.get_memory_footprint() == model.get_memory_footprint()  # the head is tied


@way
def test_embeddings_that_are_new_are_drawn(way: str, tmp_path: Path) -> None:
    model = WAYS[way](converted(NAME, tmp_path))
    size, logits = model.config.vocab_size, models.logits(model)
    model.resize_token_embeddings(size + 64, mean_resizing=False)
    added = model.get_input_embeddings().weight[size:].float()
    assert 0.5 < float(added.std()) / model.config.initializer_range < 1.5
    assert torch.equal(models.logits(model)[:, :size], logits)


# ---- what was changed since it was written ----------------------------------------------------------------


@contextmanager
def told() -> Iterator[list[str]]:
    """Give the texts of all warnings, each of which the settings of the tests would pass over."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield texts
    texts += [str(warning.message) for warning in found if warning.category is UserWarning]


@way
def test_bytes_of_nobody_are_loaded_with_a_warning(way: str, tmp_path: Path) -> None:
    folder = converted(NAME, tmp_path)
    with told() as texts:
        WAYS[way](folder)
    assert texts == []
    names = ("model.norm.weight", "model.layers.0.self_attn.q_proj.weight_scale")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in names:
        tensors[name][...] = torch.inf
    save_file(tensors, path, metadata={"format": "pt"})
    with told() as texts:
        model = WAYS[way](folder)
    (text,) = texts
    assert all(name in text for name in names)
    assert text.endswith(f"found others; w4pack verify {folder} [tensor-changed]")
    assert torch.isinf(model.model.norm.weight).all()


@way
def test_a_folder_without_its_manifest_is_loaded_with_a_warning(way: str, tmp_path: Path) -> None:
    folder = converted(NAME, tmp_path)
    (folder / "w4pack.json").unlink()
    with told() as texts:
        WAYS[way](folder)
    (text,) = texts
    assert text.startswith(f"{folder}: expected w4pack.json, ") and text.endswith("[no-manifest]")


@way
def test_a_config_that_was_edited_is_taken_with_a_warning(way: str, tmp_path: Path) -> None:
    """Other heads with the same product: no tensor has another shape."""
    folder = converted(NAME, tmp_path)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}))
    with told() as texts:
        WAYS[way](folder)
    keys = "num_attention_heads, num_key_value_heads, head_dim"
    assert texts == [
        f"{path}: expected the values that were written, found others of {keys}, which are taken as they are "
        "[file-edited]"
    ]
