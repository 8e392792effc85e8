"""A checkpoint as a folder presents it: which files count."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from unit.checkpoint_folders import numbers, opened, refusal, sharded, write, write_index

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
