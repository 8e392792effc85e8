"""Checkpoints of real tools through every target and back, judged by the tests' own decoder."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
import pytest
from compare import (
    TARGETS,
    check_dense_tensors,
    folded,
    order_class,
    same_numbers,
    siblings,
    verdict,
    written_name,
)

import checkpoints
import oracle
from oracle import Linear
from runner import Run, convert, run

REFUSED = {  # the key that changes the forward pass
    "llmcompressor-quip-w4g64-llama": "transform_config",
    "llmcompressor-spinquant-r4-w4g64-llama": "transform_config",
    "llmcompressor-w4a8-g64-llama": "input_activations",
}
NAMES = [name for name in checkpoints.names() if name not in REFUSED]


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which checkpoints are laid out once."""
    return tmp_path_factory.mktemp("sources")


def source_of(sources: Path, name: str) -> Path:
    """Lay a checkpoint out, or return it."""
    folder = sources / name.replace("/", "-")
    return folder if folder.exists() else checkpoints.lay_out(name, folder)


@functools.cache
def decoded(name: str) -> dict[str, Linear]:
    """Decode a checkpoint once."""
    return oracle.decode_folder(checkpoints.fixtures_root() / name)


def expected_kinds(name: str, target: str) -> dict[str, str]:
    """Return what the table says of each module."""
    alone = {module: verdict(module, linear, target).kind for module, linear in decoded(name).items()}
    kinds = dict(alone)
    for module in alone:
        if alone[module] == "ok" and any(alone.get(part) == "shape" for part in siblings(module)):
            kinds[module] = "shape"
    return kinds


def check_modules(name: str, out: Path, target: str) -> None:
    """Compare every module of OUT with the source: packed ones bit for bit, dense ones rounded once."""
    config = oracle.read_config(checkpoints.fixtures_root() / name)
    kinds = expected_kinds(name, target)
    dense = frozenset(module for module, kind in kinds.items() if kind != "ok")
    want = decoded(name) if target in ("marlin", "dense") else folded(decoded(name))
    got, tensors = oracle.decode_folder(out), oracle.read_folder(out)
    for module, linear in want.items():
        there = written_name(module, config)
        if target != "dense" and there in got:
            same_numbers(got[there], linear, there)
            continue
        assert target == "dense" or module in dense, f"{module} should stay packed"
        weight = tensors[f"{there}.weight"]
        assert weight.tag == oracle.TORCH_TAG[config.get("dtype") or config.get("torch_dtype") or "float16"]
        assert oracle.same_floats(weight.array(), linear.weight(weight.tag), weight.tag), there
    assert set(got) <= {written_name(module, config) for module in want}


def check_hashes(name: str, out: Path) -> None:
    """Compare the weights of OUT with the hashes that the tool's own code gave."""
    config = oracle.read_config(checkpoints.fixtures_root() / name)
    got = oracle.decode_folder(out)
    for module, entry in checkpoints.meta(name)["modules"].items():
        linear = got[written_name(module, config)]
        tag = oracle.TORCH_TAG[entry.get("dtype", "float16")]
        assert oracle.digest_tagged(linear.recorded(tag), tag) == entry["sha256_W"], module
        assert entry.get("sha256_codes", oracle.digest(linear.codes)) == oracle.digest(linear.codes), module


def check_biases(name: str, out: Path) -> None:
    """Check that biases travel byte for byte, but for all-zero ones that the architecture lacks."""
    config = oracle.read_config(checkpoints.fixtures_root() / name)
    tensors = oracle.read_folder(out)
    for module, linear in folded(decoded(name)).items():
        got = tensors.get(f"{written_name(module, config)}.bias")
        if linear.bias is None:
            assert got is None, module
        elif linear.bias.array().any():
            assert got is not None, module
            unfolded = decoded(name)[module].bias
            assert got in (linear.bias, unfolded), module


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", NAMES)
def test_every_checkpoint_reaches_every_target_the_table_allows(
    name: str, target: str, sources: Path, tmp_path: Path
) -> None:
    source, out = source_of(sources, name), tmp_path / "out"
    kinds = set(expected_kinds(name, target).values())
    done = convert(source, out, target)
    if "refuse" in kinds and (target != "marlin" or kinds == {"refuse"}):
        done.expect(3)
        assert not out.exists()
        assert done.error["hint"] or done.error.get("problems"), done.error
        return
    if kinds == {"shape"}:
        done.expect(3)
        assert not out.exists()
        return
    done.expect(0)
    assert done.events[-1]["event"] == "done"
    check_modules(name, out, target)
    check_dense_tensors(source, out, decoded(name))
    check_biases(name, out)
    lossless = target != "dense" and kinds == {"ok"}
    told = run("verify", out, "--against", source, "--json").expect(0).data
    assert told["ok"] is True
    assert told["lossless"] is lossless
    if target == "marlin" and lossless:
        check_hashes(name, out)


@pytest.mark.parametrize("name", [n for n in NAMES if "w4g16" not in n])  # no kernel has groups of 16
def test_unpack_gives_back_every_tensor_byte_for_byte(name: str, sources: Path, tmp_path: Path) -> None:
    source, out, back = source_of(sources, name), tmp_path / "out", tmp_path / "back"
    convert(source, out, "marlin").expect(0)
    run("unpack", out, back, "--json").expect(0)
    assert oracle.read_folder(back) == oracle.read_folder(source)
    for file in sorted(p for p in source.iterdir() if p.suffix != ".safetensors"):
        if file.name == "config.json" or file.name.endswith("config.json"):
            assert json.loads((back / file.name).read_text()) == json.loads(file.read_text()), file.name
        elif not file.name.endswith(".index.json"):
            assert (back / file.name).read_bytes() == file.read_bytes(), file.name


@pytest.mark.shared
def test_fold_only_where_down_proj_alone_is_permuted(sources: Path, tmp_path: Path) -> None:
    name = "gptqmodel-w4g128-sym-desc-llama"
    permuted = [module for module, linear in decoded(name).items() if order_class(linear) == "groups"]
    assert permuted
    assert all(module.endswith("down_proj") for module in permuted)
    convert(source_of(sources, name), tmp_path / "out", "gptq").expect(0)
    for module, linear in oracle.decode_folder(tmp_path / "out").items():
        assert order_class(linear) == "none", module


# --- refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", [n for n in REFUSED if n in checkpoints.names()])
def test_forward_pass_that_no_target_carries_is_refused(
    name: str, target: str, sources: Path, tmp_path: Path
) -> None:
    source, out = source_of(sources, name), tmp_path / "out"
    convert(source, out, target).expect(3, REFUSED[name])
    assert not out.exists()


def expect_said(record: dict[str, object], done: Run) -> None:
    """Check the names that the record of a broken variant asks for."""
    wanted = {
        "bin-pickle-code": ("pytorch_model.bin",),
        "g-idx-out-of-range": (".g_idx",),
        "g-idx-uneven": ("model.layers.0.",),
        "header-hole": ("model.safetensors",),
        "header-huge-shape": ("model.safetensors",),
        "header-length-lies": ("model.safetensors", str(2**60)),
        "header-shape-lies": ("model.", "model.safetensors"),
        "header-unknown-dtype": ("I3", "model."),
        "index-path-escape": ("model.safetensors.index.json",),
        "index-tensor-missing": ("model-0000", "model.layers.0."),
        "missing-scales": (".scales",),
        "nan-scale": ("down_proj.scales",),
        "no-g-idx-desc-act": (".g_idx",),
        "shard-missing": ("model-00002-of-00003.safetensors",),
        "shard-truncated": ("model-00003-of-00003.safetensors",),
        "zero-point-16": ("--zero-reading", "model.layers.0."),
    }
    done.expect(done.code, *wanted.get(str(record["name"]), ()))


@pytest.mark.parametrize("target", ("marlin", "gptq", "awq"))
@pytest.mark.parametrize("name", checkpoints.broken_names())
def test_broken_variant_does_what_its_record_says(
    name: str, target: str, sources: Path, tmp_path: Path
) -> None:
    record = checkpoints.meta(f"broken/{name}")
    if name.startswith("bin"):
        pytest.importorskip("torch")
    source, out = source_of(sources, f"broken/{name}"), tmp_path / "out"
    done = convert(source, out, target)
    if record["result"] == "refuse":
        done.expect(record["exit"])
        assert "unpickled code ran" not in done.text
        assert not out.exists()
        expect_said(record, done)
        return
    base = record["base"]
    if target != "marlin" and any(verdict(m, x, target).kind == "refuse" for m, x in decoded(base).items()):
        done.expect(3)
        return
    done.expect(0)
    if record["result"] == "decodes_with_warning":
        assert [event for event in done.events if event["event"] == "warning"], done.out
    check_broken_values(name, out, target)


def check_broken_values(name: str, out: Path, target: str) -> None:
    """Compare OUT with the base checkpoint, or with what the label says where nothing contradicts it."""
    record = checkpoints.meta(f"broken/{name}")
    got = oracle.decode_folder(out)
    base = decoded(record["base"]) if target == "marlin" else folded(decoded(record["base"]))
    if record["expected"] == "expected.safetensors":
        arrays = oracle.read_safetensors(
            checkpoints.fixtures_root() / "broken" / name / "expected.safetensors"
        )
        for module, linear in got.items():
            if f"{module}.W" in arrays:
                want = arrays[f"{module}.W"]
                assert np.array_equal(linear.recorded(want.tag), want.array()), module
        return
    for module, linear in got.items():
        if record["expected"] is None:  # the label v1 is followed: every zero is one more than the tool meant
            assert np.array_equal(linear.codes, base[module].codes), module
            assert np.array_equal(linear.zeros[linear.gi], base[module].zeros[base[module].gi] + 1), module
        else:
            same_numbers(linear, base[module], module)
    assert set(got) == set(base)


@pytest.mark.parametrize("reading", ("word", "nibble"))
def test_zero_reading_is_the_explicit_way_on(reading: str, sources: Path, tmp_path: Path) -> None:
    source, out = source_of(sources, "broken/zero-point-16"), tmp_path / "out"
    stored = oracle.read_folder(source)
    done = convert(source, out, "dense", "--zero-reading", reading).expect(0)
    assert done.events[-1]["event"] == "done"
    got = oracle.read_folder(out)
    for module, linear in decoded(checkpoints.meta("broken/zero-point-16")["base"]).items():
        words = np.ascontiguousarray(stored[f"{module}.qzeros"].array()).view("<u4")
        fields = oracle.unpack_words(words, 4, 1).astype(np.int64) + 1
        if reading == "word":
            fields = oracle.unpack_words(words + np.uint32(0x11111111), 4, 1).astype(np.int64)
        steps = linear.codes.astype(np.float64) - fields[linear.gi]
        want = steps * oracle.widen(linear.scales, linear.tag)[linear.gi]
        weight = got[f"{module}.weight"]
        assert np.array_equal(weight.array(), oracle.round_once(want.T, weight.tag)), module
