"""An artifact that was changed since it was written: every command that reads it says so."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from quantize.test_outputs import quantize
from runner import Run, run

GUIDE = "model.layers.0.self_attn.k_guide"
Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def made(llama: Path, book: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("changed") / "out"
    quantize(llama, out, "--kv-bits", 4, text=book).expect(0)
    return out


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "copy"))


def edit(folder: Path, change: Change) -> None:
    """Change the block of an artifact."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config["quantization_config"])
    path.write_text(json.dumps(config))


def measured(folder: Path, book: Path, *more: Any) -> Run:
    return run("eval", folder, "--text", book, "--windows", 2, "--seqlen", 32, "--json", *more)


def checked(folder: Path) -> str:
    answer = run("check", folder, "--engine", "w4pack", "--json").expect(3).data
    return json.dumps(answer["results"])


def test_as_it_was_written_it_is_measured(made: Path, book: Path) -> None:
    assert measured(made, book).expect(0).data["kv_bits"] == 4


@pytest.mark.parametrize(
    "change", [lambda q: q.pop("online"), lambda q: q.update(online=[])], ids=["gone", "empty"]
)
def test_lost_records_are_told_by_the_options_of_the_manifest(change: Change, copy: Path, book: Path) -> None:
    edit(copy, change)
    error = measured(copy, book).expect(1).error
    assert error["code"] == "artifact-online" and "lost what runs between the layers" in error["what"]
    assert "as the options in w4pack.json say" in checked(copy)
    (told,) = run("inspect", copy, "--json").expect(0).data["warnings"]
    assert "as the options in w4pack.json say" in told["expected"]
    (copy / "w4pack.json").unlink()
    assert GUIDE in measured(copy, book).expect(3).error["expected"]
    assert GUIDE in checked(copy)


@pytest.mark.parametrize(
    "content", ["", "[]", "{", '{"options": ', '{"options": 5}', '{"options": {"quantize": 5}}']
)
def test_a_manifest_that_tells_nothing_is_no_bug(content: str, copy: Path, book: Path) -> None:
    edit(copy, lambda q: q.pop("online"))
    (copy / "w4pack.json").write_text(content)
    assert GUIDE in checked(copy)
    measured(copy, book).expect(3)


def test_a_stray_guide_is_told(copy: Path, book: Path) -> None:
    edit(copy, lambda q: [record.pop("guide", None) for record in q["online"]])
    assert GUIDE in measured(copy, book).expect(3).error["expected"]
    assert GUIDE in checked(copy)


@pytest.mark.parametrize("against", [False, True])
def test_exchanged_tensors_are_told_by_eval(against: bool, copy: Path, made: Path, book: Path) -> None:
    path = copy / "model.safetensors"
    tensors = load_file(path)
    one, two = (f"model.layers.{n}.mlp.down_proj.weight" for n in (0, 1))
    save_file({**tensors, one: tensors[two].clone(), two: tensors[one].clone()}, path)
    done = measured(made, book, "--against", copy) if against else measured(copy, book)
    error = done.expect(4).error
    assert error["code"] == "tensor-exchanged" and [p["exit"] for p in error["problems"]] == [4, 4]
    assert one in error["where"] and two in error["where"]


def test_a_manifest_whose_samples_are_no_text_is_no_bug(copy: Path, book: Path) -> None:
    path = copy / "w4pack.json"
    value = json.loads(path.read_text())
    for entry, odd in zip(value["tensors"].values(), ([], 5, None, {}), strict=False):
        entry["sample"] = odd
    path.write_text(json.dumps(value))
    measured(copy, book).expect(0)


@pytest.mark.parametrize(
    "online", [5, "x", [5], {"kind": "hadamard"}, [{"site": "attn_out", "order": "x"}], None]
)
def test_records_that_nobody_knows_are_refused_by_every_command(online: Any, copy: Path, book: Path) -> None:
    edit(copy, lambda q: q.update(online=online))
    for done in (run("inspect", copy, "--json"), run("check", copy, "--json"), measured(copy, book)):
        error = json.loads(done.expect(3).out)
        assert error["code"] == "artifact-unknown"
        assert error["what"].startswith("the artifact's config says something of `online")
