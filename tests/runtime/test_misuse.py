"""Arguments, settings and calls that mean nothing here: one sentence each, before anything is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from click.testing import CliRunner  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

import w4pack  # noqa: E402
from runtime import models, quarot_models  # noqa: E402
from runtime.ways import EXPERTS, NAME, WAYS, converted, way  # noqa: E402
from w4pack import cli  # noqa: E402
from w4pack.convert.errors import Refused, SourceError, UsageError, VerifyError  # noqa: E402
from w4pack.kernels.hf import quantizer  # noqa: E402


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    w4pack.register()


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted(NAME, tmp_path_factory.mktemp("misuse"))


@pytest.fixture(scope="module")
def packed(out: Path) -> Any:
    return w4pack.load(out)


def edit(folder: Path, **changed: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


# ---- arguments --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu:0", torch.device("cpu", 0)])
def test_there_is_one_cpu_by_two_names(device: Any, out: Path, packed: Any) -> None:
    model = w4pack.load(out, device)
    assert {tensor.device for tensor in model.parameters()} == {torch.device("cpu")}
    assert torch.equal(models.logits(model), models.logits(packed))


def test_there_is_no_second_cpu(out: Path) -> None:
    for device in ("cpu:1", torch.device("cpu", 1)):
        with pytest.raises(UsageError) as caught:
            w4pack.load(out, device)
        assert (caught.value.where, caught.value.found) == ("cpu:1", "one CPU, whose number is 0")


@pytest.mark.parametrize("path", [None, 5, b"/somewhere", ["a"]])
def test_a_path_that_is_none_is_named(path: Any) -> None:
    with pytest.raises(UsageError) as caught:
        w4pack.load(path)
    assert (caught.value.code, caught.value.found) == ("path", repr(path))


@pytest.mark.parametrize("dtype", [["a"], {}, 16, torch.float32, "float32", "nn"])
def test_a_dtype_that_is_none_is_not_blamed_on_the_config(dtype: Any, out: Path) -> None:
    with pytest.raises(UsageError) as caught:
        w4pack.load(out, dtype=dtype)
    assert (caught.value.code, caught.value.where, caught.value.found) == ("dtype", None, str(dtype))


@pytest.mark.parametrize("place", ["meta", "xpu:0", "cuda:7", 7, "cpu:1"])
def test_a_device_map_without_kernels_is_refused(
    place: Any, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("accelerate", reason="needs accelerate")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device_map in ({"": place}, {"": place, "lm_head": place}):
        with pytest.raises(UsageError) as caught:
            AutoModelForCausalLM.from_pretrained(out, device_map=device_map)
        where = f"cuda:{place}" if isinstance(place, int) else place
        assert (caught.value.code, caught.value.where) == ("no-device", where)


def test_a_device_map_of_one_cpu_by_two_names_is_of_one(out: Path, packed: Any) -> None:
    pytest.importorskip("accelerate", reason="needs accelerate")
    places = {"model": "cpu", "lm_head": "cpu:0"}
    model = AutoModelForCausalLM.from_pretrained(out, device_map=places)
    assert torch.equal(models.logits(model), models.logits(packed))


def test_places_are_devices_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(quantizer.launch, "device", lambda index: None)
    card = [torch.device("cuda", index) for index in range(2)]
    assert quantizer.places(["cpu", "cpu:0", torch.device("cpu")]) == (torch.device("cpu"),)
    assert quantizer.places([1, "1", "cuda", "cuda:1", card[1]]) == (card[1],)
    assert set(quantizer.places([0, "cuda"])) == set(card)
    for others in (["cpu", 0], ["cpu:0", "disk"], ["disk"]):
        with pytest.raises(UsageError, match="offloaded"):
            quantizer.places(others)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float64", "int8", "bool", "complex64", ["float16"], 5])
def test_a_model_of_a_dtype_that_no_kernel_takes_is_refused(dtype: Any, tmp_path: Path) -> None:
    folder = converted(NAME, tmp_path)
    edit(folder, dtype=dtype)
    with pytest.raises(Refused) as caught:
        w4pack.load(folder)
    if isinstance(dtype, str):
        assert (caught.value.code, caught.value.found) == ("dtype", dtype)
        assert caught.value.where == f"{folder / 'config.json'}: dtype"
        with pytest.raises(Refused) as told:
            AutoModelForCausalLM.from_pretrained(folder)
        assert told.value.to_json() == caught.value.to_json()
    for load in WAYS.values():
        if isinstance(dtype, str):
            assert load(folder, dtype=torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float8_e4m3fn, torch.int32])
@way
def test_another_dtype_that_is_asked_for_is_refused(way: str, dtype: torch.dtype, out: Path) -> None:
    with pytest.raises(UsageError) as caught:
        WAYS[way](out, dtype=dtype)
    assert (caught.value.code, caught.value.found) == ("dtype", str(dtype))


@way
def test_fp16_on_a_model_of_a_wider_range_warns(way: str, tmp_path: Path) -> None:
    folder = converted(NAME, tmp_path)
    edit(folder, dtype="bfloat16")
    with pytest.warns(UserWarning, match="float16 ends at 65504, and the model is of torch.bfloat16"):
        assert WAYS[way](folder, dtype=torch.float16).dtype == torch.float16


@way
def test_a_config_that_gives_no_dtype_leaves_it_to_the_weights(way: str, tmp_path: Path) -> None:
    folder = converted(NAME, tmp_path)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in config.items() if k not in ("dtype", "torch_dtype")}))
    assert WAYS[way](folder).dtype == torch.float16


def test_nothing_is_loaded_where_new_tensors_have_no_numbers(out: Path) -> None:
    with torch.device("meta"), pytest.raises(UsageError) as caught:
        w4pack.load(out)
    assert (caught.value.code, caught.value.found) == ("no-device", "meta")


# ---- arguments of from_pretrained that load has -----------------------------------------------------------

BITS = {"act_bits": 8, "kv_bits": 16}


@pytest.fixture(scope="module")
def rotated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quarot_models.artifact("llama", tmp_path_factory.mktemp("rotated"), **quarot_models.SMALL)


@pytest.mark.parametrize("auto", [True, False])
def test_from_pretrained_takes_bits_as_load_does(auto: bool, rotated: Path) -> None:
    wanted = w4pack.load(rotated, **BITS)
    load = AutoModelForCausalLM if auto else LlamaForCausalLM
    found = load.from_pretrained(rotated, **BITS)
    assert found.online_settings == wanted.online_settings
    assert torch.equal(models.logits(found), models.logits(wanted))
    assert found.config.to_dict()["quantization_config"] == wanted.config.to_dict()["quantization_config"]
    other = load.from_pretrained(rotated, config=found.config)  # as the model whose config it is
    assert other.online_settings == wanted.online_settings
    other = load.from_pretrained(rotated, config=found.config, act_bits=4)
    assert (other.online_settings.act_bits, other.online_settings.kv_bits) == (4, 16)
    assert found.config.quantization_config.act_bits == 8
    again = load.from_pretrained(rotated)  # nothing is left of it
    assert again.online_settings == w4pack.load(rotated).online_settings


@pytest.mark.parametrize("bits", [{"act_bits": 5}, {"kv_bits": 4.0}])
@way
def test_bits_that_no_record_has_are_named_as_arguments(
    way: str, bits: dict[str, Any], rotated: Path
) -> None:
    with pytest.raises(UsageError) as caught:
        WAYS[way](rotated, **bits)
    assert caught.value.where == next(iter(bits)) and "--" not in str(caught.value)


@way
def test_hashes_are_compared_either_way(way: str, tmp_path: Path) -> None:
    folder = converted(NAME, tmp_path)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"][-1] += 1
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(VerifyError) as caught:
        WAYS[way](folder, check_hashes=True)
    assert (caught.value.code, caught.value.where) == ("tensor-hash", "model.safetensors, model.norm.weight")


@pytest.mark.parametrize(
    ("name", "value", "hint"),
    [("device", "cpu", "device_map"), ("threads", 2, "w4pack.load(PATH, threads=N)")],
)
def test_an_argument_of_load_alone_is_refused_in_words(name: str, value: Any, hint: str, out: Path) -> None:
    with pytest.raises(UsageError) as caught:
        AutoModelForCausalLM.from_pretrained(out, **{name: value})
    assert caught.value.where == name and hint in str(caught.value.hint)


def test_models_of_others_are_loaded_as_ever(tmp_path: Path) -> None:
    LlamaForCausalLM(
        LlamaConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1)
    ).save_pretrained(tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.hidden_size == 32
    for unknown in ("device", "nothing", "act_bits"):
        with pytest.raises(TypeError, match=unknown):
            AutoModelForCausalLM.from_pretrained(tmp_path, **{unknown: 1})

    class Own(LlamaForCausalLM):
        def __init__(self, config: LlamaConfig, kv_bits: int = 16) -> None:
            super().__init__(config)
            self.kv_bits = kv_bits

    assert Own.from_pretrained(tmp_path, kv_bits=4).kv_bits == 4


def test_settings_are_taken_after_the_original_was_put_back(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapped = PreTrainedModel.from_pretrained.__func__
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", classmethod(wrapped.__wrapped__))
    w4pack.register()
    model = AutoModelForCausalLM.from_pretrained(out, check_hashes=True)
    assert model.config.quantization_config.quant_method == "w4pack"


# ---- settings ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"), [("num_experts_per_tok", 9), ("num_experts_per_tok", 0), ("return_dict", False)]
)
@way
def test_a_setting_that_no_forward_pass_takes_is_refused(
    way: str, name: str, value: Any, tmp_path: Path
) -> None:
    converted(EXPERTS, tmp_path)
    edit(tmp_path / "out", **{name: value})
    with pytest.raises(Refused) as caught:
        WAYS[way](tmp_path / "out")
    told = caught.value
    assert (told.code, told.where, told.found) == ("setting", f"config.json: {name}", repr(value))


def test_a_count_of_layers_that_is_a_text_is_shown_as_one(tmp_path: Path) -> None:
    folder = quarot_models.artifact("llama", tmp_path, **quarot_models.SMALL)
    edit(folder, num_hidden_layers="2")
    with pytest.raises(SourceError) as caught:
        w4pack.load(folder)
    told = caught.value
    assert (told.where, told.expected, told.found) == (
        "config.json: num_hidden_layers",
        "a whole number",
        "'2'",
    )


def test_what_transformers_says_of_a_config_is_told_whole(tmp_path: Path) -> None:
    converted(NAME, tmp_path)
    edit(tmp_path / "out", num_hidden_layers="2")
    with pytest.raises(Refused) as caught:
        w4pack.load(tmp_path / "out")
    assert "expected int, got str" in str(caught.value.found)


def test_a_tokenizer_that_lacks_a_part_is_told_by_more_than_its_name(tmp_path: Path) -> None:
    converted(NAME, tmp_path)
    (tmp_path / "out" / "tokenizer.json").write_text("{}")
    (tmp_path / "out" / "tokenizer_config.json").unlink(missing_ok=True)
    done = CliRunner().invoke(cli.root, ["generate", str(tmp_path / "out"), "a", "--json"])
    told = json.loads(done.stdout)
    assert (done.exit_code, told["code"]) == (1, "no-tokenizer")
    assert ": " in told["found"], told["found"]


# ---- calls ------------------------------------------------------------------------------------------------


@way
def test_a_packed_model_is_neither_pushed_nor_dequantized_from_memory(
    way: str, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def create(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the Hub was asked")

    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", create)
    model = WAYS[way](out)
    with pytest.raises(UsageError, match="w4pack push OUT ORG/NAME"):
        model.push_to_hub("ORG/NAME")
    with pytest.raises(UsageError, match="--to dense"):
        model.dequantize()
