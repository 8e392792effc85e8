"""Thousands of damaged headers, indexes and configs: each is read or refused, nothing else ever happens.

The seeds are fixed; ``W4PACK_FUZZ`` multiplies the number of cases. A case that fails prints its seed and the
bytes. The safetensors library judges every header: what it refuses must be refused here.
"""

from __future__ import annotations

import copy
import json
import os
import resource
import struct
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from damage import ROUNDS, STEPS, TIMES, Rng, spots
from hypothesis import given
from hypothesis import strategies as st

from w4pack.convert.errors import SourceError
from w4pack.convert.files.checkpoint import open_checkpoint
from w4pack.convert.files.local import LocalStore
from w4pack.convert.files.tensorfile import BITS, Header, read_header

LIMIT = 8 << 20  # bytes that reading a damaged file of a few KB may take
TRACED = 10  # memory is measured in one case of so many; it makes them slow
PATIENCE = 2.0  # seconds for one case, on a busy machine

ODD: tuple[Any, ...] = (
    None,
    True,
    False,
    -1,
    0,
    1,
    2**31,
    2**32,
    2**53,
    2**63 - 1,
    2**63,
    2**64,
    2**70,
    10**400,
    1.0,
    0.5,
    -0.0,
    1e308,
    "",
    "F16",
    "I3",
    "..",
    "../x",
    "/etc/passwd",
    "a\0b",
    "\u202e",
    "x" * 1000,
    [],
    {},
    [[]],
    [1],
    [0, 0],
    {"a": 1},
    [2**40, 2**40],
    [0] * 50,
    {"dtype": "F16", "shape": [], "data_offsets": [0, 2]},
)
TOKENS = (
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b'"',
    b"\\",
    b"\\ud800",
    b"\\u0000",
    b"NaN",
    b"Infinity",
    b"-",
    b"1e999",
    b"9" * 30,
    b"\0",
    b"\xff",
    b"\xef\xbb\xbf",
    b"null",
    b"true",
    b"  ",
    b"\n",
    b"[" * 500,
    b'{"a":' * 200,
    b"//",
)

# ---- damage ---------------------------------------------------------------------------------------------


def damage_value(value: Any, rng: Rng) -> Any:
    """Change, remove, repeat or rename parts of a JSON value."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice(ROUNDS)):
        places = spots(value)
        if not places:
            return rng.choice(ODD)
        container, key = rng.choice(places)
        kind = rng.randrange(5)
        if kind == 0:
            del container[key]
        elif kind == 1:
            container[key] = copy.deepcopy(rng.choice(ODD))
        elif kind == 2 and type(container[key]) is int:
            container[key] += rng.choice(STEPS)
        elif kind == 3 and isinstance(container, dict):
            container[rng.choice(("x", "../x", "", "shape", "dtype", "__metadata__"))] = container.pop(key)
        else:
            other, at = rng.choice(places)
            container[key] = copy.deepcopy(other[at]) if at in other or isinstance(other, list) else None
    return value


def damage_bytes(raw: bytes, rng: Rng) -> bytes:
    """Flip, cut, insert and repeat bytes."""
    data = bytearray(raw)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(5)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at:at] = rng.choice(TOKENS)
        elif kind == 2:
            del data[at : at + rng.choice((1, 2, 8, 100))]
        elif kind == 3:
            data[at:at] = data[at : at + rng.randrange(80)]
        else:
            data = data[:at]
    return bytes(data)


def dumps(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


# ---- headers --------------------------------------------------------------------------------------------


def good_header(rng: Rng) -> tuple[dict[str, Any], int]:
    """Return a valid header and the number of data bytes it describes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}} if rng.random() < 0.5 else {}
    at = 0
    for i in range(rng.randrange(6)):
        tag = rng.choice(sorted(BITS))
        shape = [rng.choice((0, 1, 2, 8)) for _ in range(rng.randrange(3))] + [8]
        size = int(np.prod(shape)) * BITS[tag] // 8
        header[f"layers.{i}.w"] = {"dtype": tag, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    return header, at


def bad_file(seed: int) -> bytes:
    """Return a safetensors file with something wrong, most of the time."""
    rng = Rng(seed)
    header, size = good_header(rng)
    raw = dumps(damage_value(header, rng) if rng.random() < 0.6 else header)
    if rng.random() < 0.4:
        raw = damage_bytes(raw, rng)
    length = (
        len(raw)
        if rng.random() < 0.9
        else rng.choice((0, 1, len(raw) - 1, len(raw) + 1, 2**31, 2**60, 2**64 - 1))
    )
    blob = struct.pack("<Q", max(0, length)) + raw + bytes(size)
    return damage_bytes(blob, rng) if rng.random() < 0.15 else blob


def read(blob: bytes) -> Header:
    def at(offset: int, length: int) -> bytes:
        assert 0 <= offset <= offset + length <= len(blob), "a read outside the file"
        return blob[offset : offset + length]

    return read_header("x.safetensors", len(blob), at)


def judged(blob: bytes) -> str:
    """Read a header; return ``ok`` or the code of the refusal, and compare with the library."""
    try:
        got = read(blob)
    except SourceError as error:
        text = str(error)
        assert error.code.startswith(("header-", "file-too-short", "lfs-pointer"))
        assert "x.safetensors" in str(error.where)
        assert len(text) < 6000
        assert all(line.isprintable() for line in text.split("\n"))
        return error.code
    seen = {name: (info["dtype"], tuple(info["shape"])) for name, info in safetensors.deserialize(blob)}
    assert seen == {info.name: (info.dtype, info.shape) for info in got.tensors}
    assert sum(info.nbytes for info in got.tensors) == len(blob) - got.data_start
    return "ok"


def watched(case: Callable[[], str], seed: int, shown: bytes) -> str:
    """Run one case with an eye on time and memory; whatever goes wrong names the seed."""
    traced = seed % TRACED == 0
    if traced:
        tracemalloc.start()
    start = time.monotonic()
    try:
        outcome = case()
        peak = tracemalloc.get_traced_memory()[1]
    except Exception as error:
        raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}\n{shown[:2000]!r}") from error
    finally:
        tracemalloc.stop()
    took = time.monotonic() - start
    assert took < PATIENCE, f"seed {seed} took {took:.1f} s"
    assert peak < LIMIT, f"seed {seed} took {peak:,} bytes"
    return outcome


@pytest.fixture(autouse=True)
def _bounded() -> Any:
    """What the traced cases miss fails where it asks for memory: 4 GiB of addresses above what is there."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (4 << 30), hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_damaged_headers_are_refused_or_agree_with_the_library() -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(4000 * TIMES):
        blob = bad_file(seed)
        outcomes[watched(lambda blob=blob: judged(blob), seed, blob)] += 1  # type: ignore[misc]
    # the generator reaches every kind of refusal, and leaves enough files whole
    assert outcomes["ok"] > 200
    reached = {code for code, count in outcomes.items() if count >= 3}
    assert reached >= {
        "header-json",
        "header-too-large",
        "header-entry",
        "header-dtype",
        "header-shape",
        "header-offsets",
        "header-span",
        "header-hole",
        "header-overlap",
        "header-metadata",
        "file-too-short",
    }, outcomes


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_agree_with_the_library(blob: bytes) -> None:
    judged(blob)
    judged(struct.pack("<Q", len(blob)) + blob)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)
ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(sorted(BITS)) | JSON,
        "shape": st.lists(st.integers(0, 4), max_size=4) | JSON,
        "data_offsets": st.tuples(st.integers(0, 64), st.integers(0, 64)).map(sorted) | JSON,
    },
    optional={"more": JSON},
)


@given(
    st.dictionaries(st.text(max_size=8) | st.just("__metadata__"), ENTRY | JSON, max_size=4),
    st.integers(0, 64),
)
def test_any_json_is_refused_or_agrees_with_the_library(header: dict[str, Any], size: int) -> None:
    raw = dumps(header)
    judged(struct.pack("<Q", len(raw)) + raw + bytes(size))


# ---- folders --------------------------------------------------------------------------------------------

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "tie_word_embeddings": False,
    "text_config": {"tie_word_embeddings": True},
    "quantization_config": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "dynamic": {"-:x": {}},
        "meta": {"a": [1.5]},
    },
}
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = {"metadata": {"total_size": 48}, "weight_map": {"a": SHARDS[0], "b": SHARDS[0], "c": SHARDS[1]}}
CODES = {
    "bad-json",
    "bad-index",
    "path-escape",
    "missing-shard",
    "missing-tensor",
    "config-not-finite",
    "two-weight-sets",
    "file-too-large",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole checkpoint of two shards, and a file outside that nothing may open."""
    inside = tmp_path / "src"
    inside.mkdir()
    (tmp_path / "x").write_bytes(b"outside")
    four = np.zeros(4, dtype=np.float32)
    safetensors.numpy.save_file({"a": four, "b": four}, inside / SHARDS[0])
    safetensors.numpy.save_file({"c": four}, inside / SHARDS[1])
    (inside / "config.json").write_bytes(dumps(CONFIG))
    (inside / "quantize_config.json").write_bytes(dumps(CONFIG["quantization_config"]))
    (inside / "model.safetensors.index.json").write_bytes(dumps(INDEX))
    return inside


def damaged_json(value: Any, seed: int) -> bytes:
    rng = Rng(seed)
    raw = dumps(damage_value(value, rng) if rng.random() < 0.6 else value)
    return damage_bytes(raw, rng) if rng.random() < 0.5 else raw


def opening(folder: Path, name: str) -> str:
    try:
        with open_checkpoint(LocalStore(folder)) as got:
            assert {"a", "b", "c"} >= set(got.tensors)
            for notice in got.notices:
                assert len(notice.text()) < 6000
            json.dumps([got.config, got.quant_files], ensure_ascii=False).encode()
            return "ok"
    except SourceError as error:
        text = str(error)
        assert error.code in CODES, text
        assert name in text or "model-" in text
        assert len(text) < 6000
        text.encode()
        return error.code


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("config.json", CONFIG, {"bad-json", "ok"}),
        ("quantize_config.json", CONFIG["quantization_config"], {"bad-json", "ok"}),
        (
            "model.safetensors.index.json",
            INDEX,
            {"bad-json", "ok", "bad-index", "path-escape", "missing-shard", "missing-tensor"},
        ),
    ],
    ids=["config", "quantizer", "index"],
)
def test_damaged_json_files_are_refused_by_name_or_read(
    name: str, value: Any, wanted: set[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, inside = os.open, f"{folder.resolve()}/"

    def guarded(path: Any, *rest: Any, **more: Any) -> int:
        assert os.fspath(path).startswith(inside), f"opened {path}"
        return real(path, *rest, **more)

    monkeypatch.setattr("w4pack.convert.files.local.os.open", guarded)
    outcomes: Counter[str] = Counter()
    for seed in range(1000 * TIMES):
        raw = damaged_json(value, seed)
        (folder / name).write_bytes(raw)
        outcomes[watched(lambda: opening(folder, name), seed, raw)] += 1
    assert {code for code, count in outcomes.items() if count >= 3} >= wanted, outcomes


def test_damaged_shards_of_a_whole_checkpoint_are_refused_by_name(folder: Path) -> None:
    whole = (folder / SHARDS[1]).read_bytes()
    outcomes: Counter[str] = Counter()
    for seed in range(1000 * TIMES):
        raw = damage_bytes(whole, Rng(seed))
        (folder / SHARDS[1]).write_bytes(raw)

        def case() -> str:
            try:
                open_checkpoint(LocalStore(folder)).close()
            except SourceError as error:
                assert SHARDS[1] in str(error)
                return error.code
            return "ok"

        outcomes[watched(case, seed, raw)] += 1
    assert outcomes["ok"] < 500
    assert len(outcomes) > 6, outcomes
