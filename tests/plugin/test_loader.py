"""The model loader over stand-ins of the engine's: which folder it reads, what it says when models stop."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from artifacts import relabel, write_artifact  # noqa: E402
from plugin import standins  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from w4pack.convert.errors import SourceError, VerifyError, W4PackError  # noqa: E402
from w4pack.kernels.spec import LinearSpec  # noqa: E402

pytestmark = pytest.mark.skipif(standins.is_installed(), reason="vLLM itself is installed: make test-vllm")

SPECS = {"model.layers.0.mlp.down_proj": LinearSpec(128, 64, group_size=32)}


@pytest.fixture(autouse=True)
def _engine() -> Iterator[None]:
    with standins.engine():
        yield


def loader(download_dir: Path | None = None, **options: Any) -> Any:
    """Return our loader."""
    from w4pack.kernels.vllm.loader import W4PackModelLoader

    how = {"load_format": "w4pack", "model_loader_extra_config": options, "download_dir": download_dir}
    return W4PackModelLoader(SimpleNamespace(**how))


# ---- folders -----------------------------------------------------------------------------------------


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """An artifact of the Hub, of which the engine has the weights alone, in a folder of their own."""
    write_artifact(tmp_path / "artifact", SPECS)
    for name in ("config.json", "w4pack.json"):
        path = tmp_path / "artifact" / name
        standins.FILES[name] = path.read_bytes() if path.exists() else b"{}"
        path.unlink(missing_ok=True)
    standins.CACHED["ORG/NAME"] = tmp_path / "artifact"
    return tmp_path / "artifact"


def test_settings_come_to_where_the_weights_of_a_repository_are(repository: Path) -> None:
    from w4pack.kernels.vllm import source

    folder = loader(repository.parent)._folder("ORG/NAME", None)
    assert source.of_folder(folder).specs.keys() == SPECS.keys()
    wanted = ["config.json", "w4pack.json"]
    assert [("ORG/NAME", repository.parent, name) for name in wanted] == standins.ASKED


def test_settings_that_are_there_are_not_asked_for(repository: Path) -> None:
    for name in ("config.json", "w4pack.json"):
        (repository / name).write_bytes(standins.FILES[name])
    loader()._folder("ORG/NAME", None)
    (repository / "w4pack.json").unlink()
    loader()._folder(str(repository), None)  # a folder is as it is
    assert standins.ASKED == []


def test_tensors_that_were_relabelled_are_refused_from_their_headers(tmp_path: Path) -> None:
    from w4pack.kernels.vllm import source

    write_artifact(tmp_path, SPECS)
    relabel(tmp_path, {"model.norm.weight": {"dtype": "BF16"}})
    for look in (source.of_folder, loader()._check_files):
        with pytest.raises(VerifyError) as caught:
            look(str(tmp_path))
        assert caught.value.code == "tensor-relabelled"


@pytest.mark.parametrize("how", [{}, {"check_hashes": True}], ids=["samples", "hashes"])
def test_tensors_that_were_exchanged_are_refused_before_they_are_loaded(
    tmp_path: Path, how: dict[str, bool]
) -> None:
    names = ("model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj")
    write_artifact(tmp_path, dict.fromkeys(names, SPECS[names[0]]))
    loader(**how)._check_files(str(tmp_path))
    tensors = load_file(tmp_path / "model.safetensors")
    one, other = (f"{name}.weight" for name in names)
    save_file(tensors | {one: tensors[other], other: tensors[one]}, tmp_path / "model.safetensors")
    with pytest.raises(VerifyError) as caught:
        loader(**how)._check_files(str(tmp_path))
    code = "tensor-hash" if how else "tensor-exchanged"
    assert [p.code for p in caught.value.problems] == [code, code]
    assert {p.where for p in caught.value.problems} == {f"model.safetensors, {n}" for n in (one, other)}


def test_pickles_are_the_engines_own_loaders(tmp_path: Path) -> None:
    with pytest.raises(SourceError) as caught:
        loader()._folder(str(tmp_path), None)
    err = caught.value
    assert (err.code, err.where, err.expected) == ("not-safetensors", str(tmp_path), "*.safetensors")
    assert err.hint == f"vllm serve {tmp_path} --load-format auto"


# ---- models that stop --------------------------------------------------------------------------------


class Model:
    """Takes one tensor after another, and stops at one."""

    def __init__(self, stop: str | None, error: Exception, *, at_once: bool = False) -> None:
        self.stop, self.error, self.at_once = stop, error, at_once
        self.names: list[str] = []

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Take tensors."""
        for name, _ in list(weights) if self.at_once else weights:
            self.names.append(name)
            if name == self.stop:
                raise self.error
        if self.stop is None:
            raise self.error


@pytest.fixture
def plain(tmp_path: Path) -> SimpleNamespace:
    """A checkpoint that is no artifact."""
    tensors = {name: torch.zeros(size, 2) for size, name in enumerate(("a", "b", "c"), 1)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    return SimpleNamespace(model=str(tmp_path), quantization=None)


@pytest.mark.parametrize("error", [AssertionError(), ValueError("no such module"), KeyError("x")], ids=repr)
def test_a_tensor_at_which_the_model_stops_is_named(plain: SimpleNamespace, error: Exception) -> None:
    with pytest.raises(SourceError) as caught:
        loader().load_weights(Model("b", error), plain)
    err = caught.value
    assert (err.code, err.where, err.hint) == ("tensor-mismatch", "model.safetensors, b", None)
    assert str(err.found) == f"F32 [2, 2]; {type(error).__name__} {error}".rstrip()
    assert err.__cause__ is error


def test_nothing_watches_when_a_model_has_stopped(plain: SimpleNamespace) -> None:
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    for error in (AssertionError(), ValueError("held by who caught it")):
        ours, model = loader(), Model("b", error)
        with pytest.raises(SourceError) as caught:
            ours.load_weights(model, plain)
        assert _get_current_dispatch_mode() is None
        assert caught.value.__traceback__ is not None  # and with it the model's frames
    again = Model("c", ValueError("behind"))
    with pytest.raises(SourceError):
        ours.load_weights(again, plain)  # the loader can be used once more
    assert again.names == ["a", "b", "c"]


def test_other_errors_of_a_model_stay_as_they_are(plain: SimpleNamespace) -> None:
    for model in (
        Model(None, ValueError("behind the last tensor")),
        Model("b", ValueError("all tensors were taken before"), at_once=True),
        Model("b", torch.OutOfMemoryError("no memory")),
        Model("b", W4PackError("ours")),
        Model("b", KeyboardInterrupt()),  # type: ignore[arg-type]
    ):
        with pytest.raises(type(model.error)) as caught:
            loader().load_weights(model, plain)
        assert caught.value is model.error


def test_what_to_do_about_an_artifact_is_said(
    plain: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    from w4pack.kernels.vllm import completeness
    from w4pack.kernels.vllm import loader as ours

    plain.quantization = "w4pack"
    monkeypatch.setattr(completeness, "check_built", lambda *_, **__: None)
    monkeypatch.setattr(ours.W4PackModelLoader, "_check_files", lambda *_: None)
    plain.hf_text_config = SimpleNamespace()
    with pytest.raises(SourceError) as caught:
        loader().load_weights(Model("c", AssertionError()), plain)
    assert caught.value.hint == f"w4pack verify {plain.model}"


# ---- what is missing, and what is left ---------------------------------------------------------------


class Layers(torch.nn.Module):
    """A model of two layers and a head; ``take`` says how it copies a tensor of the file."""

    def __init__(self, take: Callable[[torch.Tensor, torch.Tensor], object], *, head: bool = True) -> None:
        super().__init__()
        self.take = take
        for name in ("a", "b", *(["head"] if head else [])):
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(2, 2), requires_grad=False))

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Take what there is a place for."""
        own = dict(self.named_parameters())
        for name, tensor in weights:
            if name.removesuffix(".weight") in own:
                self.take(own[name.removesuffix(".weight")].data, tensor)


def artifact(folder: Path, *names: str, **config: Any) -> SimpleNamespace:
    """Write tensors under names; returns what the engine knows of the model."""
    save_file({name: torch.rand(2, 2) + 1 for name in names}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}", encoding="utf-8")
    known = {"model": str(folder), "quantization": "w4pack", "runner_type": config.pop("runner", "generate")}
    return SimpleNamespace(**known, hf_text_config=SimpleNamespace(num_hidden_layers=2, **config))


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    from w4pack.kernels.vllm import completeness
    from w4pack.kernels.vllm import loader as ours

    monkeypatch.setattr(completeness, "check_built", lambda *_, **__: None)
    monkeypatch.setattr(ours.W4PackModelLoader, "_check_files", lambda *_: None)

    def run(model: torch.nn.Module, *names: str, **config: Any) -> None:
        loader().load_weights(model, artifact(tmp_path, *names, **config))
        held = load_file(tmp_path / "model.safetensors")
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.data, held[f"{name}.weight"])

    return run


WAYS: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "copied": lambda own, tensor: own.copy_(tensor),
    "read, then copied": lambda own, tensor: own.copy_(tensor.clone()),
    "changed, then copied": lambda own, tensor: own.copy_((tensor.float() * 2 / 2).to(own.dtype)),
    "in pieces": lambda own, tensor: [own[:1].copy_(tensor[:1]), own[1:].copy_(tensor[1:].clone())],
}


@pytest.mark.parametrize("way", WAYS)
def test_a_parameter_is_filled_however_the_model_copies(way: str, load: Callable[..., None]) -> None:
    load(Layers(WAYS[way]), "a.weight", "b.weight", "head.weight")


@pytest.mark.parametrize("way", WAYS)
def test_a_parameter_that_nothing_is_copied_to_is_missing(way: str, load: Callable[..., None]) -> None:
    with pytest.raises(SourceError) as caught:
        load(Layers(WAYS[way]), "a.weight", "head.weight")
    assert (caught.value.code, caught.value.where) == ("missing-tensor", "b")


def test_a_model_that_does_not_ask_for_all_tensors_has_those_it_took(load: Callable[..., None]) -> None:
    class Hasty(Layers):
        def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
            super().load_weights(next(weights) for _ in range(3))

    load(Hasty(WAYS["copied"]), "a.weight", "b.weight", "head.weight")


# name of a tensor without a place, settings of the model under which it is left aside on purpose
ASIDE: tuple[tuple[str, dict[str, Any]], ...] = (
    ("lm_head.weight", {"tie_word_embeddings": True}),
    ("lm_head.weight_scale", {"runner": "pooling"}),
    ("model.layers.2.mlp.weight", {"num_nextn_predict_layers": 1}),
    ("mtp.fc.weight", {}),
    ("model.mtp_layers.0.mlp.weight", {}),
    ("model.layers.0.self_attn.rotary_emb.inv_freq", {}),
    ("model.layers.0.mlp.weight", {"model_type": "qwen3_next_mtp"}),
)


@pytest.mark.parametrize(("name", "config"), ASIDE, ids=lambda value: value if isinstance(value, str) else "")
def test_what_the_engine_leaves_aside_on_purpose_is_no_error(
    name: str, config: dict[str, Any], load: Callable[..., None]
) -> None:
    load(Layers(WAYS["copied"], head=False), "a.weight", "b.weight", name, **config)


@pytest.mark.parametrize(
    "name",
    ["lm_head.weight", "model.layers.2.mlp.weight", "model.layers.0.mtpx.weight", "model.layers.0.mlp.bias"],
)
def test_any_other_tensor_without_a_place_is_an_error(name: str, load: Callable[..., None]) -> None:
    with pytest.raises(SourceError) as caught:
        load(Layers(WAYS["copied"], head=False), "a.weight", "b.weight", name)
    assert (caught.value.code, caught.value.where) == ("extra-tensor", name)


# ---- once more ---------------------------------------------------------------------------------------


OTHERS: dict[str, tuple[dict[str, LinearSpec], dict[str, Any], str, str]] = {
    "missing": ({}, {"x.bias": ("F16", (64,))}, "missing-tensor", "model.norm.weight"),
    "extra": ({}, {"model.norm.weight": ("F16", (64,)), "x.bias": ("F16", (64,))}, "extra-tensor", "x.bias"),
    "shape": ({}, {"model.norm.weight": ("F16", (32,))}, "tensor-mismatch", "model.norm.weight"),
    "another scheme": (
        {name: replace(spec, bits=8) for name, spec in SPECS.items()},
        {"model.norm.weight": ("F16", (64,))},
        "tensor-mismatch",
        "model.layers.0.mlp.down_proj.weight",
    ),
}
DENSE = {"model.norm.weight": ("F16", (64,))}


def running(folder: Path) -> torch.nn.Module:
    """Return a model that was started with an artifact."""
    from w4pack.kernels.vllm import source
    from w4pack.kernels.vllm.linear import W4PackLinearMethod

    model = torch.nn.Sequential(torch.nn.Identity())
    model[0].quant_method = W4PackLinearMethod(source.of_folder(folder), tuple(SPECS))  # type: ignore[assignment]
    return model


def auto_loader() -> Any:
    """Return what the engine takes where no loader is named."""
    from w4pack.kernels.vllm.loader import auto

    return auto(standins.Loader)(loader().load_config)


def test_a_running_model_takes_the_same_tensors_once_more(tmp_path: Path) -> None:
    for seed, name in enumerate(("first", "second")):
        write_artifact(tmp_path / name, SPECS, dense=DENSE, seed=seed)
    settings = SimpleNamespace(model=str(tmp_path / "second"), quantization="w4pack")
    given = dict(auto_loader().get_all_weights(settings, running(tmp_path / "first")))
    held = load_file(next((tmp_path / "second").glob("*.safetensors")))
    assert given.keys() == held.keys()
    assert all(torch.equal(given[name].view(torch.uint8), held[name].view(torch.uint8)) for name in held)


@pytest.mark.parametrize("other", OTHERS)
def test_a_running_model_does_not_take_other_tensors(other: str, tmp_path: Path) -> None:
    specs, dense, code, where = OTHERS[other]
    write_artifact(tmp_path / "first", SPECS, dense=DENSE)
    write_artifact(tmp_path / "second", specs or SPECS, dense=dense)
    settings = SimpleNamespace(model=str(tmp_path / "second"), quantization="w4pack")
    with pytest.raises(SourceError) as caught:
        next(auto_loader().get_all_weights(settings, running(tmp_path / "first")))
    assert (caught.value.code, caught.value.where) == (code, where)
