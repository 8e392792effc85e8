"""What the manifest of an artifact says against it: both ways into transformers tell it in the same words."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import w4pack  # noqa: E402
from runtime import quarot_models as models  # noqa: E402
from runtime.ways import WAYS  # noqa: E402
from w4pack.convert import check  # noqa: E402
from w4pack.convert.errors import W4PackError  # noqa: E402
from w4pack.kernels.artifact import open_artifact  # noqa: E402

SMALL = {"num_hidden_layers": 1}
Change = Callable[[dict[str, Any], dict[str, Any]], object]  # of manifest, quantization_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    w4pack.register()
    return models.artifact("llama", tmp_path_factory.mktemp("told"), offset=1.0, **SMALL)


def one_gone(manifest: dict[str, Any], block: dict[str, Any]) -> None:
    """Take a transform from the config that the manifest tells of."""
    record = next(r for r in block["online"] if r["kind"] == "hadamard")
    manifest["rotation"] = {"online": [record]}
    block["online"] = [r for r in block["online"] if r is not record]


LOST: dict[str, tuple[Change, str]] = {  # what, code
    "records": (lambda m, q: (m["options"].update(rotate="full"), q.pop("online")), "artifact-online"),
    "records, told by their digest": (
        lambda m, q: (m["quantization"].update(online="0" * 64), q.update(online=[])),
        "artifact-online",
    ),
    "one record": (one_gone, "artifact-online-changed"),
    "transforms of the manifest": (lambda m, q: m.update(rotation={"online": [{"kind": "x"}]}), "manifest"),
    "the form of the manifest": (lambda m, q: m.update(files=None), "manifest"),
    "the version of the manifest": (lambda m, q: m.update(schema=7), "manifest-version"),
}


def changed(folder: Path, to: Path, change: Change) -> Path:
    """Copy an artifact and change what its manifest and its config say."""
    copy = Path(shutil.copytree(folder, to / "copy"))
    manifest, config = (json.loads((copy / name).read_text()) for name in ("w4pack.json", "config.json"))
    change(manifest, config["quantization_config"])
    (copy / "w4pack.json").write_text(json.dumps(manifest))
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def test_check_says_of_vllm_what_its_plugin_says(folder: Path, tmp_path: Path) -> None:
    copy = changed(folder, tmp_path, LOST["records"][0])
    with pytest.raises(W4PackError) as caught:
        open_artifact(copy)
    assert caught.value.code == "artifact-online"
    (answer,) = check(copy, engines=["vllm"])
    assert not answer["ok"]
    assert "vllm.plugin-online" in {b["rule"] for b in answer["results"][0]["blockers"]}


@pytest.mark.parametrize("what", LOST)
def test_a_loss_is_told_alike(what: str, folder: Path, tmp_path: Path) -> None:
    """The guides of keys, which no model has a place for without records, are not what is told."""
    change, code = LOST[what]
    copy = changed(folder, tmp_path, change)
    errors = []
    for way in WAYS.values():
        with pytest.raises(W4PackError) as caught:
            way(copy)
        errors.append(caught.value.to_json())
    assert errors[0] == errors[1] and errors[0]["code"] == code
    assert "w4pack.json" in json.dumps(errors[0])
