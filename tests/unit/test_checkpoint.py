"""A checkpoint as a folder presents it: which files count, what is read, and how."""

from __future__ import annotations

import json
import os
import struct
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from w4pack.convert.errors import SourceError, W4PackError
from w4pack.convert.files import rect
from w4pack.convert.files.checkpoint import Checkpoint, open_checkpoint
from w4pack.convert.files.local import LocalStore

RNG = np.random.default_rng(7)


def numbers(*shape: int, dtype: str = "int32") -> Any:
    return RNG.integers(0, 100, shape).astype(dtype)


def write(folder: Path, files: Mapping[str, Mapping[str, Any]], config: Any = None, **others: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, tensors in files.items():
        safetensors.numpy.save_file(dict(tensors), folder / name, metadata={"from": name})
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    for name, data in others.items():
        (folder / name).write_bytes(data)
    return folder


def write_index(folder: Path, files: Mapping[str, Mapping[str, Any]], **more: Any) -> None:
    weight_map = {tensor: name for name, tensors in files.items() for tensor in tensors}
    total = sum(array.nbytes for tensors in files.values() for array in tensors.values())
    value = {"metadata": {"total_size": total}, "weight_map": weight_map} | more
    (folder / "model.safetensors.index.json").write_text(json.dumps(value))


def opened(folder: Path) -> Checkpoint:
    return open_checkpoint(LocalStore(folder))


def sharded(folder: Path) -> dict[str, dict[str, Any]]:
    files = {
        "model-00001-of-00002.safetensors": {"a.2": numbers(4, 6), "a.10": numbers(3)},
        "model-00002-of-00002.safetensors": {"b": numbers(5, 2, dtype="float16")},
    }
    write(folder, files, {"x": 1})
    write_index(folder, files)
    return files


def refusal(folder: Path) -> W4PackError:
    """Broken sources exit with 1; two sets of weights are ambiguous and exit with 3."""
    with pytest.raises(W4PackError) as caught:
        opened(folder)
    assert caught.value.exit_code == (3 if caught.value.code == "two-weight-sets" else 1)
    return caught.value


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


# ---- which files belong -------------------------------------------------------------------------------


def test_stray_weights_beside_an_index_are_left_out_and_a_stray_single_file_is_said(tmp_path: Path) -> None:
    files = sharded(tmp_path)
    write(
        tmp_path,
        {"consolidated.safetensors": {"a.2": numbers(4, 6)}, "model.safetensors": {"b": numbers(5, 2)}},
    )
    (tmp_path / "original").mkdir()
    for stray in (
        "original/x.pth",
        "original/params.json",
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
    ):
        (tmp_path / stray).write_bytes(b"12345")
    with opened(tmp_path) as got:
        assert got.weight_files == tuple(files)
        assert (got.read("a.2") == files["model-00001-of-00002.safetensors"]["a.2"]).all()
        left = {name: size for name, size, _ in got.left_out}
        assert left == {
            "consolidated.safetensors": (tmp_path / "consolidated.safetensors").stat().st_size,
            "model.safetensors": (tmp_path / "model.safetensors").stat().st_size,
            "original/params.json": 5,
            "original/x.pth": 5,
            "pytorch_model.bin": 5,
            "pytorch_model.bin.index.json": 5,
        }
        assert not got.side_files
        assert [(n.code, n.where) for n in got.notices] == [("stray-weights", "model.safetensors")]


@pytest.mark.parametrize(
    "name", ["model.safetensors", "gptq_model-4bit-128g.safetensors", "any name.safetensors"]
)
def test_one_safetensors_file_of_any_name_wins_over_pickles(name: str, tmp_path: Path) -> None:
    write(tmp_path, {name: {"w": numbers(2)}})
    (tmp_path / "pytorch_model.bin").write_bytes(b"never read")
    with opened(tmp_path) as got:
        assert got.weight_files == (name,)
        assert [entry[0] for entry in got.left_out] == ["pytorch_model.bin"]


@pytest.mark.parametrize(
    "names",
    [
        ("a.safetensors", "b.safetensors"),
        ("model.safetensors", "gptq_model-4bit-128g.safetensors"),
        ("model.safetensors", "model-00001-of-00001.safetensors"),
        ("x-00001-of-00001.safetensors", "y-00001-of-00001.safetensors"),
    ],
)
def test_two_sets_without_an_index_are_refused_naming_both(names: tuple[str, str], tmp_path: Path) -> None:
    write(tmp_path, {name: {"w": numbers(2), "v": numbers(2)} for name in names})
    error = refusal(tmp_path)
    assert error.code == "two-weight-sets"
    assert all(name in str(error.found) for name in names)


def test_a_second_file_that_is_no_copy_of_the_model_is_left_out(tmp_path: Path) -> None:
    model = {"w": numbers(2), "v": numbers(2), "u": numbers(3)}
    write(
        tmp_path,
        {"model.safetensors": model, "expected.safetensors": {"w": numbers(2), "w.dense": numbers(9)}},
    )
    with opened(tmp_path) as got:
        assert got.weight_files == ("model.safetensors",)
        assert [entry[0] for entry in got.left_out] == ["expected.safetensors"]
    (tmp_path / "expected.safetensors").write_bytes(b"12345678")
    assert refusal(tmp_path).code == "two-weight-sets"


def test_a_part_of_the_model_beside_it_is_refused(tmp_path: Path) -> None:
    model = {name: numbers(2) for name in "abcdef"}
    write(tmp_path, {"model.safetensors": model, "model-00002-of-00005.safetensors": {"f": numbers(2)}})
    error = refusal(tmp_path)
    assert error.code == "two-weight-sets"
    assert "model-00002-of-00005.safetensors" in str(error.found)


def test_an_index_of_another_name_does_not_count_beside_the_usual_file(tmp_path: Path) -> None:
    other = "consolidated.safetensors"
    write(tmp_path, {"model.safetensors": {"w": numbers(2)}, other: {"layers.w": numbers(2)}})
    index = {"weight_map": {"layers.w": other}}
    (tmp_path / "consolidated.safetensors.index.json").write_text(json.dumps(index))
    with opened(tmp_path) as got:
        assert got.weight_files == ("model.safetensors",)
        assert [entry[0] for entry in got.left_out] == [other, f"{other}.index.json"]


def test_a_whole_series_without_an_index_is_read_and_said(tmp_path: Path) -> None:
    files = sharded(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with opened(tmp_path) as got:
        assert got.weight_files == tuple(files)
        assert set(got.tensors) == {"a.2", "a.10", "b"}
        assert [n.code for n in got.notices] == ["no-index"]


@pytest.mark.parametrize(
    ("kept", "missing"),
    [((1, 3), 2), ((2, 3), 1), ((1, 2), 3), ((1,), 2), ((3,), 1)],
)
def test_f30_a_gap_in_a_series_is_named(kept: tuple[int, ...], missing: int, tmp_path: Path) -> None:
    write(tmp_path, {f"model-{i:05d}-of-00003.safetensors": {f"t{i}": numbers(2)} for i in kept})
    error = refusal(tmp_path)
    assert error.code == "missing-shard"
    assert f"model-{missing:05d}-of-00003.safetensors" in error.what


def test_a_series_that_claims_a_million_shards_is_refused_at_once(tmp_path: Path) -> None:
    write(tmp_path, {"model-00001-of-99999.safetensors": {"t": numbers(2)}})
    assert "model-00002-of-99999.safetensors" in refusal(tmp_path).what


def test_an_index_of_another_name_counts_where_nothing_has_the_usual_name(tmp_path: Path) -> None:
    name = "gptq_model-4bit-128g-00001-of-00001.safetensors"
    write(tmp_path, {name: {"w": numbers(2)}, "other.safetensors": {"w": numbers(2)}})
    index = {"weight_map": {"w": name}}
    (tmp_path / "gptq_model-4bit-128g.safetensors.index.json").write_text(json.dumps(index))
    with opened(tmp_path) as got:
        assert got.weight_files == (name,)
        assert [entry[0] for entry in got.left_out] == ["other.safetensors"]


@pytest.mark.parametrize(
    ("files", "found"), [((), "an empty folder"), (("m.gguf",), "m.gguf"), (("README.md",), "1 other")]
)
def test_a_folder_without_weights_says_what_is_there(
    files: tuple[str, ...], found: str, tmp_path: Path
) -> None:
    for name in files:
        (tmp_path / name).write_bytes(b"x")
    error = refusal(tmp_path)
    assert error.code == "no-weights"
    assert found in str(error.found)


# ---- the index ----------------------------------------------------------------------------------------


def test_f30_a_missing_shard_is_named_with_its_number_of_tensors(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    error = refusal(tmp_path)
    assert error.code == "missing-shard"
    assert error.expected == "`model-00001-of-00002.safetensors` with 2 tensors"


def test_f30_a_missing_tensor_is_named_with_its_shard(tmp_path: Path) -> None:
    files = sharded(tmp_path)
    second = "model-00002-of-00002.safetensors"
    write_index(tmp_path, files | {second: files[second] | {"c.1": numbers(1), "c.0": numbers(1)}})
    error = refusal(tmp_path)
    assert error.code == "missing-tensor"
    assert error.where == f"{second}, c.0"
    assert "1 more" in str(error.found)


def test_f30_a_tensor_in_another_shard_than_the_index_says(tmp_path: Path) -> None:
    files = sharded(tmp_path)
    first, second = files
    write_index(tmp_path, {first: {**files[first], **files[second]}, second: {"a.2": files[first]["a.2"]}})
    error = refusal(tmp_path)
    assert error.code == "missing-tensor"
    assert error.where is not None
    assert "it lies in" in str(error.found)


def test_f30_a_wrong_total_is_a_notice_with_both_numbers(tmp_path: Path) -> None:
    files = sharded(tmp_path)
    total = sum(array.nbytes for tensors in files.values() for array in tensors.values())
    write_index(tmp_path, files, metadata={"total_size": total + 7})
    with opened(tmp_path) as got:
        (notice,) = got.notices
    assert notice.code == "index-total-size"
    assert (notice.expected, notice.found) == (f"total_size {total}, the sum of the tensors", str(total + 7))


@pytest.mark.parametrize("total", ["x", [1], None, True, 1.5, {"a": 1}, 10**400])
def test_f30_a_total_of_any_kind_does_not_stop(total: Any, tmp_path: Path) -> None:
    files = sharded(tmp_path)
    write_index(tmp_path, files, metadata={"total_size": total})
    with opened(tmp_path) as got:
        assert [n.code for n in got.notices] == ([] if total is None else ["index-total-size"])


def test_a_tensor_that_the_index_forgets_is_read_and_said(tmp_path: Path) -> None:
    files = sharded(tmp_path)
    first, second = files
    write_index(tmp_path, {first: {"a.2": files[first]["a.2"]}, second: files[second]})
    with opened(tmp_path) as got:
        assert set(got.tensors) == {"a.2", "a.10", "b"}
        assert [n.code for n in got.notices] == ["not-in-index"]
        assert "a.10" in got.notices[0].found


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    files = sharded(tmp_path)
    first, second = files
    write(tmp_path, {second: files[second] | {"a.10": numbers(3) + 1000}})
    with opened(tmp_path) as got:  # the index says which one counts
        assert (got.read("a.10") == files[first]["a.10"]).all()
        assert [n.code for n in got.notices] == ["duplicate-tensor"]
        assert got.notices[0].where == f"{second}, a.10"
    moved = {first: {"a.2": files[first]["a.2"]}, second: files[second] | {"a.10": numbers(3)}}
    write_index(tmp_path, moved)
    with opened(tmp_path) as got:
        assert got.tensors["a.10"].file == second
        assert (got.read("a.10") >= 1000).all()
        assert got.notices[0].where == f"{first}, a.10"
    (tmp_path / "model.safetensors.index.json").unlink()
    error = refusal(tmp_path)
    assert error.code == "duplicate-tensor"
    assert error.where == f"{first}, {second}"


ESCAPES = [
    "../x.safetensors",
    "/etc/x",
    "a/../../x",
    "a/b.safetensors",
    "..",
    ".",
    "",
    "a\\b",
    "a\0b",
    "a\nb",
    "\ud800",
    "x" * 300,
]


@pytest.mark.parametrize("name", ESCAPES)
def test_f40_shard_names_that_are_no_plain_names_are_refused(name: str, tmp_path: Path) -> None:
    files = sharded(tmp_path)
    (tmp_path.parent / "x.safetensors").write_bytes(b"outside")
    write_index(tmp_path, files, weight_map={"a": name})
    error = refusal(tmp_path)
    assert error.code == ("bad-json" if name == "\ud800" else "path-escape")
    assert error.where == "model.safetensors.index.json"
    assert str(error).isascii() or name == "größe"


@pytest.mark.parametrize("value", [None, 7, [], {}, ["x"], "x"])
def test_f30_an_index_without_a_map_is_refused(value: Any, tmp_path: Path) -> None:
    files = sharded(tmp_path)
    write_index(tmp_path, files, weight_map=value)
    error = refusal(tmp_path)
    assert error.code == "bad-index"
    assert error.where == "model.safetensors.index.json"


@pytest.mark.parametrize("value", [None, 7, ["x"], {"a": 1}, True])
def test_f30_an_index_entry_that_is_no_name_is_refused(value: Any, tmp_path: Path) -> None:
    files = sharded(tmp_path)
    write_index(tmp_path, files, weight_map={"a.2": value})
    assert refusal(tmp_path).code == "bad-index"


# ---- side files ---------------------------------------------------------------------------------------

TRAVEL = [
    "LICENSE",
    "NOTICE",
    "README.md",
    "additional_chat_templates/tool.jinja",
    "chat_template.jinja",
    "empty",
    "generation_config.json",
    "größe-表.txt",
    "modeling_x.py",
    "tokenizer.json",
    "tokenizer.model",
    "vocab.txt",
    "assets/deep/er/x",
    "no_suffix",
    "w 4.txt",
    ".hidden",
    "training_state.json",
    "recipe.yaml",
]
STAY = [
    ".gitattributes",
    ".gitignore",
    "consolidated.00.pth",
    "model.gguf",
    "tf_model.h5",
    "flax_model.msgpack",
    "onnx/model.onnx",
    "optimizer.pt",
    "rng_state_0.pth",
    "training_args.bin",
    "MODEL.GGUF",
    "onnx/model.onnx_data",
    "x.incomplete",
    "pytorch_model.bin.index.json",
    "__pycache__/m.cpython-311.pyc",
]
NEITHER = [
    "config.json",
    "quantize_config.json",
    "quant_config.json",
    "quantization_config.json",
    "w4pack.json",
]


def test_f33_everything_travels_but_what_a_rule_names(tmp_path: Path) -> None:
    write(tmp_path, {"model.safetensors": {"w": numbers(2)}})
    for name in (*TRAVEL, *STAY, *NEITHER, ".git/config", ".cache/huggingface/x.metadata"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"{}" if name.endswith(".json") else b"" if name == "empty" else b"abc")
    with opened(tmp_path) as got:
        assert sorted(got.side_files) == sorted(TRAVEL)
        assert got.side_files["empty"] == 0
        assert got.side_files["tokenizer.json"] == 2
        assert sorted(name for name, _, _ in got.left_out) == sorted(STAY)
        assert all(reason for _, _, reason in got.left_out)


def test_a_file_name_that_is_not_utf8_is_left_out_and_printable(tmp_path: Path) -> None:
    write(tmp_path, {"model.safetensors": {"w": numbers(2)}})
    with open(os.fsencode(tmp_path) + b"/caf\xe9.txt", "wb") as file:  # noqa: PTH123 - the name is bytes
        file.write(b"x")
    with opened(tmp_path) as got:
        assert got.left_out == [("caf\\udce9.txt", 1, "file name is not UTF-8")]
        assert not got.side_files
