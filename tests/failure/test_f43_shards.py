"""Shards of what is written: row F43 of the failure list."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from failure.folders import accepted, folder, tree

import oracle
from runner import convert, run_process


def shard_check(out: Path, limit: int) -> dict[str, Path]:
    """Check names, index and sizes of a sharded output; return where each tensor lies."""
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    count = len(files)
    assert files == [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    held = {name: out / file for file in files for name in oracle.read_safetensors(out / file)}
    assert {name: path.name for name, path in held.items()} == index["weight_map"]
    tensors = oracle.read_folder(out)
    assert index["metadata"]["total_size"] == sum(len(t.data) for t in tensors.values())
    for file in files:
        inside = oracle.read_safetensors(out / file)
        if sum(len(t.data) for t in inside.values()) > limit:
            assert len({name.rsplit(".", 1)[0] for name in inside}) == 1, file
    return held


@pytest.mark.parametrize(("written", "limit"), [("100KB", 100_000), ("40000", 40_000), ("0.1MB", 100_000)])
def test_f43_shards_keep_the_limit_and_a_linear_together(written: str, limit: int, tmp_path: Path) -> None:
    accepted(folder(tmp_path / "src"), tmp_path / "out", "--max-shard-size", written)
    held = shard_check(tmp_path / "out", limit)
    places: dict[str, set[Path]] = {}
    for name, path in held.items():
        places.setdefault(name.rsplit(".", 1)[0], set()).add(path)
    sizes: dict[str, int] = {}
    for name, tensor in oracle.read_folder(tmp_path / "out").items():
        stem = name.rsplit(".", 1)[0]
        sizes[stem] = sizes.get(stem, 0) + len(tensor.data)
    for stem, paths in places.items():
        assert len(paths) == 1 or sizes[stem] > limit, stem


@pytest.mark.parametrize("target", ["marlin", "gptq", "dense"])
def test_f43_a_tensor_above_the_limit_is_a_file_of_its_own(target: str, tmp_path: Path) -> None:
    limit, out = 10_000, tmp_path / "out"
    convert(folder(tmp_path / "src"), out, target, "--max-shard-size", limit).expect(0)
    held = shard_check(out, limit)
    above = {name for name, t in oracle.read_folder(out).items() if len(t.data) > limit}
    assert "model.embed_tokens.weight" in above
    assert len(above) >= 7
    for name in above:
        assert set(oracle.read_safetensors(held[name])) == {name}
    for path in set(held.values()) - {held[name] for name in above}:
        assert sum(len(t.data) for t in oracle.read_safetensors(path).values()) <= limit, path.name


def test_f43_one_shard_has_no_index(tmp_path: Path) -> None:
    accepted(folder(tmp_path / "src", shards=3), tmp_path / "out")
    assert [p.name for p in sorted((tmp_path / "out").glob("*.safetensors*"))] == ["model.safetensors"]


def test_f43_over_50_gb_cannot_be_pushed(tmp_path: Path) -> None:
    source = folder(tmp_path / "src")
    words = ("--max-shard-size", "60GB")
    done = convert(source, tmp_path / "out", "marlin", *words, "--push-to", "org/name", "--dry-run")
    done.expect(2)
    done = convert(source, tmp_path / "out", "marlin", *words, "--dry-run").expect(0)
    assert [e for e in done.events if e["event"] == "warning"]
    convert(source, tmp_path / "out", "marlin", "--max-shard-size", "50GB", "--dry-run").expect(0)


@pytest.mark.parametrize("size", ["0", "-5GB", "many", "5XB", ""])
def test_f43_sizes_that_are_none(size: str, tmp_path: Path) -> None:
    convert(folder(tmp_path / "src"), tmp_path / "out", "marlin", "--max-shard-size", size).expect(2)


def test_f43_tensors_are_aligned_and_files_are_deterministic(tmp_path: Path) -> None:
    source = folder(tmp_path / "src")
    accepted(source, tmp_path / "one")
    accepted(source, tmp_path / "two")
    assert tree(tmp_path / "one") == tree(tmp_path / "two")
    header, start = oracle.read_header(tmp_path / "one" / "model.safetensors")
    assert start % 4096 == 0
    power: Callable[[int], int] = lambda size: min(4096, size & -size) if size else 4096  # noqa: E731
    spans = {n: e["data_offsets"] for n, e in header.items() if n != "__metadata__"}
    order = [power(end - begin) for begin, end in sorted(spans.values())]
    assert order == sorted(order, reverse=True)
    for name, (begin, end) in spans.items():
        assert begin % power(end - begin) == 0, name


def test_f43_real_process_agrees_with_the_in_process_runs(tmp_path: Path) -> None:
    source = folder(tmp_path / "src")
    accepted(source, tmp_path / "one")
    run_process("convert", source, tmp_path / "two", "--to", "marlin", "-q").expect(0)
    assert tree(tmp_path / "one") == tree(tmp_path / "two")
