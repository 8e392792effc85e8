"""What does not run says so before a byte of a tensor is read, both ways; nothing is ever left to chance."""

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from artifacts import relabel  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoModelForCausalLM, MixtralForCausalLM  # noqa: E402

import w4pack  # noqa: E402
from runtime import models  # noqa: E402
from w4pack.convert import convert  # noqa: E402
from w4pack.convert.errors import Refused, SourceError, UsageError, W4PackError  # noqa: E402
from w4pack.kernels import transfer  # noqa: E402
from w4pack.kernels.hf import asking, load, quantizer  # noqa: E402

DENSE, EXPERTS = "gptqmodel-w4g32-asym-desc-qwen2", "gptqmodel-w4g32-sym-desc-mixtral"
Q = "model.layers.0.self_attn.q_proj"
W1 = "model.layers.0.block_sparse_moe.experts.1.w1"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    w4pack.register()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One dense artifact and one with experts."""
    found = {}
    for name in (DENSE, EXPERTS):
        place = tmp_path_factory.mktemp(name)
        convert(models.source(name, place), place / "out")
        found[name] = place / "out"
    return found


def edited(folder: Path, place: Path, edit: Callable[[Tensors], Any]) -> Path:
    """Copy an artifact and change its tensors."""
    shutil.copytree(folder, place)
    tensors = load_file(place / "model.safetensors")
    edit(tensors)
    save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    return place


def configured(folder: Path, place: Path, edit: Callable[[dict[str, Any]], Any]) -> Path:
    """Copy an artifact and change its config.json."""
    shutil.copytree(folder, place)
    config = json.loads((place / "config.json").read_text())
    edit(config)
    (place / "config.json").write_text(json.dumps(config))
    return place


def both(folder: Path) -> list[W4PackError]:
    """Return the errors of both ways into transformers."""
    found = []
    for way in (w4pack.load, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(W4PackError) as caught:
            way(folder)
        found.append(caught.value)
    return found


def drop(name: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.pop(name)


def put(name: str, *shape: int, dtype: torch.dtype = torch.float16) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({name: torch.zeros(shape, dtype=dtype)})


TENSORS = {
    "packed weight missing": (DENSE, drop(f"{Q}.weight"), f"{Q}.weight"),
    "scales missing": (DENSE, drop(f"{Q}.weight_scale"), f"{Q}.weight_scale"),
    "zero points missing": (DENSE, drop(f"{Q}.weight_zero_point"), f"{Q}.weight_zero_point"),
    "bias of the model missing": (DENSE, drop(f"{Q}.bias"), f"{Q}.bias"),
    "norm missing": (DENSE, drop("model.norm.weight"), "model.norm.weight"),
    "head missing": (DENSE, drop("lm_head.weight"), "lm_head.weight"),
    "expert's order missing": (EXPERTS, drop(f"{W1}.act_perm"), f"{W1}.act_perm"),
    "router missing": (
        EXPERTS,
        drop("model.layers.0.block_sparse_moe.gate.weight"),
        "gate.weight",
    ),
    "a tensor too many": (DENSE, put("model.layers.0.self_attn.gate.weight", 4, 4), "self_attn.gate.weight"),
    "a layer too many": (DENSE, put("model.layers.9.mlp.up_proj.bias", 4), "model.layers.9.mlp.up_proj.bias"),
    "norm of another size": (DENSE, put("model.norm.weight", 7), "model.norm.weight"),
    "scales of another size": (DENSE, put(f"{Q}.weight_scale", 1, 64), f"{Q}.weight_scale"),
    "scales of another dtype": (
        DENSE,
        put(f"{Q}.weight_scale", 2, 64, dtype=torch.float32),
        f"{Q}.weight_scale",
    ),
}


@pytest.mark.pair
@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_do_not_fit_are_named(case: str, made: dict[str, Path], tmp_path: Path) -> None:
    name, edit, where = TENSORS[case]
    folder = edited(made[name], tmp_path / "edited", edit)
    for error in both(folder):
        assert where in str(error)
    (folder / "w4pack.json").unlink()  # which tells of other dtypes and shapes first
    for error in both(folder):
        assert isinstance(error, SourceError)
        assert where in str(error)


def test_all_problems_are_listed_at_once(made: dict[str, Path], tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        del tensors["model.norm.weight"], tensors["model.layers.0.input_layernorm.weight"]
        tensors["stray"] = torch.zeros(3)

    for error in both(edited(made[DENSE], tmp_path / "edited", edit)):
        text = str(error)
        assert all(name in text for name in ("model.norm.weight", "layers.0.input_layernorm.weight", "stray"))


def test_an_expert_that_is_missing_altogether_is_named(made: dict[str, Path], tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        for name in [n for n in tensors if n.startswith(f"{W1}.")]:
            del tensors[name]

    for error in both(edited(made[EXPERTS], tmp_path / "edited", edit)):
        assert "experts" in str(error)


CONFIGS: dict[str, tuple[Callable[[dict[str, Any]], Any], type[W4PackError], str]] = {
    "version": (lambda q: q.update(artifact_version=2), Refused, "artifact_version"),
    "layout": (lambda q: q.update(layout="marlin-8x8"), Refused, "layout"),
    "key": (lambda q: q.update(sparsity=True), Refused, "sparsity"),
    "online": (
        lambda q: q.update(online=[{"kind": "hadamard", "site": "mlp_mid"}]),
        Refused,
        "online.0",
    ),
    "online kind": (lambda q: q.update(online=[{"kind": "melt"}]), Refused, "melt"),
}


@pytest.mark.pair
@pytest.mark.parametrize("case", CONFIGS)
def test_an_artifact_of_an_unknown_kind_is_refused(case: str, made: dict[str, Path], tmp_path: Path) -> None:
    edit, kind, where = CONFIGS[case]
    folder = configured(made[DENSE], tmp_path / "edited", lambda c: edit(c["quantization_config"]))
    for path in folder.glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:1000])  # nobody gets as far as the tensors
    for error in both(folder):
        assert isinstance(error, kind)
        assert where in str(error)


def test_a_model_without_a_place_for_a_layer_is_refused(made: dict[str, Path], tmp_path: Path) -> None:
    fewer = configured(
        made[DENSE],
        tmp_path / "fewer",
        lambda c: c.update(num_hidden_layers=1, max_window_layers=1, layer_types=None),
    )
    wider = configured(made[DENSE], tmp_path / "wider", lambda c: c.update(intermediate_size=256))
    for error in both(fewer):
        assert "model.layers.1." in str(error)
    for error in both(wider):
        assert "mlp" in str(error) and "256" in str(error)


@pytest.mark.pair
@pytest.mark.parametrize(
    ("key", "value", "code", "expected"),
    [
        ("num_hidden_layers", 10**6, "layers-missing", "at most 54"),
        ("vocab_size", 321, "config-size", "at most 320, the longest side of a tensor"),
        ("hidden_size", 10**9, "config-size", "at most 320, the longest side of a tensor"),
        ("num_local_experts", 10**9, "config-size", "at most 320, the longest side of a tensor"),
    ],
)
def test_what_no_header_has_is_refused_before_a_model_is_made(
    key: str,
    value: int,
    code: str,
    expected: str,
    made: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = configured(made[EXPERTS], tmp_path / "edited", lambda c: c.update({key: value}))
    monkeypatch.setattr(MixtralForCausalLM, "__init__", None)
    for error in both(folder):
        assert (type(error), error.code, error.expected) == (SourceError, code, expected)
        assert (error.where, error.found) == (f"config.json: {key}", f"{value:,}")


def test_an_artifact_in_a_subfolder_is_not_taken_for_what_lies_above(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    for folder in (tmp_path, tmp_path / "inner"):
        (folder / "config.json").write_text("{}")
    assert asking._folder_of((tmp_path,), {}) == tmp_path
    assert asking._folder_of((tmp_path,), {"subfolder": "inner"}) == tmp_path / "inner"
    assert (
        asking._folder_of((), {"pretrained_model_name_or_path": str(tmp_path), "subfolder": "other"}) is None
    )
    assert asking._folder_of(("org/name",), {}) is None and asking._folder_of((None,), {}) is None


def test_layers_that_no_header_has_are_refused_before_a_config_lists_them(
    made: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = configured(
        made[DENSE], tmp_path / "edited", lambda c: c.update(num_hidden_layers=10**11, layer_types=None)
    )
    monkeypatch.setattr(load, "AutoConfig", None)
    with pytest.raises(SourceError) as caught:
        w4pack.load(folder)
    assert caught.value.code == "layers-missing"


def test_a_config_that_is_no_language_model_is_refused(made: dict[str, Path], tmp_path: Path) -> None:
    folder = configured(made[DENSE], tmp_path / "edited", lambda c: c.update(model_type="nothing_known"))
    with pytest.raises(Refused, match=r"config\.json"):
        w4pack.load(folder)


def test_hashes_are_compared_on_request(made: dict[str, Path], tmp_path: Path) -> None:
    folder = edited(made[DENSE], tmp_path / "edited", lambda t: t["model.norm.weight"].mul_(2))
    w4pack.load(folder)
    with pytest.raises(W4PackError, match=r"model\.norm\.weight"):
        w4pack.load(folder, check_hashes=True)
    w4pack.load(made[DENSE], check_hashes=True)


def test_tensors_that_were_relabelled_are_named_before_anything_is_read(
    made: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(made[DENSE], tmp_path / "edited")
    names = (f"{Q}.weight_scale", "model.norm.weight")
    relabel(folder, {name: {"dtype": "BF16"} for name in names})
    monkeypatch.setattr(transfer, "execute", None)
    for error in both(folder):
        told = {(p.code, p.where) for p in error.problems}
        assert told == {("tensor-relabelled", f"model.safetensors, {name}") for name in names}


def test_tensors_that_were_exchanged_are_named_without_being_asked(
    made: dict[str, Path], tmp_path: Path
) -> None:
    k, v = (f"model.layers.0.self_attn.{leaf}_proj.weight" for leaf in "kv")
    folder = edited(made[DENSE], tmp_path / "edited", lambda t: t.update({k: t[v].clone(), v: t[k].clone()}))
    for error in both(folder):
        assert {(p.code, p.found) for p in error.problems} == {
            ("tensor-exchanged", f"those of {name}") for name in (k, v)
        }


@pytest.mark.parametrize("dtype", ["float32", torch.float32, "int8", "nonsense"])
def test_a_dtype_the_kernels_do_not_take_is_refused(dtype: Any, made: dict[str, Path]) -> None:
    with pytest.raises(UsageError, match="float16 or bfloat16"):
        w4pack.load(made[DENSE], dtype=dtype)


@pytest.mark.parametrize("device", ["cuda", "cuda:7", "tpu", "mps"])
def test_a_device_that_is_not_there_is_refused(device: str, made: dict[str, Path], monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError) as caught:
        w4pack.load(made[DENSE], device)
    assert caught.value.where == device


def _old_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))


def test_a_card_that_is_too_old_is_refused_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _old_card(monkeypatch)
    with pytest.raises(UsageError) as caught:
        w4pack.load(tmp_path / "nothing", "cuda")
    assert (caught.value.code, caught.value.found) == ("card-too-old", "7.5")


def test_from_pretrained_refuses_a_card_that_is_too_old(
    made: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("accelerate", reason="needs accelerate")  # for device_map
    _old_card(monkeypatch)
    with pytest.raises(UsageError) as caught:
        AutoModelForCausalLM.from_pretrained(made[DENSE], device_map="cuda:0")
    assert caught.value.code == "card-too-old"


@pytest.mark.parametrize("name", [DENSE, EXPERTS])
@pytest.mark.parametrize("values", [(0, 0), (-1, 1), (1 << 30, 0)])
def test_an_order_that_is_none_is_an_error(
    name: str, values: tuple[int, int], made: dict[str, Path], tmp_path: Path
) -> None:
    def edit(tensors: Tensors) -> None:
        perm = next(t for n, t in tensors.items() if n.endswith("act_perm"))
        perm[0], perm[1] = values

    for error in both(edited(made[name], tmp_path / "edited", edit)):
        assert (type(error), error.code) == (SourceError, "act-perm")
        assert "act_perm" in str(error.where)


@pytest.mark.parametrize("device_map", [None, "cpu", "auto", {"": "cpu"}])
def test_device_maps_of_one_device(device_map: Any, made: dict[str, Path]) -> None:
    if device_map is not None:
        pytest.importorskip("accelerate", reason="needs accelerate")
    exact = models.logits(w4pack.load(made[EXPERTS]))
    model = AutoModelForCausalLM.from_pretrained(made[EXPERTS], device_map=device_map)
    assert torch.equal(models.logits(model), exact)


def test_offloading_is_refused(made: dict[str, Path]) -> None:
    config = quantizer.W4PackConfig(
        **json.loads((made[DENSE] / "config.json").read_text())["quantization_config"]
    )
    for places in ({"model": "cpu", "lm_head": "disk"}, {"model": "cpu", "lm_head": 0}):
        with pytest.raises(UsageError, match="offloaded"):
            quantizer.W4PackQuantizer(config).validate_environment(device_map=places)


def test_fp16_on_a_model_of_bf16_warns(made: dict[str, Path], tmp_path: Path) -> None:
    folder = configured(made[DENSE], tmp_path / "edited", lambda c: c.update(dtype="bfloat16"))
    with pytest.warns(UserWarning, match="65504"):
        assert w4pack.load(folder, dtype="float16").dtype == torch.float16
    assert w4pack.load(folder).dtype == torch.bfloat16


def test_a_model_of_fp32_runs_in_bf16_and_says_so(made: dict[str, Path], tmp_path: Path) -> None:
    folder = configured(made[DENSE], tmp_path / "edited", lambda c: c.update(dtype="float32"))
    for way in (w4pack.load, AutoModelForCausalLM.from_pretrained):
        with pytest.warns(UserWarning, match="16 bit"):
            assert way(folder).dtype == torch.bfloat16


@pytest.mark.pair
def test_a_packed_model_is_not_saved_from_memory(made: dict[str, Path], tmp_path: Path) -> None:
    for way in (w4pack.load, AutoModelForCausalLM.from_pretrained):
        model = way(made[EXPERTS])
        for part in (model, model.model, copy.deepcopy(model), copy.deepcopy(model.model)):
            with pytest.raises(UsageError, match="copy the artifact"):
                part.save_pretrained(tmp_path / "saved")
            with pytest.raises(UsageError, match="copy the artifact"):
                part.push_to_hub("someone/something")
        assert not (tmp_path / "saved").exists()


@pytest.mark.pair
def test_a_state_dictionary_is_the_file(made: dict[str, Path]) -> None:
    tensors = load_file(made[DENSE] / "model.safetensors")
    for way in (w4pack.load, AutoModelForCausalLM.from_pretrained):
        found = way(made[DENSE]).state_dict()
        assert set(found) == set(tensors)
        assert all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_no_parameter_wants_a_gradient_and_none_is_left_on_meta(made: dict[str, Path]) -> None:
    for folder in made.values():
        for way in (w4pack.load, AutoModelForCausalLM.from_pretrained):
            model = way(folder)
            held = [*model.named_parameters(), *model.named_buffers()]
            assert not [n for n, t in held if t.requires_grad or t.is_meta]
            assert not model.training


def test_registering_twice_is_once_and_a_taken_name_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    w4pack.register()
    w4pack.register()
    monkeypatch.setitem(quantizer.AUTO_QUANTIZER_MAPPING, "w4pack", object)
    with pytest.raises(UsageError, match="w4pack"):
        w4pack.register()


def test_a_state_dictionary_in_place_of_files_is_refused(made: dict[str, Path]) -> None:
    from transformers import AutoConfig, Qwen2ForCausalLM

    config, state = AutoConfig.from_pretrained(made[DENSE]), load_file(made[DENSE] / "model.safetensors")
    with pytest.raises(UsageError, match="from its folder"):
        Qwen2ForCausalLM.from_pretrained(None, config=config, state_dict=state)
