"""Headers that give a tensor another dtype or shape than was written: right bytes that mean other numbers."""

import json
from pathlib import Path
from typing import Any

import pytest
from artifacts import quant_block, relabel, write_artifact

from w4pack.convert.errors import SourceError, VerifyError
from w4pack.kernels.artifact import open_artifact
from w4pack.kernels.spec import LinearSpec

SPECS = {"a": LinearSpec(128, 64, group_size=32, bias=True)}
DENSE = {"model.norm.weight": ("F16", (64,)), "table": ("F32", (2, 8))}


@pytest.fixture
def made(tmp_path: Path) -> Path:
    write_artifact(tmp_path, SPECS, dense=DENSE)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "header", "written"),
    [
        ("a.weight_scale", {"dtype": "BF16"}, "F16 [4, 64]"),
        ("a.bias", {"dtype": "BF16"}, "F16 [64]"),
        ("model.norm.weight", {"dtype": "BF16"}, "F16 [64]"),
        ("model.norm.weight", {"dtype": "I16"}, "F16 [64]"),
        ("table", {"dtype": "F64", "shape": [8]}, "F32 [2, 8]"),
        ("table", {"shape": [8, 2]}, "F32 [2, 8]"),
        ("table", {"shape": [16]}, "F32 [2, 8]"),
    ],
)
def test_a_tensor_that_was_relabelled_is_named(
    name: str, header: dict[str, Any], written: str, made: Path
) -> None:
    open_artifact(made)
    relabel(made, {name: header})
    with pytest.raises(VerifyError) as caught:
        open_artifact(made)
    told = caught.value
    assert (told.code, told.where) == ("tensor-relabelled", f"model.safetensors, {name}")
    assert told.expected == f"{written}, as w4pack.json says" and told.found != written
    assert told.hint is not None and told.hint.startswith(f"w4pack verify {made}")


def test_all_of_them_are_named_at_once(made: Path) -> None:
    relabel(made, {"a.weight_scale": {"dtype": "BF16"}, "table": {"shape": [16]}})
    with pytest.raises(VerifyError) as caught:
        open_artifact(made)
    assert len(caught.value.problems) == 2


def test_what_no_artifact_may_have_is_said_first(made: Path) -> None:
    """A scale in fp32 is no relabelled one: no kernel takes it, whatever was written."""
    relabel(made, {"a.weight_scale": {"dtype": "F32", "shape": [2, 64]}})
    with pytest.raises(SourceError) as caught:
        open_artifact(made)
    assert caught.value.code == "tensor-mismatch"


def manifest(folder: Path, edit: Any) -> None:
    path = folder / "w4pack.json"
    value = json.loads(path.read_text())
    path.write_text(json.dumps(edit(value)))


@pytest.mark.parametrize("key", ["dtype", "shape", "sha256"])
def test_a_manifest_that_does_not_tell_is_an_error(key: str, made: Path) -> None:
    def edit(value: dict[str, Any]) -> dict[str, Any]:
        del value["tensors"]["table"][key]
        return value

    manifest(made, edit)
    with pytest.raises(SourceError) as caught:
        open_artifact(made)
    assert caught.value.where == f"{made / 'w4pack.json'}: tensors.table.{key}"


def test_tensors_that_only_one_of_them_knows_are_left_to_the_model(made: Path) -> None:
    manifest(made, lambda v: {**v, "tensors": {**v["tensors"], "gone": v["tensors"].pop("table")}})
    open_artifact(made)


@pytest.mark.parametrize("tensors", [[], {}, None, {"table": None}, {"table": 3}])
def test_a_manifest_of_another_form_is_an_error(tensors: Any, made: Path) -> None:
    manifest(made, lambda v: {**v, "tensors": tensors})
    with pytest.raises(SourceError) as caught:
        open_artifact(made)
    where = "tensors.table" if tensors and "table" in tensors else "tensors"
    assert (caught.value.code, caught.value.where) == ("manifest", f"{made / 'w4pack.json'}: {where}")


def test_a_weight_that_lies_the_other_way_round_is_told_by_the_size_it_must_have(tmp_path: Path) -> None:
    """Sizes of a module that the config does not list are those of its weight."""
    folder = tmp_path / "turned"
    write_artifact(folder, {"a": LinearSpec(64, 128, group_size=32)}, quant=quant_block({}, group_size=32))
    relabel(folder, {"a.weight": {"shape": [256, 4]}})  # as if of 4096 x 2
    with pytest.raises(SourceError) as caught:
        open_artifact(folder)
    told = next(p for p in (caught.value, *caught.value.problems) if p.where == "a")
    assert (told.expected, told.found) == ("4096 x 64: 4096 x 2, each rounded up to 64", "4096 x 2")
