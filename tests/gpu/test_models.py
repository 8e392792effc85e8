"""Whole models on a card: logits, memory while loading, graphs, compile, generation."""

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from click.testing import CliRunner  # noqa: E402

import builders  # noqa: E402
import w4pack  # noqa: E402
from gpu.graphs import captured  # noqa: E402
from runtime import models  # noqa: E402
from w4pack import cli  # noqa: E402
from w4pack.convert import convert  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

KINDS = (
    "autoawq-gemm-w4g32-mixtral",
    "autoawq-gemm-w4g64-skip-llama",
    "autoawq-gemm-w4g64-tied-qwen2",
    "autoround-native-mixed-llama",
    "gptqmodel-w4g32-asym-desc-qwen2",
    "gptqmodel-w4g32-dynamic-llama",
    "gptqmodel-w4g32-sym-desc-mixtral",
    "gptqmodel-w4g32-sym-qwen3moe",
    "gptqmodel-w4g64-lmhead-llama",
    "gptqmodel-w4gm1-asym-desc-llama",
    "gptqmodel-w4gm1-offtile-llama",
    "gptqmodel-w8g32-asym-desc-llama",
    "llmcompressor-w4g64-sym-qwen3",
    "llmcompressor-w8gm1-sym-qwen2",
)
SAME_EXPERTS = 0.7  # of the positions
GRAPHED = ("gptqmodel-w4g32-asym-desc-qwen2", "gptqmodel-w4g32-sym-desc-mixtral")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", KINDS)
def test_logits_equal_the_dequantized_model(name: str, dtype: str, tmp_path: Path) -> None:
    out = models.artifact(name, tmp_path)
    exact = models.logits(models.dense(tmp_path / "source", tmp_path))
    model = w4pack.load(out, "cuda", dtype=dtype)
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"cuda"}
    worst = (models.logits(model).float() - exact).abs().amax(dim=-1)  # of each position
    allowed = models.tolerance(exact, model.dtype)
    if dtype == "bfloat16" and getattr(model.config, "num_experts", 0):
        # Where two experts are all but equal, bfloat16 picks the other one at some positions.
        assert float((worst <= allowed).float().mean()) >= SAME_EXPERTS, worst
        allowed *= 4
    assert float(worst.max()) <= allowed


@pytest.mark.parametrize("name", GRAPHED)
def test_from_pretrained_moved_to_the_card_equals_load(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    out = models.artifact(name, tmp_path)
    w4pack.register()
    moved = AutoModelForCausalLM.from_pretrained(out).to("cuda")
    assert torch.equal(models.logits(moved), models.logits(w4pack.load(out, "cuda")))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
@pytest.mark.parametrize("name", GRAPHED)
def test_a_model_on_a_card_that_is_not_the_current_one(name: str, tmp_path: Path) -> None:
    out = models.artifact(name, tmp_path)
    first, second = (models.logits(w4pack.load(out, device)) for device in ("cuda:0", "cuda:1"))
    assert torch.cuda.current_device() == 0
    assert torch.equal(first.cpu(), second.cpu())


@pytest.mark.parametrize("name", GRAPHED)
def test_a_captured_step_replays_bit_for_bit(name: str, tmp_path: Path) -> None:
    model = w4pack.load(models.artifact(name, tmp_path), "cuda")
    tokens = torch.tensor([[65, 66, 67, 68]], device="cuda")

    def step() -> torch.Tensor:
        logits: torch.Tensor = model(tokens, use_cache=False).logits
        return logits

    with torch.no_grad():
        graph, found = captured(step)
        for seed in range(20):
            g = torch.Generator().manual_seed(seed)
            tokens.copy_(torch.randint(0, 256, (1, 4), generator=g))
            torch.empty(1 << 20, device="cuda").fill_(float("nan"))  # memory moves between replays
            graph.replay()
            replayed = found.clone()
            assert torch.equal(replayed, step()), seed


@pytest.mark.filterwarnings("ignore::UserWarning")  # what the compiler advises: TF32, online softmax
@pytest.mark.parametrize("name", GRAPHED)
def test_a_compiled_model_equals_eager(name: str, tmp_path: Path) -> None:
    out = models.artifact(name, tmp_path)
    exact = models.logits(models.dense(tmp_path / "source", tmp_path))
    model = w4pack.load(out, "cuda")
    for mode in ("default", "reduce-overhead"):
        compiled = torch.compile(model, fullgraph=True, mode=mode)
        with torch.no_grad():
            for _ in range(3):
                found = compiled(models.TOKENS.cuda(), use_cache=False).logits[0].float().cpu()
        assert float((found - exact).abs().max()) <= models.tolerance(exact, model.dtype), mode


def test_loading_needs_the_artifact_and_no_second_copy(tmp_path: Path) -> None:
    """Experts and fused layers are the case where others hold a layer twice (at most 64 MiB more)."""
    config = builders.qwen3_moe_config(
        hidden_size=1024, moe_intermediate_size=768, num_experts=64, num_hidden_layers=2, vocab_size=1024
    )
    made = builders.model(1, config, group=128)
    builders.write(tmp_path / "source", made, builders.gptq, builders.gptq_config())
    convert(tmp_path / "source", tmp_path / "out")
    size = sum(file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors"))
    torch.zeros(1, device="cuda")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = w4pack.load(tmp_path / "out", "cuda")
    assert torch.cuda.max_memory_allocated() - before <= size + (64 << 20)
    assert model.device.type == "cuda"


def test_generate_runs_on_the_card_by_default(tmp_path: Path) -> None:
    out = models.artifact("gptqmodel-w4g32-asym-desc-qwen2", tmp_path)
    given = ["generate", str(out), "She was a", "--max-new-tokens", "8", "--json"]
    done = CliRunner().invoke(cli.root, given)
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["device"].startswith("cuda") and found["new_tokens"] >= 1
    cpu = json.loads(CliRunner().invoke(cli.root, [*given, "--device", "cpu"]).stdout)
    assert found["prompt_tokens"] == cpu["prompt_tokens"]
