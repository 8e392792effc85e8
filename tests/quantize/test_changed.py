"""An artifact that was changed since it was written: every command that reads it says so."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from artifacts import relabel
from safetensors.torch import load_file, save_file

from quantize import sources
from quantize.test_outputs import quantize
from runner import Run, run
from w4pack.convert.errors import SourceError, VerifyError
from w4pack.kernels import hashes
from w4pack.kernels.artifact import open_artifact

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
    assert "the records that w4pack.json tells of" in checked(copy)
    edited, told = run("inspect", copy, "--json").expect(0).data["warnings"]
    assert edited["found"] == "others of quantization_config, which are taken as they are"
    assert "the records that w4pack.json tells of" in told["expected"]
    (copy / "w4pack.json").unlink()
    assert GUIDE in measured(copy, book).expect(3).error["expected"]
    assert GUIDE in checked(copy)


@pytest.mark.parametrize(
    "content", ["", "[]", "{", '{"options": ', '{"options": 5}', '{"options": {"quantize": 5}}']
)
def test_a_manifest_that_tells_nothing_is_refused(content: str, copy: Path, book: Path) -> None:
    edit(copy, lambda q: q.pop("online"))
    (copy / "w4pack.json").write_text(content)
    error = run("check", copy, "--engine", "w4pack", "--json").expect(1).error
    what = "the manifest is damaged" if content.endswith("}") else "the manifest cannot be read"
    assert (error["code"], error["what"]) == ("manifest", what)
    assert measured(copy, book).expect(1).error == error


def test_a_stray_guide_is_told(copy: Path, book: Path) -> None:
    edit(copy, lambda q: [record.pop("guide", None) for record in q["online"]])
    assert measured(copy, book).expect(4).error["code"] == "artifact-online-changed"
    assert "as w4pack.json says" in checked(copy)
    (copy / "w4pack.json").unlink()
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


@pytest.mark.parametrize("odd", [[], 5, None, {}])
def test_a_manifest_whose_samples_are_no_text_is_refused(odd: Any, copy: Path, book: Path) -> None:
    path = copy / "w4pack.json"
    value = json.loads(path.read_text())
    value["tensors"]["model.norm.weight"]["sample"] = odd
    path.write_text(json.dumps(value))
    error = measured(copy, book).expect(1).error
    assert error["where"] == f"{path}: tensors.model.norm.weight.sample" and error["expected"] == "text"


@pytest.mark.parametrize(
    "online", [5, "x", [5], {"kind": "hadamard"}, [{"site": "attn_out", "order": "x"}], None]
)
def test_records_that_nobody_knows_are_refused_by_every_command(online: Any, copy: Path, book: Path) -> None:
    edit(copy, lambda q: q.update(online=online))
    for done in (run("inspect", copy, "--json"), run("check", copy, "--json"), measured(copy, book)):
        error = json.loads(done.expect(3).out)
        assert error["code"] == "artifact-unknown"
        assert error["what"].startswith("the artifact's config says something of `online")


@pytest.fixture(scope="module")
def rotated(book: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("changed") / "rotated"
    source = sources.save(sources.llama(hidden_size=128, head_dim=64), out.with_name("source"))
    quantize(source, out, "--rotate", "full", "--act-bits", 4, "--kv-bits", 4, text=book).expect(0)
    return out


def without(kind: str, site: str | None) -> Change:
    def change(block: dict[str, Any]) -> None:
        left = [r for r in block["online"] if (r["kind"], r.get("site")) != (kind, site)]
        assert len(left) == len(block["online"]) - 1
        block["online"] = left

    return change


def bent(kind: str, **values: Any) -> Change:
    def change(block: dict[str, Any]) -> None:
        next(record for record in block["online"] if record["kind"] == kind).update(values)

    return change


BENT = {
    **{f"no {site}": without("hadamard", site) for site in ("attn_out", "mlp_mid", "qk")},
    **{f"no act {site}": without("act_quant", site) for site in ("attn_in", "mlp_mid")},
    "smaller blocks": bent("hadamard", block=16, factors=[[16, "sylvester"]]),
    "other bits": bent("act_quant", bits=8),
    "other ratio": bent("act_quant", clip={"4": 0.5, "8": 1.0}),
    "other bits of the cache": bent("kv_quant", bits={"k": 8, "v": 8}),
}


@pytest.mark.parametrize("change", BENT.values(), ids=BENT)
def test_one_record_that_is_gone_or_bent_is_told(
    change: Change, rotated: Path, tmp_path: Path, book: Path
) -> None:
    copy = Path(shutil.copytree(rotated, tmp_path / "copy"))
    edit(copy, change)
    error = measured(copy, book).expect(4).error
    assert error["code"] == "artifact-online-changed" and "as w4pack.json says" in error["expected"]
    assert "as w4pack.json says" in checked(copy)
    assert "as w4pack.json says" in json.dumps(run("inspect", copy, "--json").expect(0).data["warnings"])
    assert run("convert", copy, tmp_path / "out", "--to", "dense", "--json").expect(4).error == error
    with pytest.raises(VerifyError, match="not the one that was written"):
        hashes.check_samples(open_artifact(copy, online=True))


def test_records_written_with_other_spaces_and_numbers_are_the_same(
    rotated: Path, tmp_path: Path, book: Path
) -> None:
    copy = Path(shutil.copytree(rotated, tmp_path / "copy"))
    path = copy / "config.json"
    config = json.loads(path.read_text(), parse_float=lambda text: float(text) if float(text) % 1 else 1)
    config["eos_token_id"] = 3
    path.write_text(json.dumps(config, sort_keys=True))
    measured(copy, book).expect(0)
    assert run("check", copy, "--engine", "w4pack", "--json").expect(0).data["ok"]
    hashes.check_samples(open_artifact(copy, online=True))


@pytest.mark.parametrize("whole", [False, True], ids=["records", "block"])
@pytest.mark.parametrize("target", ["dense", "gptq", "awq", "compressed-tensors", "marlin"])
def test_an_artifact_without_its_records_is_not_converted(
    target: str, whole: bool, rotated: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(rotated, tmp_path / "copy"))
    path = copy / "config.json"
    config = json.loads(path.read_text())
    if whole:
        del config["quantization_config"]
    else:
        del config["quantization_config"]["online"]
    path.write_text(json.dumps(config))
    error = run("convert", copy, tmp_path / "out", "--to", target, "--json").expect(1).error
    assert error["code"] == "artifact-online" and not (tmp_path / "out").exists()


def test_what_was_changed_without_a_trace_elsewhere_is_a_warning(copy: Path, book: Path) -> None:
    before = measured(copy, book).expect(0).data["warnings"]
    path = copy / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] += 1
    save_file(tensors, path, metadata={"format": "pt"})
    path = copy / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rms_norm_eps": 1e-4}))
    told = measured(copy, book).expect(0).data["warnings"]
    wanted = [("file-edited", str(path)), ("tensor-changed", "model.norm.weight")]
    assert [(w["code"], w["where"]) for w in told if w not in before] == wanted
    (copy / "w4pack.json").unlink()
    told = measured(copy, book).expect(0).data["warnings"]
    assert [(w["code"], w["where"]) for w in told if w not in before] == [("no-manifest", str(copy))]


def test_a_tensor_that_was_relabelled_is_told(copy: Path, book: Path) -> None:
    header = open_artifact(copy, online=True).tensors["model.norm.weight"]
    relabel(copy, {header.name: {"dtype": {"F16": "BF16", "BF16": "F16"}[header.dtype]}})
    error = measured(copy, book).expect(4).error
    assert (error["code"], error["where"]) == ("tensor-relabelled", f"{header.file}, {header.name}")
    for engine in ("w4pack", "vllm"):
        assert run("check", copy, "--engine", engine, "--json").expect(4).error == error
    assert run("generate", copy, "a", "--json").expect(4).error == error


@pytest.mark.parametrize("content", ["[]", "{", {"tensors": []}, {"tensors": None}, {"tensors": {"a": None}}])
def test_a_manifest_that_the_loader_cannot_read_is_refused_by_eval(
    content: Any, copy: Path, book: Path
) -> None:
    path = copy / "w4pack.json"
    whole = json.loads(path.read_text())
    path.write_text(content if isinstance(content, str) else json.dumps({**whole, **content}))
    error = measured(copy, book).expect(1).error
    assert error["code"] == "manifest"
    with pytest.raises(SourceError) as caught:
        open_artifact(copy, online=True)
    own = caught.value
    assert (own.what, own.where, own.expected, own.found) == tuple(
        error[part] for part in ("what", "where", "expected", "found")
    )


@pytest.mark.parametrize("report", [5, None, [], {"calibration": 5}, {"calibration": {"sketch": 5}}])
def test_a_report_of_another_shape_is_refused(report: Any, copy: Path, book: Path) -> None:
    path = copy / "w4pack.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization": report}))
    error = measured(copy, book).expect(1).error
    assert error["code"] == "manifest" and error["where"].startswith(f"{path}: quantization")


def with_guides(folder: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file({n: change(t) if n.endswith(".k_guide") else t for n, t in tensors.items()}, path)


def test_guides_that_no_calibration_finds_are_not_measured(copy: Path, book: Path) -> None:
    with_guides(copy, lambda guide: guide * float("nan"))
    error = measured(copy, book).expect(3).error
    assert error["code"] == "artifact-online" and error["found"] == "nan" and error["where"] == GUIDE
    measured(copy, book, "--kv-bits", 16).expect(0)


def test_guides_of_another_dtype_are_told_each_by_its_name(copy: Path, book: Path) -> None:
    with_guides(copy, lambda guide: guide.to(torch.int32))
    error = measured(copy, book).expect(3).error
    assert [p["found"] for p in error["problems"]] == ["I32", "I32"]
    assert all(p["where"].endswith(f".{n}.self_attn.k_guide") for n, p in enumerate(error["problems"]))
    assert run("check", copy, "--engine", "w4pack", "--json").expect(4).error["code"] == "tensor-relabelled"
    (copy / "w4pack.json").unlink()
    assert f"{GUIDE} F32" in checked(copy)


@pytest.mark.parametrize(
    ("key", "value"), [("architectures", None), ("num_attention_heads", 0), ("num_hidden_layers", 1)]
)
def test_a_config_of_another_model_is_told_with_a_way_on(
    key: str, value: Any, rotated: Path, tmp_path: Path, book: Path
) -> None:
    copy = Path(shutil.copytree(rotated, tmp_path / "copy"))
    path = copy / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    done = measured(copy, book)
    assert done.code in (1, 3) and "make it again from its source" in done.error["hint"]
    assert done.error["code"] != "no-tokenizer" and "make it again from its source" in checked(copy)
