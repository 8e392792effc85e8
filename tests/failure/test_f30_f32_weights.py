"""Which files hold the weights, and damaged ones: rows F30 to F32 of the failure list.

The rows of the Hub stand in tests/hub.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from failure.folders import accepted, folder, refused, with_header

import builders as b
import oracle
from runner import convert, run

# --- F30: the index and the shards disagree ---------------------------------------------------------------


def test_f30_whole_set_is_accepted(tmp_path: Path) -> None:
    accepted(folder(tmp_path / "src", shards=3), tmp_path / "out")


def test_f30_missing_shard_is_named_with_what_it_should_hold(tmp_path: Path) -> None:
    source = folder(tmp_path / "src", shards=3)
    gone = "model-00002-of-00003.safetensors"
    count = len(oracle.read_safetensors(source / gone))
    (source / gone).unlink()
    refused(source, tmp_path / "out", gone, count)


def test_f30_tensor_that_its_shard_lacks_is_named(tmp_path: Path) -> None:
    source = folder(tmp_path / "src", shards=3)
    shard = source / "model-00003-of-00003.safetensors"
    tensors = oracle.read_safetensors(shard)
    name = next(n for n in tensors if n.endswith(".qweight"))
    del tensors[name]
    shard.write_bytes(b.safetensors_bytes(tensors))
    refused(source, tmp_path / "out", name, shard.name)


def test_f30_wrong_total_size_is_only_said(tmp_path: Path) -> None:
    source = folder(tmp_path / "src", shards=3)
    index = source / "model.safetensors.index.json"
    value = json.loads(index.read_text())
    right = value["metadata"]["total_size"]
    value["metadata"]["total_size"] = right + 7
    b.write_json(index, value)
    done = accepted(source, tmp_path / "out")
    told = json.dumps([e for e in done.events if e["event"] in ("plan", "warning")])
    assert "total_size" in told


def test_f30_numbered_files_without_an_index_and_with_a_gap(tmp_path: Path) -> None:
    source = folder(tmp_path / "src", shards=3)
    (source / "model.safetensors.index.json").unlink()
    (source / "model-00002-of-00003.safetensors").unlink()
    refused(source, tmp_path / "out", "model-00002-of-00003.safetensors")


@pytest.mark.parametrize("broken", ["[]", "{", '{"weight_map": {"x": 7}}', '{"weight_map": []}', "null"])
def test_f30_index_that_is_no_index(broken: str, tmp_path: Path) -> None:
    source = folder(tmp_path / "src", shards=3)
    (source / "model.safetensors.index.json").write_text(broken)
    refused(source, tmp_path / "out", "model.safetensors.index.json")


def test_f30_same_tensor_in_two_shards(tmp_path: Path) -> None:
    source = folder(tmp_path / "src", shards=2)
    first, second = (source / f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    name = "model.norm.weight"
    tensors = {p: oracle.read_safetensors(p) for p in (first, second)}
    owner, other = (first, second) if name in tensors[first] else (second, first)
    values = tensors[owner][name].array().copy()
    values[0] += np.float16(1)
    other.write_bytes(b.safetensors_bytes(tensors[other] | {name: b.tensor(values, "F16")}))
    done = convert(source, tmp_path / "out", "marlin").expect(0)  # the index says which one counts
    assert oracle.read_folder(tmp_path / "out")[name] == tensors[owner][name]
    (warning,) = [e for e in done.events if e["event"] == "warning"]
    assert name in warning["where"]
    assert other.name in warning["where"]


# --- F31: two sets of weights in one folder ---------------------------------------------------------------


def test_f31_only_what_the_index_names_is_read_or_copied(tmp_path: Path) -> None:
    source = folder(tmp_path / "src", shards=2)
    (source / "original").mkdir()
    strays = ["consolidated.safetensors", "original/x.pth", "pytorch_model.bin", "model.safetensors"]
    for stray in strays:
        (source / stray).write_bytes(b"not even weights" * 3)
    done = accepted(source, tmp_path / "out")
    assert not [s for s in strays if s != "model.safetensors" and (tmp_path / "out" / s).exists()]
    told = json.dumps([e for e in done.events if e["event"] in ("plan", "warning")])
    for stray in strays:
        assert stray in told, stray


@pytest.mark.parametrize("name", ["model.safetensors", "gptq_model-4bit-128g.safetensors", "any.safetensors"])
def test_f31_one_safetensors_file_of_any_name_wins_over_bin(name: str, tmp_path: Path) -> None:
    source = folder(tmp_path / "src")
    (source / "model.safetensors").rename(source / name)
    (source / "pytorch_model.bin").write_bytes(b"x" * 100)
    accepted(source, tmp_path / "out")
    assert not (tmp_path / "out" / "pytorch_model.bin").exists()


def test_f31_two_safetensors_files_without_an_index(tmp_path: Path) -> None:
    source = folder(tmp_path / "src")
    weights = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").unlink()
    for name in ("a.safetensors", "b.safetensors"):
        (source / name).write_bytes(weights)
    convert(source, tmp_path / "out", "marlin").expect(3, "a.safetensors", "b.safetensors")  # ambiguous
    assert not (tmp_path / "out").exists()


# --- F32: truncated or damaged shards ---------------------------------------------------------------------


def entry(**more: Any) -> bytes:
    """Return a header with one tensor, with changes."""
    return json.dumps({"x": {"dtype": "F16", "shape": [2, 2], "data_offsets": [0, 8], **more}}).encode()


DAMAGE: dict[str, bytes] = {
    "0 bytes": b"",
    "4 bytes": b"\x08\0\0\0",
    "8 bytes": struct.pack("<Q", 64),
    "header longer than file": struct.pack("<Q", 2**60) + b"{}",
    "header of 90 MiB": struct.pack("<Q", 90 << 20) + b"{}",
    "negative as signed": struct.pack("<q", -1) + b"{}",
    "json cut short": with_header(entry()[:-5], b"\0" * 8),
    "not an object": with_header(b"[1, 2]"),
    "not utf-8": with_header(b'{"\xff\xfe": 1}'),
    "offsets past the end": with_header(entry(data_offsets=[0, 800]), b"\0" * 8),
    "offsets reversed": with_header(entry(data_offsets=[8, 0]), b"\0" * 8),
    "negative offset": with_header(entry(data_offsets=[-8, 0]), b"\0" * 8),
    "offsets are floats": with_header(entry(data_offsets=[0.0, 8.0]), b"\0" * 8),
    "shape lies": with_header(entry(shape=[2, 3]), b"\0" * 8),
    "negative shape": with_header(entry(shape=[-2, -2]), b"\0" * 8),
    "shape is huge": with_header(entry(shape=[2**40, 2**40]), b"\0" * 8),
    "shape is true": with_header(entry(shape=[True, 4]), b"\0" * 8),
    "unknown dtype": with_header(entry(dtype="F3"), b"\0" * 8),
    "dtype is a list": with_header(entry(dtype=["F16"]), b"\0" * 8),
    "no dtype": with_header(b'{"x": {"shape": [1], "data_offsets": [0, 2]}}', b"\0" * 2),
    "entry is a string": with_header(b'{"x": "F16"}'),
    "hole": with_header(entry(), b"\0" * 16),
    "data cut": with_header(entry(), b"\0" * 7),
    "overlap": with_header(
        b'{"x": {"dtype": "F16", "shape": [4], "data_offsets": [0, 8]},'
        b' "y": {"dtype": "F16", "shape": [4], "data_offsets": [4, 12]}}',
        b"\0" * 12,
    ),
    "deep nesting": with_header(b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "a key twice": with_header(
        b'{"x": {"dtype": "F16", "shape": [4], "data_offsets": [0, 8]},'
        b' "x": {"dtype": "F16", "shape": [4], "data_offsets": [0, 8]}}',
        b"\0" * 8,
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_f32_damaged_file_is_named_by_every_command(damage: str, tmp_path: Path) -> None:
    source = folder(tmp_path / "src", shards=2)
    shard = source / "model-00002-of-00002.safetensors"
    shard.write_bytes(DAMAGE[damage])
    refused(source, tmp_path / "out", shard.name)
    for words in (("inspect", source), ("check", source, "--engine", "vllm"), ("verify", source)):
        done = run(*words, "--json")
        assert done.code != 0
        done.expect(done.code, shard.name)


def test_f32_cut_shard_gives_both_sizes(tmp_path: Path) -> None:
    source = folder(tmp_path / "src", shards=2)
    shard = source / "model-00001-of-00002.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1000])
    done = refused(source, tmp_path / "out", shard.name)
    assert done.says(len(whole))
    assert done.says(len(whole) - 1000)
