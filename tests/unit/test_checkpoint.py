"""A checkpoint as a folder presents it: what is read, and how; its configs."""

from __future__ import annotations

import json
import os
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.checkpoint_folders import numbers, opened, refusal, sharded, write

from w4pack.convert.errors import SourceError
from w4pack.convert.files import rect

# ---- reading ------------------------------------------------------------------------------------------


def test_tensors_of_all_shards_come_in_natural_order_and_whole(tmp_path: Path) -> None:
    files = sharded(tmp_path)
    with opened(tmp_path) as got:
        assert list(got.tensors) == ["a.2", "a.10", "b"]
        assert got.weight_files == tuple(files)
        assert got.index == "model.safetensors.index.json"
        assert got.notices == []
        for tensors in files.values():
            for name, want in tensors.items():
                read = got.read(name)
                assert read.dtype == want.dtype
                assert read.shape == want.shape
                assert (read == want).all()


def test_only_headers_and_configs_are_read_on_opening(tmp_path: Path) -> None:
    write(tmp_path, {"model.safetensors": {"w": numbers(1000, 1000)}}, {"x": 1})
    header = struct.unpack("<Q", (tmp_path / "model.safetensors").read_bytes()[:8])[0]
    with opened(tmp_path) as got:
        assert got.store.bytes_read == 8 + header + (tmp_path / "config.json").stat().st_size
        got.read("w")
        assert got.store.bytes_read == sum(p.stat().st_size for p in tmp_path.iterdir())


def test_dtypes_without_a_numpy_twin_come_as_bits(tmp_path: Path) -> None:
    header = {
        "b": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]},
        "e": {"dtype": "F8_E4M3", "shape": [2, 2], "data_offsets": [4, 8]},
        "f": {"dtype": "F4", "shape": [2, 2], "data_offsets": [8, 10]},
        "z": {"dtype": "F16", "shape": [0, 3], "data_offsets": [10, 10]},
        "s": {"dtype": "U8", "shape": [], "data_offsets": [10, 11]},
    }
    raw = json.dumps(header).encode()
    (tmp_path / "m.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(range(11)))
    with opened(tmp_path) as got:
        assert got.read("b").tolist() == [0x0100, 0x0302]
        assert got.read("e").tolist() == [[4, 5], [6, 7]]
        assert got.read("f").tolist() == [8, 9]
        assert got.read("z").shape == (0, 3)
        assert got.read("s").shape == ()
        assert int(got.read("s")) == 10


INDEX = st.one_of(
    st.tuples(st.integers(0, 12), st.integers(0, 12)).map(lambda ab: slice(min(ab), max(ab))),
    st.just(slice(None)),
    st.lists(st.integers(0, 10), max_size=14).map(lambda rows: np.array(rows, dtype=np.int64)),
)


@given(INDEX, INDEX, st.sampled_from([1, 64, 1 << 20]), st.sampled_from([1, 1 << 20]))
def test_rect_is_what_numpy_takes(rows: Any, cols: Any, chunk: int, short: int) -> None:
    whole = np.arange(11 * 11, dtype=np.int32).reshape(11, 11)
    raw = whole.tobytes()

    def fill(offset: int, buffer: Any) -> None:
        assert buffer.size > 0
        buffer[:] = np.frombuffer(raw, np.uint8)[offset : offset + buffer.size]

    kept = rect.CHUNK, rect.SHORT_RUN
    rect.CHUNK, rect.SHORT_RUN = chunk, short
    try:
        got = rect.read_rect(fill, (11, 11), whole.dtype, rows, cols)
    finally:
        rect.CHUNK, rect.SHORT_RUN = kept
    want = whole[rows][:, cols]
    assert got.shape == want.shape
    assert (got == want).all()


def test_rect_reads_neighbouring_rows_at_once_and_each_row_once() -> None:
    whole = np.arange(40, dtype=np.int16).reshape(10, 4)
    reads: list[tuple[int, int]] = []

    def fill(offset: int, buffer: Any) -> None:
        reads.append((offset, buffer.size))
        buffer[:] = whole.view(np.uint8).reshape(-1)[offset : offset + buffer.size]

    got = rect.read_rect(fill, (10, 4), whole.dtype, np.array([7, 2, 3, 2, 8, 3]), slice(None))
    assert (got == whole[[7, 2, 3, 2, 8, 3]]).all()
    assert reads == [(16, 16), (56, 16)]


def test_rect_of_wide_columns_reads_no_more_than_the_columns(tmp_path: Path) -> None:
    whole = numbers(16, 20_000)
    write(tmp_path, {"model.safetensors": {"w": whole}})
    with opened(tmp_path) as got:
        before = got.store.bytes_read
        part = got.rect("w", slice(4, 12), slice(5000, 10_000))
        assert (part == whole[4:12, 5000:10_000]).all()
        assert got.store.bytes_read - before == part.nbytes


@pytest.mark.parametrize("rows", [np.array([4]), np.array([-1]), np.array([0, 99])])
def test_rect_out_of_range_is_an_index_error(rows: Any, tmp_path: Path) -> None:
    write(tmp_path, {"model.safetensors": {"w": numbers(4, 4)}})
    with opened(tmp_path) as got, pytest.raises(IndexError, match="of 4"):
        got.rect("w", rows, slice(None))


def test_threads_read_the_same_file_at_once(tmp_path: Path) -> None:
    whole = numbers(512, 300)
    write(tmp_path, {"model.safetensors": {"w": whole}})
    barrier = threading.Barrier(8)

    def check(seed: int) -> bool:
        rng = np.random.default_rng(seed)
        barrier.wait()
        return all(
            (got.rect("w", rows, slice(3, 299)) == whole[rows, 3:299]).all()
            for rows in (rng.integers(0, 512, 100) for _ in range(20))
        )

    with opened(tmp_path) as got, ThreadPoolExecutor(8) as pool:
        assert all(pool.map(check, range(8)))


def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = numbers(100, 10)
    write(tmp_path, {"model.safetensors": {"w": whole}})
    real = os.preadv

    def stingy(fd: int, buffers: Any, offset: int) -> int:
        return real(fd, [buffers[0][:7]], offset)

    monkeypatch.setattr(os, "preadv", stingy)
    with opened(tmp_path) as got:
        assert (got.read("w") == whole).all()


def test_a_file_that_shrinks_after_opening_is_named(tmp_path: Path) -> None:
    write(tmp_path, {"model.safetensors": {"w": numbers(1000)}})
    with opened(tmp_path) as got:
        os.truncate(tmp_path / "model.safetensors", 1000)
        with pytest.raises(SourceError, match=r"model\.safetensors") as caught:
            got.read("w")
    assert caught.value.code == "file-too-short"


def test_closing_closes_every_file(tmp_path: Path) -> None:
    sharded(tmp_path)

    def held() -> list[str]:
        links = [os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.exists()]  # noqa: PTH115
        return [link for link in links if link.startswith(str(tmp_path))]

    with opened(tmp_path):
        assert held()
    assert not held()
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(b"1234")
    refusal(tmp_path)
    assert not held()


# ---- configs ------------------------------------------------------------------------------------------


def test_configs_keep_bytes_and_order(tmp_path: Path) -> None:
    raw = (
        b'\xef\xbb\xbf{"z": 1, "a": {"k": [1.50, true, null]},\n "time_step_limit": [0.0, Infinity], "z": 2}'
    )
    quant = b'{"bits": 4}'
    write(tmp_path, {"model.safetensors": {"w": numbers(2)}})
    (tmp_path / "config.json").write_bytes(raw)
    (tmp_path / "quant_config.json").write_bytes(quant)
    (tmp_path / "quantize_config.json").write_bytes(quant)
    with opened(tmp_path) as got:
        assert got.config_raw == raw
        assert list(got.config) == ["z", "a", "time_step_limit"]
        assert got.config["z"] == 2  # the last one, as in every reader
        assert list(got.quant_files) == ["quantize_config.json", "quant_config.json"]
        assert got.quant_files["quant_config.json"] == {"bits": 4}
        assert got.raw["quant_config.json"] == quant
        assert got.metadata == {"from": "model.safetensors"}


def test_a_folder_without_config_opens(tmp_path: Path) -> None:
    write(tmp_path, {"model.safetensors": {"w": numbers(2)}})
    with opened(tmp_path) as got:
        assert got.config == {}
        assert got.config_raw is None


BAD_JSON: dict[str, bytes] = {
    "empty": b"",
    "list": b"[]",
    "null": b"null",
    "cut": b'{"a": 1',
    "binary": bytes(range(256)),
    "latin": b'{"a": "\xe9"}',
    "deep": b'{"a":' * 65 + b"1" + b"}" * 65,
    "very deep": b"[" * 1_000_000,
    "long number": b'{"a": ' + b"9" * 5000 + b"}",
    "half a pair": b'{"a": ["\\udc00"]}',
    "half a pair in a key": b'{"\\udc00": 1}',
    "many lists": b'{"a": [' + b"[]," * 1_100_000 + b"0]}",
}


@pytest.mark.parametrize("name", ["config.json", "quantize_config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("case", BAD_JSON)
def test_broken_json_is_refused_by_name(case: str, name: str, tmp_path: Path) -> None:
    write(tmp_path, {"model.safetensors": {"w": numbers(2)}})
    (tmp_path / name).write_bytes(BAD_JSON[case])
    error = refusal(tmp_path)
    assert error.code == "bad-json"
    assert error.where == name
    assert name in error.what


def test_the_deepest_config_that_is_read(tmp_path: Path) -> None:
    write(tmp_path, {"model.safetensors": {"w": numbers(2)}})
    (tmp_path / "config.json").write_bytes(b'{"a":' * 64 + b"1" + b"}" * 64)
    opened(tmp_path).close()


def test_a_config_of_17_mib_is_refused_with_both_sizes(tmp_path: Path) -> None:
    write(tmp_path, {"model.safetensors": {"w": numbers(2)}})
    (tmp_path / "config.json").write_bytes(b"{" + b" " * (17 << 20) + b"}")
    error = refusal(tmp_path)
    assert error.code == "file-too-large"
    assert (error.expected, error.found) == ("at most 16,777,216 bytes", "17,825,794 bytes")


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_settings_that_are_no_numbers_are_refused_where_they_are_read(number: str, tmp_path: Path) -> None:
    write(tmp_path, {"model.safetensors": {"w": numbers(2)}})
    text = f'{{"quantization_config": {{"dynamic": {{"x": [1, {number}]}}}}}}'
    (tmp_path / "config.json").write_text(text)
    error = refusal(tmp_path)
    assert error.code == "config-not-finite"
    assert error.where == "config.json: quantization_config.dynamic.x[1]"
    (tmp_path / "config.json").write_text(f'{{"time_step_limit": {number}}}')
    opened(tmp_path).close()
