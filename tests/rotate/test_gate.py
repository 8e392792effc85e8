"""The gate: every architecture passes it, in both modes; what changes the model does not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rotate import tiny

from w4pack.convert.errors import W4PackError
from w4pack.convert.files.checkpoint import Checkpoint
from w4pack.convert.files.provider import CheckpointProvider
from w4pack.convert.modeljobs import gate
from w4pack.convert.modeljobs.gate import GateReport, run_gate
from w4pack.convert.rotate.architecture import known
from w4pack.convert.rotate.architectures import gemma2
from w4pack.convert.rotate.plan import RotationPlan, plan_rotation
from w4pack.convert.rotate.rotated import Rotated
from w4pack.convert.rotate.steps import Center, Gain, Shift, Step, Turn


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {"root": tmp_path_factory.mktemp("gate")}


def folder_of(folders: dict[str, Path], name: str) -> Path:
    """Save a model once, in bfloat16: the gate works on what is not rounded."""
    if name not in folders:
        folders[name] = tiny.save(name, folders["root"] / name, torch.bfloat16)
    return folders[name]


def passed(checkpoint: Checkpoint, plan: RotationPlan) -> GateReport:
    provider = CheckpointProvider(checkpoint)
    return run_gate(checkpoint.config, provider, Rotated(provider, plan), plan)


def failed(checkpoint: Checkpoint, plan: RotationPlan) -> W4PackError:
    with pytest.raises(W4PackError) as caught:
        passed(checkpoint, plan)
    assert (caught.value.code, caught.value.exit_code) == ("rotation-differs", 1)
    return caught.value


def error_of(failure: W4PackError) -> float:
    """Return the difference that a failure names."""
    assert failure.found is not None
    return float(failure.found.split()[0])


@pytest.mark.parametrize("mode", ["offline", "full"])
@pytest.mark.parametrize("name", sorted(tiny.CONFIGS))
def test_every_architecture_passes(folders: dict[str, Path], name: str, mode: str) -> None:
    with tiny.opened(folder_of(folders, name)) as checkpoint:
        plan = tiny.planned(checkpoint, mode)
        report = passed(checkpoint, plan)
    assert report.layers == 2
    assert report.tokens == 128
    assert report.worst < 5e-6  # float32: 1e-6 and below was measured
    assert report.logits < 5e-6
    sites = {record["site"] for record in plan.online}
    online = {"qk", "attn_out", "mlp_mid"} | ({"residual_read"} if name in tiny.POST_NORM else set())
    assert sites == (online if mode == "full" else set())


# ---- negative controls ----


@pytest.fixture(scope="module")
def llama(folders: dict[str, Path]) -> Iterator[Checkpoint]:
    with tiny.opened(folder_of(folders, "llama")) as checkpoint:
        yield checkpoint


def changed(plan: RotationPlan, name: str, *steps: Step) -> RotationPlan:
    return replace(plan, steps={**plan.steps, name: steps})


def without(plan: RotationPlan, name: str, kind: type[Step]) -> RotationPlan:
    kept = tuple(step for step in plan.steps[name] if not isinstance(step, kind))
    assert len(kept) < len(plan.steps[name])
    return changed(plan, name, *kept)


def test_centred_embeddings_of_an_rms_model_fail(llama: Checkpoint) -> None:
    """RMSNorm does not remove a mean: other tools centre, and change the model."""
    plan = tiny.planned(llama)
    name = "model.embed_tokens.weight"
    failure = failed(llama, changed(plan, name, Center(1), *plan.steps[name]))
    assert failure.where == "the embeddings"


def test_a_forced_stream_rotation_of_gemma2_fails(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = gemma2.ARCHITECTURE
    blocks = [replace(block, post_norm=None) for block in (*plain.attention, *plain.mlp)]
    posts = tuple(block.post_norm or "" for block in (*plain.attention, *plain.mlp))
    forced = replace(plain, attention=(blocks[0],), mlp=(blocks[1],), inner=(*plain.inner, *posts))
    monkeypatch.setattr("w4pack.convert.rotate.plan.find", lambda config: forced)
    with tiny.opened(folder_of(folders, "gemma2")) as checkpoint:
        plan = tiny.planned(checkpoint)
        assert plan.stream is not None
        failure = failed(checkpoint, plan)
    assert failure.where == "model.layers.0"
    assert error_of(failure) > 0.1


def test_a_plain_rotation_in_opts_own_class_fails(folders: dict[str, Path]) -> None:
    """LayerNorm subtracts the mean of the rotated stream, which is not the mean of the stream."""
    with tiny.opened(folder_of(folders, "opt")) as checkpoint:
        plan = tiny.planned(checkpoint)
        plain = {
            name: tuple(
                replace(step, rotation=replace(step.rotation, ones=False)) if isinstance(step, Turn) else step
                for step in steps
            )
            for name, steps in plan.steps.items()
        }
        rotations = tuple(replace(r, ones=False) for r in plan.rotations)
        failure = failed(checkpoint, replace(plan, steps=plain, rotations=rotations))
    assert failure.where is not None and failure.where.startswith(
        ("the embeddings", "model.decoder.layers.0")
    )


@pytest.mark.parametrize(
    ("tensor", "kind"),
    [
        ("model.layers.1.self_attn.q_proj.weight", Gain),
        ("model.layers.1.mlp.up_proj.weight", Turn),
        ("model.layers.1.self_attn.v_proj.bias", Turn),
        ("model.layers.1.mlp.down_proj.bias", Turn),
        ("model.layers.1.self_attn.o_proj.weight", Turn),
    ],
)
def test_a_skipped_step_fails_and_names_its_layer(llama: Checkpoint, tensor: str, kind: type[Step]) -> None:
    assert failed(llama, without(tiny.planned(llama), tensor, kind)).where == "model.layers.1"


@pytest.mark.parametrize("kind", [Gain, Turn])
def test_a_skipped_step_of_the_head_fails(llama: Checkpoint, kind: type[Step]) -> None:
    failure = failed(llama, without(tiny.planned(llama), "lm_head.weight", kind))
    assert failure.where == "the final norm and the head"


@pytest.mark.parametrize(
    ("tensor", "kind"),
    [
        ("model.decoder.layers.0.fc1.bias", Shift),
        ("model.decoder.layers.0.fc2.weight", Center),
        ("model.decoder.layers.0.self_attn.out_proj.bias", Center),
        ("model.decoder.embed_positions.weight", Center),
    ],
)
def test_rules_of_layer_norm_are_needed_each(folders: dict[str, Path], tensor: str, kind: type[Step]) -> None:
    with tiny.opened(folder_of(folders, "opt")) as checkpoint:
        failure = failed(checkpoint, without(tiny.planned(checkpoint), tensor, kind))
    assert failure.where in ("the embeddings", "model.decoder.layers.0")


def test_a_small_block_beside_a_large_stream_is_still_seen(tmp_path: Path) -> None:
    """A layer adds 1e-4 of the stream: its whole error would drown if it was measured against the stream."""
    model = tiny.model("llama")
    model.model.embed_tokens.weight.data *= 1e3
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data *= 1e-2
        layer.self_attn.o_proj.bias.data *= 1e-2
        layer.mlp.down_proj.weight.data *= 1e-2
        layer.mlp.down_proj.bias.data *= 1e-2
    model.float().save_pretrained(tmp_path / "src")
    with tiny.opened(tmp_path / "src") as checkpoint:
        plan = tiny.planned(checkpoint)
        passed(checkpoint, plan)
        broken = without(plan, "model.layers.1.mlp.gate_proj.weight", Gain)
        assert failed(checkpoint, broken).where == "model.layers.1"


@pytest.mark.parametrize("online", ["mlp.down_proj", "self_attn.o_proj"])
def test_the_other_half_of_an_online_transform_is_needed(llama: Checkpoint, online: str) -> None:
    plan = tiny.planned(llama, "full")
    name = f"model.layers.0.{online}.weight"
    steps = [replace(s, online=False) if isinstance(s, Turn) and s.online else s for s in plan.steps[name]]
    assert failed(llama, changed(plan, name, *steps)).where == "model.layers.0"


def test_expert_choices_by_a_hair_are_counted_not_believed() -> None:
    scores = torch.tensor([[3.0, 1.0, 2.0], [1.0, 1.0 + 1e-7, 5.0], [0.0, -4.0, 4.0]])
    marks = gate._near_ties([scores])
    assert marks is not None
    assert marks.tolist() == [False, True, False]
    pair = gate._Pair(None, {}, None, None, torch.device("cpu"))  # type: ignore[arg-type]
    wanted = torch.ones(1, 3, 4)
    found = wanted.clone()
    found[0, 1] += 1
    gate._compare(pair, "layer", wanted, found, torch.zeros(1, 3, 4), marks)
    assert pair.report.near_ties == 1
    found[0, 0] += 1
    with pytest.raises(W4PackError, match="does not compute"):
        gate._compare(pair, "layer", wanted, found, torch.zeros(1, 3, 4), marks)


def test_a_nan_is_a_difference() -> None:
    pair = gate._Pair(None, {}, None, None, torch.device("cpu"))  # type: ignore[arg-type]
    wanted, found = torch.ones(1, 2, 4), torch.ones(1, 2, 4)
    found[0, 0, 0] = float("nan")
    with pytest.raises(W4PackError, match="does not compute"):
        gate._compare(pair, "layer", wanted, found, torch.zeros(1, 2, 4), None)


def test_known_is_what_plans_are_made_of(llama: Checkpoint) -> None:
    """The negative control above replaces the description: here it is the registered one."""
    assert known()["Gemma2ForCausalLM"] is gemma2.ARCHITECTURE
    assert plan_rotation(llama.config, llama.tensors).stream is not None
