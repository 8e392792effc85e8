"""How the plugin is registered and what its config takes and refuses, on stand-ins of the engine."""

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from artifacts import quant_block, write_artifact  # noqa: E402
from plugin import standins  # noqa: E402

from w4pack.convert.engines.plugin import TESTED, releases  # noqa: E402
from w4pack.convert.errors import Refused, UsageError, W4PackError  # noqa: E402
from w4pack.kernels.spec import LinearSpec  # noqa: E402

pytestmark = pytest.mark.skipif(standins.is_installed(), reason="vLLM itself is installed: make test-vllm")

ATTENTION = "model.layers.0.self_attn"
SPECS = {
    f"{ATTENTION}.{leaf}": LinearSpec(128, 128, group_size=32) for leaf in ("q_proj", "k_proj", "v_proj")
}
ACT = {"kind": "act_quant", "site": "attn_in", "bits": 4, "clip": {"4": 0.9}, "symmetric": True}


@pytest.fixture
def _engine() -> Iterator[None]:
    with standins.engine():
        yield


def refusal(block: dict[str, Any]) -> W4PackError:
    """Return why the plugin does not take an artifact."""
    from w4pack.kernels.vllm.config import W4PackConfig

    with pytest.raises(Refused) as caught:
        W4PackConfig.from_config(block)
    return caught.value


@pytest.mark.usefixtures("_engine")
def test_records_of_what_runs_between_layers_are_refused_with_the_command_that_runs_them() -> None:
    err = refusal(quant_block(SPECS, online=[ACT]))
    assert (err.code, err.where) == ("artifact-online", "config.json: quantization_config.online.0")
    assert err.hint == "w4pack generate ARTIFACT runs it, in transformers"
    assert "act_quant" in str(err.found)


@pytest.mark.usefixtures("_engine")
@pytest.mark.parametrize(
    "change",
    [
        {"artifact_version": 2},
        {"layout": "marlin-8x8"},
        {"sparsity": True},
        {"online": [{"kind": "fourier"}]},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_this_version_does_not_know_is_refused_with_a_way_on(change: dict[str, Any]) -> None:
    err = refusal(quant_block(SPECS, **change))
    assert err.code == "artifact-unknown"
    assert f"quantization_config.{next(iter(change))}" in str(err.where)
    assert str(err.hint).startswith("install the w4pack that wrote it")


@pytest.mark.usefixtures("_engine")
def test_a_platform_without_kernels_is_refused_when_the_engine_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(standins.PLATFORM, "is_cpu", lambda: False)
    monkeypatch.setattr(standins.PLATFORM, "device_type", "xpu")
    err = refusal(quant_block(SPECS))
    assert (err.code, err.found) == ("platform", "xpu")
    assert "--to gptq" in str(err.hint)


@pytest.mark.usefixtures("_engine")
@pytest.mark.parametrize("there", ["cuda.core", "cuda", ""])
def test_a_gpu_without_cuda_core_is_refused_at_start(there: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from w4pack.convert import errors
    from w4pack.kernels.vllm.config import W4PackConfig

    def find_spec(name: str) -> object:
        if not there:
            raise ModuleNotFoundError("cuda")
        return object() if there == name else None

    monkeypatch.setattr(standins.PLATFORM, "is_cuda", lambda: True)
    monkeypatch.setattr(errors, "find_spec", find_spec)
    if there == "cuda.core":
        W4PackConfig.from_config(quant_block(SPECS))
    else:
        with pytest.raises(UsageError) as caught:
            W4PackConfig.from_config(quant_block(SPECS))
        assert (caught.value.code, caught.value.hint) == ("extra-missing", "pip install 'w4pack[gpu]'")


@pytest.fixture
def config(tmp_path: Path, _engine: None) -> Any:
    from w4pack.kernels.vllm.config import W4PackConfig

    write_artifact(tmp_path / "artifact", SPECS)
    config = W4PackConfig.from_config(quant_block(SPECS))
    config.maybe_update_config(str(tmp_path / "artifact"))
    return config


@pytest.mark.parametrize("draft", ["", "draft_model."])
def test_a_fused_layer_is_ours_also_in_a_model_that_drafts(config: Any, draft: str) -> None:
    layer = standins.Linear(f"{draft}{ATTENTION}.qkv_proj")
    method = config.get_quant_method(layer, layer.prefix)
    assert method.packed == tuple(SPECS)


def test_layers_that_are_not_packed_are_the_engines(config: Any) -> None:
    layer = standins.Linear("model.layers.0.mlp.router")
    assert isinstance(config.get_quant_method(layer, layer.prefix), standins.Unquantized)
    assert config.get_quant_method(standins.Head(), "lm_head") is None


def test_dummy_weights_need_no_file(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = standins.Linear(f"{ATTENTION}.qkv_proj")
    for how, is_read in (("auto", True), ("dummy", False)):
        monkeypatch.setattr(standins.SETTINGS.load_config, "load_format", how)
        method = config.get_quant_method(layer, layer.prefix)
        method.create_weights(layer, 128, [128, 128, 128], 128, 384, torch.float16)
        if is_read:
            with pytest.raises(W4PackError, match="did not come"):
                method.process_weights_after_loading(layer)
        else:
            method.process_weights_after_loading(layer)
        layer = standins.Linear(f"{ATTENTION}.qkv_proj")


@pytest.mark.parametrize("runner", ["generate", "pooling"])
def test_a_packed_head_is_not_waited_for_where_the_model_pools(
    runner: str, tmp_path: Path, _engine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from w4pack.kernels.vllm.config import W4PackConfig

    specs = {**SPECS, "lm_head": LinearSpec(128, 128, group_size=32)}
    quant = quant_block(specs, modules_to_not_convert=[])
    write_artifact(tmp_path / "artifact", specs, quant=quant)
    config = W4PackConfig.from_config(quant)
    config.maybe_update_config(str(tmp_path / "artifact"))
    monkeypatch.setattr(standins.SETTINGS.model_config, "runner_type", runner)
    head = standins.Head()
    head.prefix, head.tp_rank, head.tp_size = "lm_head", 0, 1  # type: ignore[assignment]
    method = config.get_quant_method(head, "lm_head")
    method.create_weights(head, 128, [128], 128, 128, torch.float16)
    if runner == "pooling":
        method.process_weights_after_loading(head)
    else:
        with pytest.raises(W4PackError, match="did not come"):
            method.process_weights_after_loading(head)


@pytest.mark.parametrize(("targets", "runs"), [(None, False), (["qkv_proj"], True)])
def test_adapters_on_packed_experts_are_refused(
    targets: list[str] | None, runs: bool, tmp_path: Path, _engine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from w4pack.kernels.vllm.config import W4PackConfig

    name = "model.layers.0.block_sparse_moe.experts"
    specs = {f"{name}.0.{leaf}": LinearSpec(64, 64, group_size=32) for leaf in ("w1", "w2", "w3")}
    write_artifact(tmp_path / "artifact", specs)
    config = W4PackConfig.from_config(quant_block(specs))
    config.maybe_update_config(str(tmp_path / "artifact"))
    monkeypatch.setattr(standins.SETTINGS, "lora_config", SimpleNamespace(target_modules=targets))
    layer = standins.Experts(name, 1)
    if runs:
        assert set(config.get_quant_method(layer, f"{name}.routed_experts").packed) == set(specs)
    else:
        with pytest.raises(Refused) as caught:
            config.get_quant_method(layer, f"{name}.routed_experts")
        assert (caught.value.code, caught.value.where) == ("lora-experts", name)
        assert "--lora-target-modules" in str(caught.value.hint)


# ---- ranks -------------------------------------------------------------------------------------------


def test_experts_that_ranks_hold_whole_are_not_cut(tmp_path: Path, _engine: None) -> None:
    from w4pack.kernels.vllm import source

    expert = "model.layers.0.block_sparse_moe.experts"
    specs = {
        f"{expert}.{number}.{leaf}": LinearSpec(64, 64, group_size=32, act_order=True)
        for number in range(2)
        for leaf in ("w1", "w2", "w3")
    }
    write_artifact(tmp_path / "artifact", specs)
    found = source.of_folder(tmp_path / "artifact")
    found.refuse(2, split_experts=False)
    with pytest.raises(Refused) as caught:
        found.refuse(2)
    rules = {problem.code for problem in caught.value.problems}
    assert rules == {"vllm.plugin-k-order", "vllm.plugin-k-tile", "vllm.plugin-n-tile"}
    assert all("--enable-expert-parallel" in str(problem.hint) for problem in caught.value.problems)


# ---- releases ----------------------------------------------------------------------------------------


def test_registering_twice_changes_nothing() -> None:
    with standins.engine():
        from w4pack.kernels.vllm.config import W4PackConfig
        from w4pack.kernels.vllm.plugin import register

        register()
        chosen = dict(standins.LOADERS)
        register()
        assert standins.METHODS == ["w4pack"]
        assert {"w4pack": W4PackConfig} == standins.REGISTERED
        assert chosen == standins.LOADERS
        assert issubclass(chosen["auto"], standins.Loader)


def test_a_release_that_lacks_what_the_plugin_needs_refuses_artifacts_and_nothing_else() -> None:
    with standins.engine(without="RoutedExperts", version="0.20.1"):
        from w4pack.kernels.vllm.plugin import register

        register()
        register()
        assert standins.METHODS == ["w4pack"]
        assert {"auto": standins.Loader} == standins.LOADERS
        with pytest.raises(Refused) as caught:
            standins.REGISTERED["w4pack"].from_config(quant_block(SPECS))
    err = caught.value
    assert (err.code, err.where, err.expected) == ("vllm-release", "vllm 0.20.1", f"vLLM {releases()}")
    assert "RoutedExperts" in str(err.found)
    assert err.hint == f"pip install vllm=={TESTED[-1]}"


@pytest.mark.parametrize("gone", ["_LOAD_FORMAT_TO_MODEL_LOADER", "register_model_loader", "auto"])
def test_a_release_without_a_place_for_loaders_refuses_artifacts_too(gone: str) -> None:
    with standins.engine(without=gone):
        from w4pack.kernels.vllm.plugin import register

        register()
        with pytest.raises(Refused) as caught:
            standins.REGISTERED["w4pack"].from_config(quant_block(SPECS))
    assert (caught.value.code, gone in str(caught.value.found)) == ("vllm-release", True)


@pytest.mark.parametrize("gone", ["register_quantization_config", "QuantizationConfig"])
def test_a_release_without_methods_of_plugins_runs_as_before(
    gone: str, caplog: pytest.LogCaptureFixture
) -> None:
    with standins.engine(without=gone), caplog.at_level(logging.WARNING):
        from w4pack.kernels.vllm.plugin import register

        register()
        assert not standins.METHODS
        assert {"auto": standins.Loader} == standins.LOADERS
    assert gone in caplog.text


@pytest.mark.parametrize(
    ("version", "told"), [("0.32.1", False), ("0.31.0", False), ("0.33.0", True), ("dev", True)]
)
def test_a_release_that_was_not_tested_is_said_once(
    version: str, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with standins.engine(version=version), caplog.at_level(logging.WARNING):
        from w4pack.kernels.vllm.config import W4PackConfig

        W4PackConfig.from_config(quant_block(SPECS))
        W4PackConfig.from_config(quant_block(SPECS))
    assert len(caplog.records) == told
    assert not told or version in caplog.text


@pytest.mark.parametrize("page", ["README.md", "docs/guides/vllm.md"])
def test_the_releases_are_stated_as_they_are_tested(page: str, repo: Path) -> None:
    assert f"vLLM {releases()}" in (repo / page).read_text(encoding="utf-8")
