"""Artifacts with ``online`` records as they are used: loaded both ways, asked to generate in every mode."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from click.testing import CliRunner  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

import w4pack  # noqa: E402
from runtime import quarot_models as models  # noqa: E402
from runtime import quarot_reference as fake  # noqa: E402
from w4pack import cli  # noqa: E402
from w4pack.convert import convert  # noqa: E402
from w4pack.convert.errors import Refused, UsageError  # noqa: E402
from w4pack.convert.planning.quantize_options import QuantizeOptions  # noqa: E402
from w4pack.kernels.hf.kv_attention import ATTENTION  # noqa: E402
from w4pack.kernels.hf.kv_cache import KVLayer  # noqa: E402

PROMPT = torch.randint(3, 256, (2, 11), generator=torch.Generator().manual_seed(0))
GREEDY: dict[str, Any] = {"max_new_tokens": 7, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.artifact("llama", tmp_path_factory.mktemp("llama"), **models.SMALL)


@pytest.fixture(scope="module")
def model(out: Path) -> Any:
    return w4pack.load(out)


def generated(model: Any, tokens: Any = PROMPT, **how: Any) -> Any:
    return model.generate(tokens, attention_mask=how.pop("mask", torch.ones_like(tokens)), **GREEDY | how)


# ---- both ways in ----------------------------------------------------------------------------------


def test_from_pretrained_loads_the_same(out: Path, model: Any) -> None:
    w4pack.register()
    stock = AutoModelForCausalLM.from_pretrained(out)
    with torch.no_grad():
        assert torch.equal(stock(PROMPT).logits, model(PROMPT).logits)
    assert set(stock.state_dict()) == set(model.state_dict())


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_another_attention_that_is_asked_for_is_refused_as_it_is_loaded(attention: str, out: Path) -> None:
    w4pack.register()
    stock = AutoModelForCausalLM
    with pytest.raises(UsageError) as seen:
        stock.from_pretrained(out, attn_implementation=attention)
    assert (seen.value.where, seen.value.found) == ("attn_implementation", attention)
    assert stock.from_pretrained(out, attn_implementation=ATTENTION).config._attn_implementation == ATTENTION
    wide = stock.from_pretrained(out, attn_implementation=attention, config=_with_bits(out, kv_bits=16))
    assert wide.config._attn_implementation == attention


def test_the_attention_of_a_quantized_cache_is_refused_without_one(out: Path) -> None:
    w4pack.register()
    bits = _with_bits(out, kv_bits=16)
    stock = AutoModelForCausalLM.from_pretrained(out, attn_implementation=ATTENTION, config=bits)
    loaded = w4pack.load(out, kv_bits=16)
    loaded.set_attn_implementation(ATTENTION)
    for wide in (stock, loaded):
        for cached in (True, False):
            with pytest.raises(UsageError, match="sets it itself") as seen:
                wide(PROMPT, use_cache=cached)
            assert seen.value.where == "attn_implementation"


def _with_bits(out: Path, **bits: Any) -> Any:
    config = AutoConfig.from_pretrained(out)
    config.quantization_config.update(bits)
    return config


def test_from_pretrained_takes_bits_in_the_config(out: Path) -> None:
    w4pack.register()
    stock = AutoModelForCausalLM.from_pretrained(out, config=_with_bits(out, act_bits=8, kv_bits=16))
    wanted = w4pack.load(out, act_bits=8, kv_bits=16)
    with torch.no_grad():
        assert torch.equal(stock(PROMPT).logits, wanted(PROMPT).logits)
    assert stock.online_settings == wanted.online_settings
    assert stock.config.to_dict()["quantization_config"] == wanted.config.to_dict()["quantization_config"]
    with pytest.raises(UsageError) as seen:
        AutoModelForCausalLM.from_pretrained(out, config=_with_bits(out, act_bits=5))
    assert seen.value.where == "act_bits"


@pytest.mark.parametrize(("act", "kv"), [(16, 16), (8, 4), (16, 8), (4, 16)])
def test_bits_are_chosen_among_the_recorded(out: Path, act: int, kv: int) -> None:
    made = w4pack.load(out, act_bits=act, kv_bits=kv)
    assert (made.online_settings.act_bits, made.online_settings.kv_bits) == (act, kv)
    found = generated(made, return_dict_in_generate=True)
    caches = [getattr(found, n, None) for n in ("cache", "past_key_values")]
    layers = next(c for c in caches if c is not None).layers
    assert {type(layer) is KVLayer for layer in layers} == {kv != 16}


def test_other_bits_are_refused_and_named(out: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as seen:
        w4pack.load(out, act_bits=5)
    assert (seen.value.where, seen.value.expected, seen.value.found) == ("act_bits", "4 or 8 or 16", "5")
    assert "--" not in str(seen.value)
    with pytest.raises(UsageError, match="act_bits"):
        w4pack.load(out, act_bits=4.0)
    folder = copied(out, tmp_path)
    models.edit_online(folder, lambda records: [_only_four(r) for r in records])
    with pytest.raises(UsageError) as seen:
        w4pack.load(folder, kv_bits=8)
    assert seen.value.expected == "4 or 16"


def _only_four(record: dict[str, Any]) -> dict[str, Any]:
    if record["kind"] != "kv_quant":
        return record
    return {**record, "clip": {side: {"4": 0.9} for side in "kv"}}


def copied(out: Path, place: Path) -> Path:
    shutil.copytree(out, place / "copy")
    return place / "copy"


def _changed(kind: str, **values: Any) -> Callable[[list[Any]], list[Any]]:
    return lambda records: [{**r, **values} if r["kind"] == kind else r for r in records]


def _of_mlp(**values: Any) -> Callable[[list[Any]], list[Any]]:
    return lambda records: [
        {**r, **values} if r.get("site") == "mlp_mid" and "order" in r else r for r in records
    ]


UNKNOWN = {
    "a key": (_changed("act_quant", zero=1), "online.4.zero"),
    "a kind": (lambda records: [*records, {"kind": "lora"}], "kind"),
    "a site": (_changed("act_quant", site="router"), "site"),
    "signs": (_changed("hadamard", signs="00"), "signs"),
    "a group": (_changed("kv_quant", group=32), "kv_quant"),
    "an order": (
        lambda records: [
            {**r, "order": 128, "block": 128, "factors": [[128, "sylvester"]]} for r in records[:1]
        ],
        "qk",
    ),
    "a width": (_of_mlp(order=256, block=256, factors=[[256, "sylvester"]]), "mlp_mid"),
    "a construction": (_of_mlp(factors=[[512, "magic"]], order=512, block=512), "mlp_mid"),
    "a factor": (_changed("hadamard", factors=[[3, "paley9"]]), "factors"),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_unknown_records_are_refused_and_named(out: Path, tmp_path: Path, case: str) -> None:
    change, where = UNKNOWN[case]
    folder = copied(out, tmp_path)
    models.edit_online(folder, change)
    with pytest.raises((Refused, UsageError)) as seen:
        w4pack.load(folder)
    assert where in str(seen.value)
    w4pack.register()
    with pytest.raises((Refused, UsageError)):
        AutoModelForCausalLM.from_pretrained(folder)


def test_layer_norms_are_refused(tmp_path: Path) -> None:
    out = models.artifact("opt", tmp_path)
    with pytest.raises(Refused, match="LayerNorm"):
        w4pack.load(out)


def test_an_artifact_without_records_takes_no_bits(tmp_path: Path, out: Path) -> None:
    folder = copied(out, tmp_path)
    models.edit_online(folder, lambda records: [])
    with pytest.raises(UsageError, match="act_bits"):
        w4pack.load(folder, act_bits=4)


def test_what_the_converter_writes_runs(tmp_path: Path) -> None:
    plain = models.source("llama", tmp_path / "source", **models.SMALL)
    options = QuantizeOptions(method="rtn", group_size=-1, act_bits=8, kv_bits=4, samples=2, seqlen=32)
    convert(plain, tmp_path / "out", rotate="full", quantize=options)
    made = w4pack.load(tmp_path / "out")
    assert (made.online_settings.act_bits, made.online_settings.kv_bits) == (8, 4)
    exact = fake.FakeModel(tmp_path / "out", tmp_path / "dense", 8, 4)
    wanted = exact.logits(PROMPT)
    exact.act_bits = exact.kv_bits = 16
    with torch.no_grad():
        found = made(PROMPT).logits.float()
    assert float((found - wanted).norm()) < 0.5 * float((exact.logits(PROMPT) - wanted).norm())


def test_copies_compute_the_same(model: Any, tmp_path: Path) -> None:
    torch.save(model, tmp_path / "model.pt")
    stored = torch.load(tmp_path / "model.pt", weights_only=False)
    with torch.no_grad():
        wanted = model(PROMPT).logits
        assert torch.equal(stored(PROMPT).logits, wanted)
        assert torch.equal(copy.deepcopy(model)(PROMPT).logits, wanted)


# ---- generate --------------------------------------------------------------------------------------


def test_a_cache_changes_nothing(model: Any) -> None:
    """Codes do not depend on how tokens come: with and without cache, in chunks, in a static cache."""
    wanted = generated(model)
    for how in (
        {"use_cache": False},
        {"prefill_chunk_size": 4},
        {"cache_implementation": "static"},
    ):
        assert torch.equal(generated(model, **how), wanted), how


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(model: Any, side: str) -> None:
    short = PROMPT[:1, :6]
    with torch.no_grad():
        alone = model(short).logits
    padded, mask = PROMPT.clone(), torch.ones_like(PROMPT)
    span = slice(5, 11) if side == "left" else slice(0, 6)
    padded[0], mask[0] = 0, 0
    padded[0, span], mask[0, span] = short[0], 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        both = model(padded, attention_mask=mask, position_ids=positions).logits
        free = model(padded, attention_mask=mask, position_ids=positions, use_cache=False).logits
    assert torch.equal(both[:1, span], alone)
    assert torch.equal(free[mask.bool()], both[mask.bool()])
    if side == "left":
        assert torch.equal(generated(model, padded, mask=mask)[:1, 11:], generated(model, short)[:, 6:])


def test_beams_samples_and_several_sequences(model: Any) -> None:
    for how in (
        {"num_beams": 3, "num_return_sequences": 2},
        {"do_sample": True, "num_return_sequences": 3, "temperature": 1.5, "top_k": 0},
        {"num_beams": 2, "do_sample": True},
    ):
        torch.manual_seed(3)
        kept = generated(model, **how)
        torch.manual_seed(3)
        assert torch.equal(generated(model, use_cache=False, **how), kept), how


def test_a_prompt_is_looked_up_and_taken_back(model: Any) -> None:
    """Assisted decoding crops the cache."""
    tokens = PROMPT[:1].repeat(1, 3)
    assert torch.equal(generated(model, tokens, prompt_lookup_num_tokens=3), generated(model, tokens))


def test_masks_of_pairs_are_refused(model: Any) -> None:
    with pytest.raises(UsageError) as seen:
        model(PROMPT, attention_mask=torch.ones(2, 1, 11, 11))
    assert seen.value.where == "attention_mask"


def test_another_attention_and_its_weights_are_refused(out: Path, model: Any) -> None:
    with pytest.raises(UsageError, match="no weights") as seen:
        model(PROMPT, output_attentions=True)
    assert seen.value.where == "output_attentions"
    assert len(model(PROMPT, output_hidden_states=True).hidden_states) == 3
    other = w4pack.load(out)
    for name in ("eager", "sdpa"):
        other.set_attn_implementation(name)
        with pytest.raises(UsageError) as seen:
            other(PROMPT)
        assert (seen.value.where, seen.value.found) == ("set_attn_implementation", name)
    wide = w4pack.load(out, kv_bits=16)
    wide.set_attn_implementation("eager")
    assert len(wide(PROMPT, output_attentions=True).attentions) == 2


@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_sliding_windows(name: str, tmp_path: Path) -> None:
    made = w4pack.load(models.artifact(name, tmp_path, **models.SMALL))
    tokens = PROMPT.repeat(1, 3)
    wanted = generated(made, tokens)
    assert torch.equal(generated(made, tokens, use_cache=False), wanted)
    assert torch.equal(generated(made, tokens, cache_implementation="static"), wanted)


def test_the_command_takes_bits(out: Path) -> None:
    given = ["generate", str(out), "abc", "--device", "cpu", "--max-new-tokens", "3", "--json"]
    found = CliRunner().invoke(cli.root, [*given, "--act-bits", "8", "--kv-bits", "16"])
    assert found.exit_code == 0, found.output
    said = json.loads(found.stdout)
    assert (said["act_bits"], said["kv_bits"], said["new_tokens"]) == (8, 16, 3)
    refused = CliRunner().invoke(cli.root, [*given, "--act-bits", "5"])
    assert refused.exit_code == 2


def test_a_command_names_its_option_where_python_names_its_parameter(out: Path, tmp_path: Path) -> None:
    folder, text = copied(out, tmp_path), tmp_path / "text.txt"
    models.edit_online(folder, lambda records: [_only_four(r) for r in records])
    text.write_text("the quick brown fox " * 99)
    asked = ["--kv-bits", "8", "--device", "cpu", "--json"]
    for words in (["generate", str(folder), "abc"], ["eval", str(folder), "--text", str(text)]):
        said = json.loads(CliRunner().invoke(cli.root, [*words, *asked]).stdout)
        assert (said["where"], said["found"], said["exit"]) == ("--kv-bits", "8", 2)
        assert "`--kv-bits`" in said["what"] and said["hint"].startswith("without `--kv-bits` it runs with 4")
