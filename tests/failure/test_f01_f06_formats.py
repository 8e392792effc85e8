"""Which format a source has: rows F1 to F6 and F93 of the failure list, each by its smallest input."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from failure.decoding import ATTN, EVERY, PACKED, accepted, made, refused, small, warnings_of

import builders as b
import oracle
from runner import convert, run


def words_of(folder: Path, ending: str) -> set[int]:
    """Return the distinct 32-bit words of all tensors with this ending."""
    found: set[int] = set()
    for name, value in oracle.read_folder(folder).items():
        if name.endswith(ending):
            found |= set(np.frombuffer(value.data, "<u4").tolist())
    return found


# --- F1: zero points of the other version than the label says ---------------------------------------------


@pytest.mark.parametrize(("writer", "label"), [(b.gptq_v2, "gptq"), (b.gptq, "gptq_v2")])
@pytest.mark.parametrize("target", EVERY)
def test_f01_symmetric_zeros_decide_the_version(
    target: str, writer: b.Writer, label: str, tmp_path: Path
) -> None:
    model = made()
    source = b.write(tmp_path / "src", model, writer, b.gptq_config(checkpoint_format=label))
    done = accepted(source, tmp_path / "out", target, model.linears)
    told = warnings_of(done)
    assert "checkpoint_format" in told or "v1" in told
    assert [e for e in done.events if e["event"] == "warning"]
    if target == "gptq":
        assert words_of(tmp_path / "out", ".qzeros") == {0x77777777}
        assert oracle.quant_config(tmp_path / "out")["checkpoint_format"] == "gptq"


@pytest.mark.parametrize("label", ["gptq", "gptq_v2"])
def test_f01_asymmetric_zeros_cannot_decide_so_the_config_does(label: str, tmp_path: Path) -> None:
    model = made(sym=False)
    for linear in model.linears.values():
        linear.zeros = np.clip(linear.zeros, 1, 14).astype(np.uint8)  # no stored 15 under either reading
    source = b.write(tmp_path / "src", model, b.gptq_v2, b.gptq_config(sym=False, checkpoint_format=label))
    if label == "gptq":
        for linear in model.linears.values():
            linear.zeros = (linear.zeros + 1).astype(np.uint8)
    accepted(source, tmp_path / "out", "marlin", model.linears)


def test_f01_matching_label_is_no_warning(tmp_path: Path) -> None:
    model = made()
    source = b.write(tmp_path / "src", model, b.gptq, b.gptq_config())
    done = accepted(source, tmp_path / "out", "gptq", model.linears)
    assert not [e for e in done.events if e["event"] == "warning"]


# --- F2: `sym` in the config is wrong ---------------------------------------------------------------------


def one_odd_zero() -> b.Model:
    """Return a symmetric model but for one zero of k_proj: its first word of group 1 becomes 0x77777776."""
    model = made()
    model.linears[f"{ATTN}.k_proj"].zeros[1, 0] = 7
    return model


@pytest.mark.parametrize("target", ["marlin", "awq", "compressed-tensors", "dense"])
def test_f02_labelled_symmetric_but_one_zero_differs(target: str, tmp_path: Path) -> None:
    model = one_odd_zero()
    source = b.write(tmp_path / "src", model, b.gptq, b.gptq_config(sym=True))
    assert 0x77777776 in words_of(source, ".qzeros")
    done = accepted(source, tmp_path / "out", target, model.linears)
    told = warnings_of(done)
    assert "sym" in told
    (warning,) = [e for e in done.events if e["event"] == "warning"]
    assert f"{ATTN}.k_proj.qzeros" in warning["where"]
    assert "group 1" in warning["where"]


def test_f02_odd_zero_is_refused_where_symmetry_is_needed(tmp_path: Path) -> None:
    source = b.write(tmp_path / "src", made(config=wide(), group=128), b.gptq, b.gptq_config())
    convert(source, tmp_path / "accepted", "marlin-legacy").expect(0)
    model = made(config=wide())
    model.linears[f"{ATTN}.k_proj"].zeros[1, 0] = 7
    odd = b.write(tmp_path / "odd", model, b.gptq, b.gptq_config())
    done = refused(odd, tmp_path / "out", "marlin-legacy", f"{ATTN}.k_proj")
    assert done.says("awq") or done.says("marlin")


def test_f02_engines_that_need_symmetry_refuse_gptq_and_the_way_is_named(tmp_path: Path) -> None:
    source = b.write(tmp_path / "src", one_odd_zero(), b.gptq, b.gptq_config(sym=True))
    convert(source, tmp_path / "out", "gptq").expect(0)
    assert oracle.quant_config(tmp_path / "out")["sym"] is False
    answer = run("check", tmp_path / "out", "--engine", "vllm", "--json").expect(3).data
    assert answer["ok"] is False
    assert re.search(r"w4pack convert .*--to (awq|compressed-tensors|marlin)", answer["suggestion"])


def test_f02_labelled_asymmetric_but_all_zeros_are_the_midpoint(tmp_path: Path) -> None:
    model = made()
    source = b.write(tmp_path / "src", model, b.gptq, b.gptq_config(sym=False))
    done = accepted(source, tmp_path / "out", "gptq", model.linears)
    assert "sym" in warnings_of(done)
    assert oracle.quant_config(tmp_path / "out")["sym"] is True
    assert words_of(tmp_path / "out", ".qzeros") == {0x77777777}


# --- F3: where the settings live --------------------------------------------------------------------------


def test_f03_settings_only_in_quantize_config(tmp_path: Path) -> None:
    model = made()
    source = b.write(tmp_path / "src", model, b.gptq, None)
    b.write_json(source / "quantize_config.json", b.gptq_config())
    accepted(source, tmp_path / "out", "gptq", model.linears)
    assert oracle.read_config(tmp_path / "out")["quantization_config"]["bits"] == 4


def test_f03_two_files_differ_and_the_tensors_decide(tmp_path: Path) -> None:
    model = made()
    source = b.write(tmp_path / "src", model, b.gptq, b.gptq_config(group=128))
    b.write_json(source / "quantize_config.json", b.gptq_config(group=64))
    done = accepted(source, tmp_path / "out", "gptq", model.linears)
    told = warnings_of(done)
    for part in ("config.json", "quantize_config.json", "64", "128"):
        assert part in told
    assert oracle.quant_config(tmp_path / "out")["group_size"] == 128
    second = json.loads((tmp_path / "out" / "quantize_config.json").read_text())
    assert second == oracle.read_config(tmp_path / "out")["quantization_config"]


def test_f03_settings_nowhere_but_the_tensors_tell(tmp_path: Path) -> None:
    model = made()
    source = b.write(tmp_path / "src", model, b.gptq, None)
    done = accepted(source, tmp_path / "out", "marlin", model.linears)
    assert [e for e in done.events if e["event"] == "warning"]


def test_f03_asymmetric_without_settings_needs_the_format_named(tmp_path: Path) -> None:
    model = made(sym=False)
    for linear in model.linears.values():
        linear.zeros = np.clip(linear.zeros, 1, 14).astype(np.uint8)
    source = b.write(tmp_path / "src", model, b.gptq_v2, None)
    refused(source, tmp_path / "out", "marlin", "--source-format")
    accepted(source, tmp_path / "out", "marlin", model.linears, "--source-format", "gptq_v2")


# --- F4: close to GPTQ but not it -------------------------------------------------------------------------


def test_f04_unknown_checkpoint_format_is_named(tmp_path: Path) -> None:
    source = b.write(tmp_path / "src", made(), b.gptq, b.gptq_config(checkpoint_format="qqq"))
    refused(source, tmp_path / "out", "marlin", "qqq", "gptq_v2")


def test_f04_zeros_with_the_shape_of_scales(tmp_path: Path) -> None:
    model = made()
    name = f"{ATTN}.k_proj"
    zeros = b.tensor(model.linears[name].zeros.astype(np.float16), "F16")
    source = b.write(tmp_path / "src", model, b.gptq, b.gptq_config(), extra={f"{name}.qzeros": zeros})
    done = refused(source, tmp_path / "out", "marlin", f"{name}.qzeros")  # a layout that is not known
    assert done.says("F16") or done.says("float16")
    assert done.says("[2, 64]")
    assert done.says("[2, 8]")


# --- F5: serialized Marlin, labelled three ways -----------------------------------------------------------


def wide(**more: Any) -> dict[str, Any]:
    """Return a config whose linears are all 256 -> 256, which the first Marlin kernels took."""
    return small(num_key_value_heads=4, **more)


LEGACY_LABELS: dict[str, dict[str, Any] | None] = {
    "checkpoint_format": b.gptq_config(checkpoint_format="marlin"),
    "is_marlin_format": {
        k: v for k, v in b.gptq_config(is_marlin_format=True).items() if k != "checkpoint_format"
    },
    "quant_method": {"quant_method": "marlin", "group_size": 128},
    "none": None,
}


@pytest.mark.parametrize("label", LEGACY_LABELS)
def test_f05_legacy_tensors_are_known_under_every_label(label: str, tmp_path: Path) -> None:
    model = made(config=wide())
    source = b.write(tmp_path / "src", model, b.legacy, LEGACY_LABELS[label])
    for target in ("marlin", "gptq"):
        accepted(source, tmp_path / target, target, model.linears)


@pytest.mark.parametrize("group", [128, -1])
def test_f05_marlin_legacy_holds_b_and_s_and_nothing_else(group: int, tmp_path: Path) -> None:
    model = made(config=wide(), group=group)
    source = b.write(tmp_path / "src", model, b.gptq, b.gptq_config(group=group))
    convert(source, tmp_path / "legacy", "marlin-legacy").expect(0)
    tensors = oracle.read_folder(tmp_path / "legacy")
    for name, linear in model.linears.items():
        assert {k: v for k, v in tensors.items() if k.startswith(f"{name}.")} == b.legacy(name, linear)
    settings = oracle.read_config(tmp_path / "legacy")["quantization_config"]
    assert settings["checkpoint_format"] == "marlin"
    assert settings["is_marlin_format"] is True
    convert(tmp_path / "legacy", tmp_path / "back", "gptq").expect(0)
    assert oracle.read_folder(tmp_path / "back") == oracle.read_folder(source)


def test_f05_other_group_sizes_are_refused_for_marlin_legacy(tmp_path: Path) -> None:
    source = b.write(tmp_path / "src", made(config=wide(), group=64), b.gptq, b.gptq_config(group=64))
    refused(source, tmp_path / "out", "marlin-legacy", "128", "-1", "64")


# --- F6: AWQ variants -------------------------------------------------------------------------------------

AWQ_FORMS: dict[str, b.Writer] = {"gemm": b.awq_gemm, "gemv": b.awq_gemv, "gemv_fast": b.awq_gemv_fast}


@pytest.mark.parametrize("target", EVERY)
@pytest.mark.parametrize("version", AWQ_FORMS)
def test_f06_every_awq_form_decodes_to_the_same_codes(version: str, target: str, tmp_path: Path) -> None:
    model = made(sym=False)
    source = b.write(tmp_path / "src", model, AWQ_FORMS[version], b.awq_config(version=version))
    accepted(source, tmp_path / "out", target, model.linears)
    if target == "awq":
        assert oracle.quant_config(tmp_path / "out")["version"].lower() == "gemm"
        want = b.all_tensors(model, b.awq_gemm)
        assert oracle.read_folder(tmp_path / "out") == want


def test_f06_awq_marlin_has_zero_eight_and_gets_words_of_eights(tmp_path: Path) -> None:
    model = made(config=wide())
    source = b.write(tmp_path / "src", model, b.awq_marlin, b.awq_config(version="marlin", zero_point=False))
    accepted(source, tmp_path / "out", "awq", model.linears)
    assert words_of(tmp_path / "out", ".qzeros") == {0x88888888}


@pytest.mark.parametrize("label", ["gemm", "gemv_fast"])
def test_f06_gemv_tensors_under_another_label(label: str, tmp_path: Path) -> None:
    model = made(sym=False)  # q_proj is 256 -> 256: qweight alone cannot tell, scales and zeros do
    source = b.write(tmp_path / "src", model, b.awq_gemv, b.awq_config(version=label))
    done = accepted(source, tmp_path / "out", "awq", model.linears)
    assert "gemv" in warnings_of(done)


def test_f06_awq_label_on_gptq_tensors(tmp_path: Path) -> None:
    model = made()
    source = b.write(tmp_path / "src", model, b.gptq, b.awq_config())
    done = accepted(source, tmp_path / "out", "marlin", model.linears)
    assert [e for e in done.events if e["event"] == "warning"]


# --- F93: two ways to store z - 1 -------------------------------------------------------------------------

ZEROS = [0, 8, 8, 3, 15, 8, 0, 1]
STORED = {"word": 0xFF7E276F, "nibble": 0x0F7E277F}
READ = {  # (how it was stored, how it is read) -> zeros
    ("word", "nibble"): [16, 7, 8, 3, 15, 8, 16, 16],
    ("nibble", "nibble"): [16, 8, 8, 3, 15, 8, 16, 1],
    ("word", "word"): [0, 8, 8, 3, 15, 8, 0, 1],
    ("nibble", "word"): [0, 9, 8, 3, 15, 8, 0, 2],
}


def zero_words(folder: Path, stored: int, **more: Any) -> tuple[Path, b.Model]:
    """Write the small model with one word of k_proj's zeros replaced."""
    model = made(sym=False)
    for linear in model.linears.values():
        linear.zeros = np.clip(linear.zeros, 1, 15).astype(np.uint8)
    name = f"{ATTN}.k_proj"
    words = (
        np.frombuffer(b.gptq(name, model.linears[name])[f"{name}.qzeros"].data, "<u4").reshape(2, 8).copy()
    )
    words[0, 0] = stored
    extra = {f"{name}.qzeros": b.tensor(words.view(np.int32), "I32")}
    return b.write(folder, model, b.gptq, b.gptq_config(sym=False, **more), extra=extra), model


def k_weight(model: b.Model, zeros: list[int]) -> Any:
    """Return k_proj's weight with these zeros in the first eight columns of group 0, z = 16 included."""
    linear = model.linears[f"{ATTN}.k_proj"]
    z = linear.zeros.astype(np.float64)
    z[0, :8] = zeros
    steps = linear.codes.astype(np.float64) - z[linear.gi]
    return oracle.round_once((steps * oracle.widen(linear.scales, "F16")[linear.gi]).T, "F16")


@pytest.mark.parametrize("stored", STORED)
def test_f93_a_stored_15_of_an_unknown_producer_is_refused_with_both_readings(
    stored: str, tmp_path: Path
) -> None:
    source, _ = zero_words(tmp_path / "src", STORED[stored])
    for target in ("marlin", "dense"):
        refused(source, tmp_path / target, target, f"{ATTN}.k_proj", "--zero-reading", "word", "nibble")


@pytest.mark.parametrize("reading", ["word", "nibble"])
@pytest.mark.parametrize("stored", STORED)
def test_f93_the_explicit_reading_gives_these_zeros(stored: str, reading: str, tmp_path: Path) -> None:
    source, model = zero_words(tmp_path / "src", STORED[stored])
    convert(source, tmp_path / "out", "dense", "--zero-reading", reading).expect(0)
    got = oracle.read_folder(tmp_path / "out")[f"{ATTN}.k_proj.weight"].array()
    assert np.array_equal(got, k_weight(model, READ[stored, reading]))


def test_f93_zero_16_fits_no_packed_target(tmp_path: Path) -> None:
    source, _ = zero_words(tmp_path / "src", STORED["nibble"])
    options = ["--zero-reading", "nibble"]
    refused(source, tmp_path / "out", "marlin", f"{ATTN}.k_proj", "16", "dense", options=options)


@pytest.mark.parametrize("target", PACKED)
def test_f93_gptqmodel_subtracts_from_the_word(target: str, tmp_path: Path) -> None:
    meta = {"quantizer": ["gptqmodel:7.7.0"]}
    source, model = zero_words(tmp_path / "src", STORED["word"], meta=meta)
    model.linears[f"{ATTN}.k_proj"].zeros[0, :8] = ZEROS
    accepted(source, tmp_path / "out", target, model.linears)
    if target == "gptq":
        assert oracle.quant_config(tmp_path / "out")["checkpoint_format"] == "gptq_v2"


def test_f93_without_a_stored_15_there_is_no_question(tmp_path: Path) -> None:
    model = made(sym=False)
    source = b.write(tmp_path / "src", model, b.gptq, b.gptq_config(sym=False))
    assert model.linears[f"{ATTN}.k_proj"].zeros.min() >= 1
    accepted(source, tmp_path / "out", "marlin", model.linears)


def test_f93_the_same_in_8_bit(tmp_path: Path) -> None:
    model = made(sym=False, bits=8)
    model.linears[f"{ATTN}.k_proj"].zeros[0, :4] = [0, 5, 128, 255]
    source = b.write(tmp_path / "src", model, b.gptq, b.gptq_config(sym=False, bits=8))
    refused(source, tmp_path / "out", "marlin", f"{ATTN}.k_proj", "--zero-reading")
    accepted(source, tmp_path / "word", "marlin", model.linears, "--zero-reading", "word")
    known = b.write(
        tmp_path / "known",
        model,
        b.gptq,
        b.gptq_config(sym=False, bits=8, meta={"quantizer": "gptqmodel:7.7.0"}),
    )
    accepted(known, tmp_path / "known-out", "marlin", model.linears)
