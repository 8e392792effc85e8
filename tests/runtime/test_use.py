"""What people do with a model and with the command, beside what they should: right, or said in words."""

import copy
import io
import json
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from click.testing import CliRunner, Result  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from torch import nn  # noqa: E402

import w4pack  # noqa: E402
from packed import layer  # noqa: E402
from runtime import models  # noqa: E402
from w4pack import cli  # noqa: E402
from w4pack.convert import convert  # noqa: E402
from w4pack.convert.errors import Refused, SourceError, UsageError  # noqa: E402
from w4pack.kernels.hf import generate  # noqa: E402
from w4pack.kernels.modules import PackedLinear  # noqa: E402
from w4pack.kernels.spec import LinearSpec  # noqa: E402

NAME = "gptqmodel-w4g32-asym-desc-qwen2"
EXPERTS = "gptqmodel-w4g32-sym-desc-mixtral"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    convert(models.source(NAME, tmp_path), tmp_path / "out")
    return tmp_path / "out"


def edit(folder: Path, name: str = "config.json", **changed: Any) -> None:
    config = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(config | changed))


# ---- saving and copying -----------------------------------------------------------------------------------


def saved(model: Any, place: Path) -> Any:
    torch.save(model, place / "model.pt")
    return torch.load(place / "model.pt", weights_only=False)


def restored(model: Any, place: Path) -> Any:
    """Another model of the same artifact, its numbers lost and read back."""
    torch.save(model.state_dict(), place / "state.pt")
    other = w4pack.load(place / "out")
    with torch.no_grad():
        for tensor in other.parameters():
            tensor.zero_()
    other.load_state_dict(torch.load(place / "state.pt"))
    return other


WAYS: dict[str, Callable[[Any, Path], Any]] = {
    "torch.save": saved,
    "state_dict": restored,
    "pickle": lambda model, place: pickle.loads(pickle.dumps(model)),
    "deepcopy": lambda model, place: copy.deepcopy(model),
}


@pytest.mark.parametrize("name", [NAME, EXPERTS])
def test_a_model_can_be_saved_by_torch_and_copied(name: str, tmp_path: Path) -> None:
    convert(models.source(name, tmp_path), tmp_path / "out")
    model = w4pack.load(tmp_path / "out")
    expected = models.logits(model)
    for way, function in WAYS.items():
        found = function(model, tmp_path)
        assert torch.equal(models.logits(found), expected), way
        assert found.state_dict().keys() == model.state_dict().keys(), way
    size = sum(t.numel() * t.element_size() for t in model.state_dict().values())
    assert (tmp_path / "state.pt").stat().st_size < 2 * size  # each tensor once, not its file for each


# ---- load -------------------------------------------------------------------------------------------------


def test_threads_that_load_at_once_leave_everything_as_it_was(out: Path) -> None:
    before = (nn.Module.register_parameter, nn.init.normal_, torch.get_default_dtype())
    expected = models.logits(w4pack.load(out))
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(w4pack.load(out))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    assert all(torch.equal(models.logits(model), expected) for model in found)
    assert before == (nn.Module.register_parameter, nn.init.normal_, torch.get_default_dtype())


def test_modules_of_another_thread_are_made_with_memory_meanwhile() -> None:
    from w4pack.kernels.hf.load import _parameters_on_meta

    made: list[nn.Module] = []
    with _parameters_on_meta():
        thread = threading.Thread(target=lambda: made.append(nn.Linear(2, 2)))
        thread.start()
        thread.join()
        made.append(nn.Linear(2, 2))
    other, mine = (module.weight.device.type for module in made)
    assert (other, mine) == ("cpu", "meta")


@pytest.mark.parametrize(
    "changed",
    [
        {"hidden_size": "abc"},
        {"num_attention_heads": 0},
        {"vocab_size": -5},
        {"model_type": []},
        {"dtype": "zzz"},
        {"rope_parameters": 5},
    ],
    ids=str,
)
def test_a_config_that_transformers_stumbles_over_is_refused(changed: dict[str, Any], out: Path) -> None:
    edit(out, **changed)
    with pytest.raises(Refused) as told:
        w4pack.load(out)
    assert (told.value.code, told.value.where) == ("no-model", str(out / "config.json"))


@pytest.mark.parametrize("text", ["{", "[]", "null"])
def test_a_generation_config_that_cannot_be_read_is_named(text: str, out: Path) -> None:
    (out / "generation_config.json").write_text(text)
    with pytest.raises(SourceError) as told:
        w4pack.load(out)
    assert told.value.code == "generation-config" and "generation_config.json" in str(told.value.where)


@pytest.mark.parametrize("threads", [-1, "2", True, 1.0])
def test_a_number_of_threads_that_is_none_is_an_error(threads: Any, out: Path) -> None:
    with pytest.raises(UsageError) as told:
        w4pack.load(out, threads=threads, check_hashes=True)
    assert told.value.code == "threads"


def test_an_empty_path_is_no_folder() -> None:
    """To the operating system it is the current one."""
    with pytest.raises(SourceError) as told:
        w4pack.load("")
    assert (told.value.code, told.value.where) == ("no-such-folder", "(empty)")


def test_a_device_that_is_no_device_is_an_error(out: Path) -> None:
    with pytest.raises(UsageError):
        w4pack.load(out, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.float8_e4m3fn])
@pytest.mark.parametrize("how", ["load", "from_pretrained"])
def test_a_dense_tensor_of_a_dtype_that_is_no_weight_is_an_error(how: str, dtype: Any, out: Path) -> None:
    from transformers import AutoModelForCausalLM

    w4pack.register()
    tensors = load_file(out / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(dtype)
    save_file(tensors, out / "model.safetensors")
    (out / "w4pack.json").unlink()  # which says that it was another one
    loader: Callable[..., Any] = w4pack.load if how == "load" else AutoModelForCausalLM.from_pretrained
    with pytest.raises(SourceError) as told:
        loader(out)
    assert told.value.where == "model.norm.weight"
    assert str(told.value.expected).startswith("F16 or BF16 or F32 [")


# ---- layers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("act_order", [False, True])
def test_activations_may_have_any_strides(act_order: bool) -> None:
    spec = LinearSpec(128, 64, group_size=32, act_order=act_order)
    tensors, _ = layer(spec)
    module = PackedLinear(spec)
    for name, tensor in tensors.items():
        module._put(name, tensor)
    for x in (torch.randn(128, 3).half().t(), torch.randn(1, 128).half().expand(3, -1)):
        assert torch.equal(module(x), module(x.clone(memory_format=torch.contiguous_format)))


@pytest.mark.parametrize("shape", [(2, 31), (1, 128), (2, 32), ()], ids=str)
def test_an_input_of_another_width_is_an_error(shape: tuple[int, ...]) -> None:
    spec = LinearSpec(64, 64)
    module = PackedLinear(spec)
    for name, tensor in layer(spec)[0].items():
        module._put(name, tensor)
    with pytest.raises(UsageError) as told:
        module(torch.zeros(shape, dtype=torch.float16))
    assert (told.value.expected, told.value.found) == ("(..., 64)", str(shape))


@pytest.mark.parametrize("name", [NAME, EXPERTS])
def test_a_gradient_through_packed_layers_is_an_error(name: str, tmp_path: Path) -> None:
    model = w4pack.load(models.artifact(name, tmp_path))
    embedded = model.get_input_embeddings()(models.TOKENS).detach()
    expected = models.logits(model)
    found = model(inputs_embeds=embedded.requires_grad_(True)).logits
    assert torch.equal(found[0].detach(), expected)
    with pytest.raises(UsageError) as told:
        found.float().sum().backward()
    assert told.value.code == "no-gradient" and embedded.grad is None


# ---- generate ---------------------------------------------------------------------------------------------


def run(*args: object, stdin: str | bytes = "") -> Result:
    return CliRunner().invoke(cli.root, ["generate", *map(str, args), "--device", "cpu"], input=stdin)


def test_a_prompt_that_is_no_text_is_an_error(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = run(out, "a\udcff")
    assert done.exit_code == 2 and "a prompt is no text" in done.stderr
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), encoding="utf-8"))
    with pytest.raises(UsageError, match="a prompt is no text"):
        generate._prompt("-")
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(UsageError, match="stdin is closed"):
        generate._prompt("-")


@pytest.mark.parametrize(
    "option", [("--seed", "-1"), ("--seed", 2**64), ("--temperature", "nan"), ("--temperature", "inf")]
)
def test_numbers_that_draw_nothing_are_usage_errors(option: tuple[str, object], out: Path) -> None:
    done = run(out, "She", *option)
    assert done.exit_code == 2 and option[0] in done.stderr and "bug" not in done.stderr


def test_options_of_drawing_have_no_effect_where_nothing_is_drawn(out: Path) -> None:
    said = run(out, "She", "--max-new-tokens", "1", "--top-p", "0.5", "--seed", "3").stderr
    for option in ("--top-p", "--seed"):
        assert f"warning: {option} has no effect without --temperature" in said
    drawn = ("--temperature", "1", "--top-p", "0.5", "--seed", "3")
    assert "no effect" not in run(out, "She", "--max-new-tokens", "1", *drawn).stderr


def test_an_answer_ends_where_the_context_does(out: Path) -> None:
    edit(out, max_position_embeddings=8)
    edit(out, "generation_config.json", eos_token_id=None)
    options = ("--max-new-tokens", "100")
    data = json.loads(run(out, "She", *options, "--json").stdout)
    assert data["prompt_tokens"] + data["new_tokens"] == 8
    assert (data["finish"], data["finish_reason"]) == ("length", "context")
    assert "the answer is cut: the model's context of 8 tokens is full" in run(out, "She", *options).stderr
    assert run(out, "She", *options, "-q").stderr == ""


def test_an_answer_ends_at_the_length_asked_for_or_by_itself(out: Path) -> None:
    edit(out, "generation_config.json", eos_token_id=None)
    options = ("--max-new-tokens", "2")
    data = json.loads(run(out, "She", *options, "--json").stdout)
    assert (data["finish"], data["finish_reason"], data["new_tokens"]) == ("length", "length", 2)
    assert "the answer is cut at --max-new-tokens 2\n" in run(out, "She", *options).stderr
    size = json.loads((out / "config.json").read_text())["vocab_size"]
    edit(out, "generation_config.json", eos_token_id=list(range(size)))  # whichever comes
    data = json.loads(run(out, "She", "--max-new-tokens", "1", "--json").stdout)
    assert (data["finish"], data["finish_reason"], data["new_tokens"]) == ("stop", "stop", 1)
    assert "is cut" not in run(out, "She", "--max-new-tokens", "1").stderr


@pytest.mark.parametrize(
    "kept", [{"num_beams": 3}, {"num_return_sequences": 3, "do_sample": True}, {"eos_token_id": []}], ids=str
)
def test_a_generation_config_of_many_answers_gives_one(kept: dict[str, Any], out: Path) -> None:
    (out / "generation_config.json").write_text(json.dumps(kept))
    done = run(out, "She", "--max-new-tokens", "3", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["new_tokens"] == 3
