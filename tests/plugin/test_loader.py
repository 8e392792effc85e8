"""The model loader over stand-ins of the engine's: which folder it reads, what it says when models stop."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from artifacts import write_artifact  # noqa: E402
from plugin import standins  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from w4pack.convert.errors import SourceError, W4PackError  # noqa: E402
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


@pytest.mark.parametrize("check_hashes", [False, True])
def test_settings_come_to_where_the_weights_of_a_repository_are(repository: Path, check_hashes: bool) -> None:
    from w4pack.kernels.vllm import source

    folder = loader(repository.parent, check_hashes=check_hashes)._folder("ORG/NAME", None)
    assert source.of_folder(folder).specs.keys() == SPECS.keys()
    wanted = ["config.json", *(["w4pack.json"] if check_hashes else [])]
    assert [("ORG/NAME", repository.parent, name) for name in wanted] == standins.ASKED


def test_settings_that_are_there_are_not_asked_for(repository: Path) -> None:
    (repository / "config.json").write_bytes(standins.FILES["config.json"])
    loader()._folder("ORG/NAME", None)
    loader(check_hashes=True)._folder(str(repository), None)  # a folder is as it is
    assert standins.ASKED == []


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
    assert str(err.found) == f"F32 [2, 2]; {type(error).__name__}: {error}"
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
    from w4pack.kernels.vllm import loader as ours

    plain.quantization = "w4pack"
    monkeypatch.setattr(ours, "_check_built", lambda *_, **__: None)
    monkeypatch.setattr(ours.W4PackModelLoader, "_check_files", lambda *_: None)
    plain.hf_text_config = SimpleNamespace()
    with pytest.raises(SourceError) as caught:
        loader().load_weights(Model("c", AssertionError()), plain)
    assert caught.value.hint == f"w4pack verify {plain.model}"
