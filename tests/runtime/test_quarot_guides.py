"""Artifacts with guides of keys in transformers: the numbers, and what does not fit."""

from __future__ import annotations

import copy
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import transformers as tf  # noqa: E402
from click.testing import CliRunner  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

import w4pack  # noqa: E402
from runtime import quarot_models as models  # noqa: E402
from runtime import quarot_reference as fake  # noqa: E402
from runtime.quarot_calls import forced, layer_inputs, relative  # noqa: E402
from w4pack import cli  # noqa: E402
from w4pack.convert.errors import Refused, SourceError  # noqa: E402
from w4pack.convert.source.online_places import GUIDE  # noqa: E402

TOKENS = torch.randint(3, 256, (2, 33), generator=torch.Generator().manual_seed(0))
SMALL = {"num_hidden_layers": 2}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.artifact("qwen3", tmp_path_factory.mktemp("qwen3"), offset=1.0, **SMALL)


def _distances(out: Path, place: Path) -> list[tuple[float, float]]:
    """How far each layer, from its own input, is from the reference, and the reference without guides."""
    exact = fake.FakeModel(out, place, 16, 4)
    assert len(exact.guides) == 2
    inputs, outputs = layer_inputs(w4pack.load(out, act_bits=16, kv_bits=4), TOKENS)

    def wanted() -> list[torch.Tensor]:
        found = forced(exact.model, inputs, lambda: exact.logits(TOKENS))
        return [y - x.float() for x, y in zip(inputs, found, strict=True)]

    guided = wanted()
    exact.guides = {}
    found = zip(inputs, outputs, guided, wanted(), strict=True)
    return [(relative(y - x.float(), z), relative(plain, z)) for x, y, z, plain in found]


@pytest.mark.parametrize(("name", "offset"), [("qwen3", 1.0), ("gemma2", 0.0)])
def test_layers_are_those_of_the_fake_quantized_model(
    name: str, offset: float, out: Path, tmp_path: Path
) -> None:
    """The reference gives the offset back and tries every move of a code: the softmax sees no difference.

    Roundings to 16 bit move some codes inside a layer; without guides many more are others.
    """
    made = out if name == "qwen3" else models.artifact(name, tmp_path / "made", offset=offset, **SMALL)
    for found, without in _distances(made, tmp_path / "dense"):
        assert found < 0.5 * without, (found, without)


def test_both_ways_into_transformers_keep_them_in_float32(out: Path) -> None:
    w4pack.register()
    models_ = (w4pack.load(out), tf.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float16))
    first, second = ([layer.self_attn.get_buffer(GUIDE) for layer in m.model.layers] for m in models_)
    assert all(g.dtype == torch.float32 and bool(g.any()) for g in first)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with torch.no_grad():
        assert torch.equal(*(m(TOKENS).logits for m in models_))


def test_generation_reads_what_was_appended_with_guides(out: Path) -> None:
    model = w4pack.load(out, act_bits=16)
    whole = model.generate(TOKENS, max_new_tokens=6, do_sample=False)
    with torch.no_grad():
        for end in range(TOKENS.shape[1], whole.shape[1]):
            assert torch.equal(model(whole[:, :end]).logits[:, -1].argmax(-1), whole[:, end])


# ---- what reaches a guide --------------------------------------------------------------------------


def _logits(model: Any, cache: Any = None) -> Any:
    with torch.no_grad():
        return model(TOKENS, **({} if cache is None else {fake.CACHE: cache})).logits.float()


def _guides(model: Any) -> list[Any]:
    return [layer.self_attn.get_buffer(GUIDE) for layer in model.model.layers]


def _in_place(model: Any, values: list[Any]) -> None:
    for guide, value in zip(_guides(model), values, strict=True):
        guide.data.copy_(value)


def _replaced(model: Any, values: list[Any]) -> None:
    for layer, value in zip(model.model.layers, values, strict=True):
        setattr(layer.self_attn, GUIDE, value)


def _load(model: Any, values: list[Any], *, assign: bool, dtype: Any = torch.float32) -> None:
    names = [name for name in model.state_dict() if name.endswith(GUIDE)]
    changed = dict(zip(names, (value.to(dtype) for value in values), strict=True))
    model.load_state_dict({**model.state_dict(), **changed}, assign=assign)


CHANGES: dict[str, Callable[[Any, list[Any]], None]] = {
    "load_state_dict": lambda model, values: _load(model, values, assign=False),
    "assigned": lambda model, values: _load(model, values, assign=True),
    "assigned in float64": lambda model, values: _load(model, values, assign=True, dtype=torch.float64),
    "in place": _in_place,
    "replaced": _replaced,
    "in place after a cast": lambda model, values: _in_place(model.to(model.dtype), values),
}


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("how", CHANGES)
def test_other_guides_are_the_logits_of_a_file_with_them(
    how: str, static: bool, out: Path, tmp_path: Path
) -> None:
    """Also in a cache that was begun before."""
    shutil.copytree(out, tmp_path / "other")
    (tmp_path / "other" / "w4pack.json").unlink()
    tensors = load_file(tmp_path / "other" / "model.safetensors")
    names = [name for name in tensors if name.endswith(GUIDE)]
    for name in names:
        tensors[name] = tensors[name] * 3 + 0.5
    save_file(tensors, tmp_path / "other" / "model.safetensors")
    model, other = w4pack.load(out), w4pack.load(tmp_path / "other")
    wanted = _logits(other)
    cache = tf.StaticCache(model.config, 64) if static else tf.DynamicCache(config=model.config)
    before = _logits(model, cache)
    cache.reset()
    frequencies = model.model.rotary_emb.inv_freq
    CHANGES[how](model, [tensors[name] for name in names])
    model.model.rotary_emb.inv_freq = frequencies  # a cast reaches them, as ever
    assert not torch.equal(before, wanted)
    assert torch.equal(_logits(model), wanted)
    assert torch.equal(_logits(model, cache), wanted)


@pytest.mark.parametrize("bits", [4, 16])
@pytest.mark.parametrize("cast", ["half", "bfloat16", "double", "to"])
def test_no_cast_reaches_a_guide(cast: str, bits: int, out: Path) -> None:
    """In a model, in its copies, in a part of it, on ``meta``; also where the cache needs no guide."""
    model = w4pack.load(out, kv_bits=bits)
    wanted, given = [guide.clone() for guide in _guides(model)], [torch.float16] * (cast == "to")
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    for made in (model, copy.deepcopy(model), torch.load(stored, weights_only=False)):
        for part in (made.model.layers[0].self_attn, made.model):
            getattr(part, cast)(*given)
        found = [tensor for name, tensor in made.state_dict().items() if name.endswith(GUIDE)]
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found, wanted, strict=True))
        getattr(made.to("meta").model, cast)(*given)
        found = _guides(made)
        assert {(g.dtype, g.device.type) for g in found} == {(torch.float32, "meta")}


def test_a_copy_reads_its_own_guide(out: Path) -> None:
    model = w4pack.load(out)
    before = _logits(model)
    twin = copy.deepcopy(model)
    _in_place(twin, [guide * 3 + 0.5 for guide in _guides(twin)])
    assert torch.equal(_logits(model), before) and not torch.equal(_logits(twin), before)


def test_a_copied_cache_holds_no_module(out: Path) -> None:
    """A prompt's cache is copied for each continuation: not the model with it."""
    model = w4pack.load(out)
    cache = tf.DynamicCache(config=model.config)
    _logits(model, cache)
    stored = io.BytesIO()
    torch.save(copy.deepcopy(cache), stored)
    weights = sum(p.nbytes for p in model.model.layers[0].self_attn.parameters())
    assert stored.tell() < sum(layer.nbytes for layer in cache.layers) + weights


def test_a_pass_hands_over_the_buffer_itself(out: Path) -> None:
    """So that graphs that were captured read what it has become."""
    model = w4pack.load(out)
    cache = tf.DynamicCache(config=model.config)
    _logits(model, cache)
    assert all(a is b for a, b in zip(cache.layers[0].steps.guides, _guides(model), strict=True))


def test_a_soft_cap_refuses_an_offset(tmp_path: Path) -> None:
    shifted = models.artifact("gemma2", tmp_path / "shifted", offset=1.0, **SMALL)
    with pytest.raises(Refused, match="soft cap") as caught:
        w4pack.load(shifted)
    assert caught.value.code == "artifact-online" and GUIDE in (caught.value.where or "")
    w4pack.load(shifted, kv_bits=16)


def test_guides_without_a_record_are_refused(out: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(out, copy)
    models.edit_online(
        copy, lambda found: [*found[:-1], {k: found[-1][k] for k in found[-1] if k != "guide"}]
    )
    with pytest.raises(Refused) as caught:
        w4pack.load(copy)
    assert caught.value.code == "artifact-online" and GUIDE in (caught.value.expected or "")
    ran = CliRunner().invoke(cli.root, ["check", str(copy), "--engine", "w4pack"])
    assert ran.exit_code != 0 and GUIDE in ran.output


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
@pytest.mark.parametrize("half", [0, 1])
def test_values_that_no_calibration_finds_are_refused(
    value: float, half: int, out: Path, tmp_path: Path
) -> None:
    shutil.copytree(out, tmp_path / "bad")
    tensors = load_file(tmp_path / "bad" / "model.safetensors")
    name = next(n for n in tensors if n.endswith(GUIDE))
    tensors[name][half, 0, 3] = value
    save_file(tensors, tmp_path / "bad" / "model.safetensors")
    with pytest.raises(Refused, match="guide of keys") as caught:
        w4pack.load(tmp_path / "bad")
    assert name in str(caught.value.where)
    w4pack.load(tmp_path / "bad", kv_bits=16)  # needs no guide


@pytest.mark.parametrize("options", [{"rotate": "full"}, {"quantize": {"act_bits": 16, "kv_bits": 4}}])
def test_a_config_that_lost_its_records_is_refused(options: dict[str, Any], tmp_path: Path) -> None:
    folder = models.artifact("llama", tmp_path, **SMALL)
    manifest = json.loads((folder / "w4pack.json").read_text())
    (folder / "w4pack.json").write_text(json.dumps({**manifest, "options": options}))
    w4pack.load(folder)
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization_config"].pop("online")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(SourceError, match="lost what runs between the layers"):
        w4pack.load(folder)
    (folder / "w4pack.json").unlink()
    w4pack.load(folder)  # nothing says that there were records
