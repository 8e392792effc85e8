"""Every checkpoint, converted and loaded both ways, computes what its dequantized fp32 model computes."""

from pathlib import Path

import pytest

import checkpoints

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM  # noqa: E402

import w4pack  # noqa: E402
from runtime import models  # noqa: E402

# One of each family and kind of layer, for the lowest and the newest transformers: Mixtral's names change on
# load, Qwen2 has biases, Qwen3 norms of q and k; tied embeddings, a packed head, layers in 16 bit; act-order.
VARIED = (
    "autoawq-gemm-w4g32-mixtral",
    "autoawq-gemm-w4g64-skip-llama",
    "autoawq-gemm-w4g64-tied-qwen2",
    "gptqmodel-w4g32-asym-desc-qwen2",
    "gptqmodel-w4g32-sym-desc-mixtral",
    "gptqmodel-w4g32-sym-qwen3moe",
    "gptqmodel-w4g64-lmhead-llama",
    "gptqmodel-w4gm1-offtile-llama",
    "llmcompressor-w4g64-sym-qwen3",
)


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    w4pack.register()


@pytest.mark.parametrize("name", checkpoints.names())
def test_a_loaded_artifact_equals_the_dequantized_model(name: str, tmp_path: Path) -> None:
    out = models.artifact(name, tmp_path)
    exact = models.logits(models.dense(tmp_path / "source", tmp_path))
    model = w4pack.load(out)
    found = models.logits(model)
    assert found.dtype == model.dtype
    assert float((found.float() - exact).abs().max()) <= models.tolerance(exact, model.dtype)
    other = AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(models.logits(other), found)


@pytest.mark.pair
@pytest.mark.parametrize("name", VARIED)
def test_transformers_loads_each_kind(name: str, tmp_path: Path) -> None:
    out = models.artifact(name, tmp_path)
    exact = models.logits(models.dense(tmp_path / "source", tmp_path))
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not (info["missing_keys"] or info["unexpected_keys"] or info["mismatched_keys"])
    found = models.logits(model)
    assert float((found.float() - exact).abs().max()) <= models.tolerance(exact, model.dtype)
    assert torch.equal(models.logits(w4pack.load(out)), found)


@pytest.mark.pair
@pytest.mark.parametrize("name", ["gptqmodel-w4g32-asym-desc-qwen2", "gptqmodel-w4g32-sym-desc-mixtral"])
def test_another_dtype_leaves_the_scales_as_they_are(name: str, tmp_path: Path) -> None:
    out = models.artifact(name, tmp_path)
    exact = models.logits(models.dense(tmp_path / "source", tmp_path))
    loaded = w4pack.load(out, dtype="bfloat16")
    for model in (loaded, AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)):
        dtypes = {p.dtype for n, p in model.named_parameters() if n.endswith("weight_scale")}
        rest = {
            p.dtype for n, p in model.named_parameters() if "weight_scale" not in n and p.is_floating_point()
        }
        assert (dtypes, rest) == ({torch.float16}, {torch.bfloat16})
        found = models.logits(model).float()
        assert float((found - exact).abs().max()) <= models.tolerance(exact, torch.bfloat16)
        assert torch.equal(found, models.logits(loaded).float())


@pytest.mark.shared
@pytest.mark.parametrize("name", checkpoints.names())
def test_logits_are_those_that_were_recorded(name: str, shared: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    recorded = load_file(checkpoints.fixtures_root() / name / "expected.safetensors").get("logits_dense_fp32")
    if recorded is None:
        pytest.skip("cannot become an artifact: no logits were recorded")
    model = w4pack.load(models.artifact(name, tmp_path))
    tokens = torch.tensor([checkpoints.meta(name)["prompt_tokens"]])
    found = models.logits(model, tokens)[-len(recorded) :]
    assert float((found.float() - recorded).abs().max()) <= models.tolerance(recorded, model.dtype)
