"""Arguments, settings and calls that mean nothing here: one sentence each, before anything is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from click.testing import CliRunner  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

import w4pack  # noqa: E402
from runtime import models, quarot_models  # noqa: E402
from runtime.ways import EXPERTS, NAME, WAYS, converted, way  # noqa: E402
from w4pack import cli  # noqa: E402
from w4pack.convert.errors import Refused, SourceError, UsageError  # noqa: E402


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


@pytest.mark.parametrize("device", ["cpu:0", "cpu:1", torch.device("cpu", 0)])
def test_there_is_one_cpu_whatever_its_number(device: Any, out: Path, packed: Any) -> None:
    model = w4pack.load(out, device)
    assert {tensor.device for tensor in model.parameters()} == {torch.device("cpu")}
    assert torch.equal(models.logits(model), models.logits(packed))


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


@pytest.mark.parametrize("place", ["meta", "xpu:0", "cuda:7", 7])
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


def test_a_cpu_by_two_names_is_offloading_to_accelerate(out: Path) -> None:
    pytest.importorskip("accelerate", reason="needs accelerate")
    with pytest.raises(UsageError, match="offloaded"):
        AutoModelForCausalLM.from_pretrained(out, device_map={"model": "cpu", "lm_head": "cpu:0"})


def test_nothing_is_loaded_where_new_tensors_have_no_numbers(out: Path) -> None:
    with torch.device("meta"), pytest.raises(UsageError) as caught:
        w4pack.load(out)
    assert (caught.value.code, caught.value.found) == ("no-device", "meta")


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
