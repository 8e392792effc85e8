"""Every architecture: the rotated model, in its stock class, computes what its source computes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rotate import tiny

from w4pack.convert.files.checkpoint import Checkpoint
from w4pack.convert.files.provider import CheckpointProvider
from w4pack.convert.rotate.architecture import known
from w4pack.convert.rotate.plan import RotationPlan
from w4pack.convert.rotate.rotated import Rotated
from w4pack.convert.rotate.rotation import Rotation, make_rotation
from w4pack.convert.rotate.transform import rotate

# float64 throughout gives 1e-15 to 2e-15; DeepSeek's class casts RoPE and router to float32 itself
EXACT = {"deepseek-v2": 1e-6, "deepseek-v2-lite": 1e-6, "deepseek-v3": 1e-6}
# The stock RMSNorm classes compute in float32 whatever they are given
STOCK = 2e-6


@pytest.fixture(scope="module", params=sorted(tiny.CONFIGS))
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    folder = tmp_path_factory.mktemp("models") / request.param
    with tiny.opened(tiny.save(request.param, folder)) as checkpoint:
        yield checkpoint


def name_of(source: Checkpoint) -> str:
    return Path(source.label).name


def by_kind(plan: RotationPlan) -> dict[str, list[Rotation]]:
    found: dict[str, list[Rotation]] = {}
    for rotation in plan.rotations:
        found.setdefault(rotation.kind, []).append(rotation)
    return found


def test_logits_are_those_of_the_source(source: Checkpoint, tmp_path: Path) -> None:
    plan = tiny.planned(source, seed=5)
    folder = tiny.write_rotated(source, CheckpointProvider(source), plan, tmp_path / "out")
    ours, theirs = tiny.load(folder), tiny.load(Path(source.label))
    assert tiny.relative(tiny.logits(ours), tiny.logits(theirs)) < STOCK
    tiny.exact_norms(ours)
    tiny.exact_norms(theirs)
    error = tiny.relative(tiny.logits(ours), tiny.logits(theirs))
    assert error < EXACT.get(name_of(source), 1e-10)


def test_what_is_rotated_and_what_is_not(source: Checkpoint) -> None:
    plan, name = tiny.planned(source), name_of(source)
    kinds = by_kind(plan)
    assert [r.layer for r in kinds["r2"]] == [0, 1]
    assert len({r.digest for r in kinds["r2"]}) == 2  # signs of their own
    if name in tiny.POST_NORM:
        assert "r1" not in kinds
        ((site, reason),) = plan.left_out
        assert site == "r1"
        assert "`model.layers.0.post_attention_layernorm.weight`" in reason
        assert [w.code for w in plan.warnings] == ["rotation-left-out"]
    else:
        (r1,) = kinds["r1"]
        assert (r1.layer, r1.block, r1.ones) == (-1, r1.n, name == "opt")
        assert plan.left_out == ()
    latents = {"q_latent", "kv_latent", "nope"} if name.startswith("deepseek") else set()
    latents -= {"q_latent"} if name.endswith("lite") else set()
    assert set(kinds) - {"r1", "r2"} == latents
    assert plan.online == ()


def test_every_weight_is_touched_or_known_to_stay(source: Checkpoint) -> None:
    """Only norms of heads, selection biases, and biases of q, k, gate and up do not move."""
    plan, name = tiny.planned(source), name_of(source)
    left = {n for n in source.tensors if n not in plan.steps}
    if name in tiny.POST_NORM:
        moved = {n.split(".", 3)[-1] for n in plan.steps}
        assert moved == {"self_attn.v_proj.weight", "self_attn.o_proj.weight"}
        return
    stays = ("q_norm.weight", "k_norm.weight", "e_score_correction_bias")
    biases = ("q_proj.bias", "k_proj.bias", "gate_proj.bias", "up_proj.bias")
    assert {n for n in left if not n.endswith((*stays, *biases))} == set()


def test_norms_have_no_gain_left(source: Checkpoint) -> None:
    plan, name = tiny.planned(source), name_of(source)
    provider = Rotated(CheckpointProvider(source), plan)
    norms = [n for n in plan.steps if n.endswith("norm.weight")]
    assert bool(norms) is (name not in tiny.POST_NORM)
    for norm in norms:
        values = provider.get(norm)
        assert torch.equal(values, torch.full_like(values, 0.0 if name == "gemma" else 1.0))


def test_a_tied_head_is_untied(source: Checkpoint) -> None:
    plan, name = tiny.planned(source), name_of(source)
    tied = name in ("llama-tied", "gemma", "opt")
    assert ("lm_head.weight" in plan.added) is tied
    assert dict(plan.config_changes) == ({"tie_word_embeddings": False} if tied else {})
    assert ("lm_head.weight" in set(Rotated(CheckpointProvider(source), plan).names())) is (
        tied or "lm_head.weight" in source.tensors
    )


def test_another_seed_is_another_model_and_one_seed_is_one(source: Checkpoint) -> None:
    first, again, other = (tiny.planned(source, seed=s) for s in (1, 1, 2))
    assert first.to_json() == again.to_json()
    assert first.to_json()["steps"] != other.to_json()["steps"]
    assert not {r.digest for r in first.rotations} & {r.digest for r in other.rotations}


# ---- all descriptions are used ----


def test_every_description_has_a_model_here() -> None:
    import transformers

    tested = {
        transformers.AutoModelForCausalLM._model_mapping[type(c())].__name__ for c in tiny.CONFIGS.values()
    }
    untested = {a.classes for a in known().values() if not set(a.classes) & tested}
    assert untested == set()
    assert {name for name in known() if name not in tested} <= set()


# ---- single rules, by hand ----


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    with tiny.opened(tiny.save("qwen2", tmp_path_factory.mktemp("rules") / "qwen2")) as checkpoint:
        yield checkpoint


def test_reader_writer_bias_and_embedding_by_their_formulas(qwen: Checkpoint) -> None:
    """W' = W diag(g) Q and W' = Qᵀ W with a dense Q; q and k biases stay, the v bias turns head by head."""
    plan, plain = tiny.planned(qwen, seed=3), CheckpointProvider(qwen)
    made = Rotated(plain, plan)
    r1 = make_rotation("r1", 48, seed=3)
    r2 = make_rotation("r2", 16, 1, seed=3)
    assert r1 is not None and r2 is not None
    q = rotate(torch.eye(48, dtype=torch.float64), r1)
    h = rotate(torch.eye(16, dtype=torch.float64), r2)
    layer = "model.layers.1."
    gain = plain.get(layer + "input_layernorm.weight")
    query = plain.get(layer + "self_attn.q_proj.weight")
    assert torch.allclose(made.get(layer + "self_attn.q_proj.weight"), query @ gain.diag() @ q, atol=1e-12)
    down = plain.get(layer + "mlp.down_proj.weight")
    assert torch.allclose(made.get(layer + "mlp.down_proj.weight"), q.T @ down, atol=1e-12)
    table = plain.get("model.embed_tokens.weight")
    assert torch.allclose(made.get("model.embed_tokens.weight"), table @ q, atol=1e-12)
    for leaf in ("q_proj.bias", "k_proj.bias"):
        name = f"{layer}self_attn.{leaf}"
        assert torch.equal(made.get(name), plain.get(name))
    bias = plain.get(layer + "self_attn.v_proj.bias").reshape(2, 16)
    assert torch.allclose(made.get(layer + "self_attn.v_proj.bias").reshape(2, 16), bias @ h, atol=1e-12)
    value = plain.get(layer + "self_attn.v_proj.weight").reshape(2, 16, 48)
    assert torch.allclose(
        made.get(layer + "self_attn.v_proj.weight").reshape(2, 16, 48),
        h.T @ value @ gain.diag() @ q,
        atol=1e-12,
    )
    out = plain.get(layer + "self_attn.o_proj.weight").reshape(48, 4, 16)
    assert torch.allclose(
        made.get(layer + "self_attn.o_proj.weight").reshape(48, 4, 16),
        torch.einsum("oi,ohd,de->ihe", q, out, h),
        atol=1e-12,
    )


def test_bands_do_not_change_values(qwen: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    import w4pack.convert.rotate.rotated as module

    made = Rotated(CheckpointProvider(qwen), tiny.planned(qwen))
    names = ("model.embed_tokens.weight", "model.layers.0.mlp.down_proj.weight")
    whole = [made.get(name) for name in names]
    monkeypatch.setattr(module, "BAND", 48 * 5)
    for name, wanted in zip(names, whole, strict=True):
        assert torch.allclose(made.get(name), wanted, atol=1e-13)


def test_16_bits_are_the_exact_product_rounded_once(tmp_path: Path) -> None:
    """One embedding column of 1e3 and gains from 1e-2 to 1e2: folding step by step in bfloat16 collapses."""
    made = tiny.model("llama")
    made.model.embed_tokens.weight.data[:, 5] = 1e3
    for norm in (layer.input_layernorm for layer in made.model.layers):
        norm.weight.data = torch.logspace(-2, 2, 48, dtype=torch.float64)
    made.to(torch.bfloat16).save_pretrained(tmp_path / "src")
    with tiny.opened(tmp_path / "src") as checkpoint:
        provider = Rotated(CheckpointProvider(checkpoint), tiny.planned(checkpoint))
        for name in provider.names():
            exact = provider.get(name, torch.float64)
            stored = provider.get(name)
            assert stored.dtype == torch.bfloat16
            lower, upper = _neighbours(exact)
            nearest = torch.where((exact - lower).abs() <= (upper - exact).abs(), lower, upper)
            tie = (exact - lower).abs() == (upper - exact).abs()
            assert torch.equal(stored.double()[~tie], nearest[~tie])


def _neighbours(exact: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bfloat16 values around each number, in float64: 8 bits of mantissa, by arithmetic alone."""
    mantissa, exponent = torch.frexp(exact)
    scaled = mantissa * 2.0**8
    step = torch.ldexp(torch.ones_like(exact), exponent - 8)
    return torch.floor(scaled) * step, torch.ceil(scaled) * step
