"""A manifest that was damaged: every command and loader refuses it, all in the same words."""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from artifacts import relabel

from runner import run
from w4pack.convert import convert
from w4pack.convert.errors import W4PackError
from w4pack.convert.files import described
from w4pack.kernels.artifact import open_artifact

DEMO = Path(__file__).parents[2] / "examples" / "demo-gptq"
NAME = "model.layers.0.mlp.down_proj"
TENSOR = f"tensors.{NAME}.weight"
Change = Callable[[dict[str, Any]], object]
GONE = object()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("manifests") / "out"
    convert(DEMO, out)
    return out


@pytest.fixture
def art(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "art"))


def members(path: str) -> list[str]:
    """Split the path of a member; names of layers and files have dots of their own."""
    for name in (f"{NAME}.weight", NAME, "config.json"):
        path = path.replace(name, name.replace(".", "\0"))
    return [part.replace("\0", ".") for part in path.split(".")]


def put(folder: Path, path: str, value: Any) -> None:
    """Set one member of the manifest, or take it away."""
    file = folder / "w4pack.json"
    manifest = json.loads(file.read_text())
    *above, last = members(path)
    holder = manifest
    for key in above:
        holder = holder.setdefault(key, {})
    if value is GONE:
        del holder[last]
    else:
        holder[last] = value
    file.write_text(json.dumps(manifest))


def told(folder: Path, out: Path) -> dict[str, dict[str, Any]]:
    """Return what each command and the loader end with."""
    commands: dict[str, tuple[Any, ...]] = {
        "verify": ("verify", folder),
        "check": ("check", folder, "--engine", "vllm"),
        "unpack": ("unpack", folder, out),
        "convert": ("convert", folder, out, "--to", "dense"),
    }
    found = {name: json.loads(run(*words, "--json").out.splitlines()[-1]) for name, words in commands.items()}
    (problem,) = run("inspect", folder, "--json").expect(0).data["problems"]
    found["inspect"] = problem
    with pytest.raises(W4PackError) as caught:
        open_artifact(folder)
    found["load"] = caught.value.to_json()
    assert not out.exists()
    return found


FORMS: dict[str, tuple[Any, str, str]] = {  # member -> value, what is expected, what is found
    "schema": (GONE, "a whole number", "nothing"),
    "schema ": (1.0, "a whole number", "1.0"),
    "tool.format": (True, "a whole number", "true"),
    "target": (None, "text", "null"),
    "options": ([], "an object", "[]"),
    "options.quantize": (5, "an object", "5"),
    "options.rotate": (False, "text", "false"),
    "lossless": (1, "true or false", "1"),
    "source": (GONE, "an object", "nothing"),
    "source.files": ({}, "a list of objects", "{}"),
    "source.origin": ("x", "an object", '"x"'),
    "files": (None, "an object", "null"),
    "files.config.json": (GONE, "a sha256: 64 hexadecimal digits", "nothing"),
    "files.config.json ": ("abc", "a sha256: 64 hexadecimal digits", '"abc"'),
    "config": ([1], "an object", "[1]"),
    "tensors": (None, "an entry for each tensor", "null"),
    "tensors ": ({}, "an entry for each tensor", "{}"),
    TENSOR: ([], "an object", "[]"),
    f"{TENSOR}.dtype": (GONE, "text", "nothing"),
    f"{TENSOR}.shape": ([16, -1], "a list of sizes", "[16, -1]"),
    f"{TENSOR}.shape ": ([True, 2], "a list of sizes", "[true, 2]"),
    f"{TENSOR}.sha256": ("0" * 63, "a sha256: 64 hexadecimal digits", f'"{"0" * 63}"'),
    f"{TENSOR}.sample": (7, "text", "7"),
    "layers": ("x" * 200, "an object", '"' + "x" * 76 + "..."),
    f"layers.{NAME}": (None, "an object", "null"),
    "quantization": ([], "an object", "[]"),
    "rotation.online": ({}, "a list of objects", "{}"),
    "unpack": (None, "an object", "null"),
    "unpack.configs": (["x"], "an object", '["x"]'),
    f"unpack.layers.{NAME}": (list(range(99)), "an object", "a list"),
}


@pytest.mark.parametrize("member", FORMS)
def test_a_member_of_another_type_is_named_alike(member: str, art: Path, tmp_path: Path) -> None:
    value, expected, found = FORMS[member]
    put(art, member.strip(), value)
    where = f"{art}/w4pack.json: {member.strip()}"
    for command, error in told(art, tmp_path / "out").items():
        assert (error["code"], error["exit"], error["what"]) == ("manifest", 1, "the manifest is damaged")
        assert (error["where"], error["expected"], error["found"]) == (where, expected, found), command
        assert "from where the weights are from" in error["hint"]


ROTATIONS: dict[str, tuple[Any, str, str]] = {  # member below `rotation` -> records, expected, found
    "online.0": ([3], "an object", "3"),
    "online.0.kind": ([{}], "hadamard, act_quant, kv_quant", "nothing"),
    "online.0.site": ([{"kind": "hadamard", "site": "hall"}], "residual_read, qk, attn_out, mlp_mid", "hall"),
}


@pytest.mark.parametrize("member", ROTATIONS)
def test_transforms_that_are_none_are_named_alike(member: str, art: Path, tmp_path: Path) -> None:
    records, expected, found = ROTATIONS[member]
    put(art, "rotation", {"online": records})
    for command, error in told(art, tmp_path / "out").items():
        assert (error["code"], error["exit"]) == ("manifest", 1), command
        assert error["where"] == f"{art}/w4pack.json: rotation.{member}"
        assert (error["expected"], error["found"]) == (expected, found), command


FILES = {
    "empty": (b"", "line 1, column 1: Expecting value"),
    "a list": (b"[]", "[]"),
    "cut": (b'{"schema": 1,\n "tool"', "line 2, column 8: Expecting ':' delimiter"),
    "another encoding": ('{"schema": 1}'.encode("utf-16"), "no UTF-8 at byte 0"),
    "deep": (b"[" * 100_000, "values nested too deep"),
    "digits": (b'{"schema": ' + b"9" * 5000 + b"}", "a number of thousands of digits"),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_file_that_is_no_manifest_is_told_alike(kind: str, art: Path, tmp_path: Path) -> None:
    content, found = FILES[kind]
    (art / "w4pack.json").write_bytes(content)
    for command, error in told(art, tmp_path / "out").items():
        assert (error["code"], error["exit"], error["what"]) == ("manifest", 1, "the manifest cannot be read")
        assert (error["where"], error["found"]) == (f"{art}/w4pack.json", found), command


def test_a_member_given_twice_is_named_alike(art: Path, tmp_path: Path) -> None:
    """A second `tensors` would hide the first from some readers, and be hidden by it from others."""
    path = art / "w4pack.json"
    path.write_text(path.read_text().replace('"lossless": true', '"lossless": true, "lossless": false'))
    for command, error in told(art, tmp_path / "out").items():
        assert (error["code"], error["where"]) == ("manifest", f"{path}: lossless"), command
        assert (error["expected"], error["found"]) == ("one member of this name", "2")


@pytest.mark.parametrize("member", ["schema", "tool.format"])
def test_another_version_is_refused_alike(member: str, art: Path, tmp_path: Path) -> None:
    """Before anything else: of another version no other member means what it means here."""
    put(art, "tensors", "elsewhere")
    put(art, "tool.version", "9.9")
    put(art, member, 2)
    for command, error in told(art, tmp_path / "out").items():
        assert (error["code"], error["exit"]) == ("manifest-version", 3), command
        assert error["where"] == f"{art}/w4pack.json: {member}"
        assert (error["expected"], error["found"]) == ("1", "2, written by w4pack 9.9")
        assert error["hint"] == "use the version of w4pack that wrote it, or a later one"


def test_the_folder_is_named_as_it_was_given(
    art: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(art, "schema", 2)
    monkeypatch.chdir(tmp_path)
    for command in (("verify", "art"), ("check", "art"), ("unpack", "art", "out"), ("convert", "art", "out")):
        assert run(*command, "--json").expect(3).error["where"] == "art/w4pack.json: schema"


def test_members_that_are_not_known_are_left_alone(art: Path) -> None:
    put(art, "more", {"of": "a later version"})
    put(art, f"{TENSOR}.crc", 5)
    run("verify", art).expect(0)
    open_artifact(art)


def test_a_manifest_of_a_portable_output_is_no_matter_of_engines(tmp_path: Path) -> None:
    out = tmp_path / "gptq"
    run("convert", DEMO, out, "--to", "gptq", "--regroup", "-q").expect(0)
    put(out, "tensors", None)
    run("check", out, "--engine", "vllm").expect(0)
    assert [p["code"] for p in run("inspect", out, "--json").expect(0).data["problems"]] == ["manifest"]
    run("convert", out, tmp_path / "back", "--to", "dense").expect(1, "the manifest is damaged")


def test_a_portable_output_without_a_config_is_still_inspected(tmp_path: Path) -> None:
    out = tmp_path / "gptq"
    run("convert", DEMO, out, "--to", "gptq", "--regroup", "-q").expect(0)
    (out / "config.json").unlink()
    run("inspect", out).expect(0)


# ---- warnings of check, as loaders and eval give them ------------------------------------------------------


def warned(folder: Path, *more: str) -> list[tuple[str, str]]:
    """Return (code, found) of the warnings of `check`, which are those of `inspect`, and are printed too."""
    done = run("check", folder, "--json", *more).data
    answers = done.get("engines", [done])
    found = answers[0]["warnings"]
    assert all(answer["warnings"] == found for answer in answers)
    assert run("inspect", folder, "--json").expect(0).data["warnings"] == found
    text = run("check", folder, *more).err
    assert all(f"warning: {w['text']}" in text for w in found)
    return [(w["code"], w["found"]) for w in found]


def test_check_says_that_there_is_no_manifest(art: Path) -> None:
    assert warned(art) == []
    (art / "w4pack.json").unlink()
    assert warned(art) == [("no-manifest", "none")] == warned(art, "--engine", "w4pack")


def test_convert_says_what_nothing_proves(art: Path, tmp_path: Path) -> None:
    def codes(*more: str) -> list[str]:
        done = run("convert", art, tmp_path / "out", "--to", "dense", "--overwrite", "--json", *more).expect(
            0
        )
        return [event["code"] for event in done.events if event["event"] == "warning"]

    before = codes()
    path = art / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_theta": 5.5}))
    assert codes() == ["file-edited", *before] == codes("--dry-run")
    (art / "w4pack.json").unlink()
    assert codes() == ["no-manifest", *before]


def test_check_says_which_settings_were_edited(art: Path) -> None:
    path = art / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"rope_theta": 5.5, "extra": 1, "rms_norm_eps": 0.5}))
    found = "others of rms_norm_eps, rope_theta, extra, which are taken as they are"
    assert warned(art) == [("file-edited", found)]


def test_settings_that_are_only_written_otherwise_are_not_edited(art: Path) -> None:
    path = art / "config.json"
    config = json.loads(path.read_text(), parse_int=float)  # 4 becomes 4.0
    block = json.loads(path.read_text())["quantization_config"]  # which is read to the letter
    idle = {"eos_token_id": [1, 2], "transformers_version": "9", "_name_or_path": "here", "use_cache": False}
    config = {**config, **idle, "quantization_config": block}
    path.write_text(json.dumps(dict(reversed(config.items())), indent=7))
    assert warned(art) == []
    run("verify", art).expect(4)  # the bytes are others all the same


def test_a_manifest_without_digests_of_settings_tells_by_the_file(art: Path) -> None:
    put(art, "config", GONE)
    path = art / "config.json"
    assert warned(art) == []
    path.write_text(path.read_text() + "\n")
    assert warned(art) == [("file-edited", "another, which is taken as it is")]


def test_digests_of_settings_stay_what_they_are(art: Path) -> None:
    """Artifacts hold them."""
    config = json.loads((art / "config.json").read_text())
    written = json.loads((art / "w4pack.json").read_text())["config"]
    assert written.keys() == config.keys()
    assert written["hidden_act"] == hashlib.sha256(b'"silu"').hexdigest()[:16]
    assert written["architectures"] == hashlib.sha256(b'["LlamaForCausalLM"]').hexdigest()[:16]


def test_tensors_without_a_record_and_records_without_a_tensor_are_told(art: Path) -> None:
    manifest = json.loads((art / "w4pack.json").read_text())
    entry = copy.deepcopy(manifest["tensors"]["model.norm.weight"])
    put(art, TENSOR, GONE)
    put(art, "tensors.other", entry)
    assert [code for code, _ in warned(art)] == ["tensor-unlisted", "tensor-gone"]


def test_tables_that_models_compute_need_no_record() -> None:
    table = "model.layers.0.self_attn.rotary_emb.inv_freq"
    assert described.unmatched({"a", table}, {"tensors": {"a": {}}}, "folder") == ()
    (told,) = described.unmatched({"a", "b"}, {"tensors": {"a": {}}}, "folder")
    assert (told.code, told.where) == ("tensor-unlisted", "b")


def test_check_ends_with_an_error_where_headers_are_others(art: Path) -> None:
    """Nothing is judged of numbers that mean something else: no results, and the loader's exit code."""
    relabel(art, {"model.norm.weight": {"dtype": "BF16"}})
    error = run("check", art, "--json").expect(4).error
    assert (error["event"], error["code"]) == ("error", "tensor-relabelled") and "results" not in error
    (problem,) = run("inspect", art, "--json").expect(0).data["problems"]
    assert {"schema": 1, **problem} == error
    page = (DEMO.parents[1] / "docs" / "reference" / "exit-codes.md").read_text()
    (row,) = [line for line in page.splitlines() if line.startswith("| 4 |")]
    assert "`check`" in row


# ---- the way back ------------------------------------------------------------------------------------------


WAYS_BACK: dict[str, tuple[str, Any, str, str]] = {  # member, value, expected, found
    "no config": ("unpack.configs", {}, "a file with the sha256", "no such file"),
    "another config": ("unpack.configs", {"config.json": "{}"}, "a file with the sha256", "a file with the"),
    "scheme": (f"unpack.layers.{NAME}.scheme", 5, "an object", "a whole number"),
    "rows": (f"unpack.layers.{NAME}.rows", "upside down", "one of natural, sorted", "'upside down'"),
    "codes": (f"unpack.layers.{NAME}.codes", None, "an object", "null"),
    "dense": ("unpack.dense", [{}], "the members source, name, shape", "none"),
}


@pytest.mark.parametrize("kind", WAYS_BACK)
def test_records_of_the_way_back_are_refused_in_plain_words(kind: str, art: Path, tmp_path: Path) -> None:
    member, value, expected, found = WAYS_BACK[kind]
    put(art, member, value)
    error = run("unpack", art, tmp_path / "out", "--json").expect(1).error
    assert (error["code"], error["what"]) == ("manifest", "the manifest does not fit the artifact")
    assert error["where"].startswith(f"w4pack.json: {member}")
    assert error["expected"].startswith(expected) and error["found"].startswith(found)


def test_an_artifact_without_its_way_back_is_damaged(art: Path, tmp_path: Path) -> None:
    put(art, "unpack", GONE)
    error = run("unpack", art, tmp_path / "out", "--json").expect(1).error
    assert (error["what"], error["where"]) == ("the manifest is damaged", f"{art}/w4pack.json: unpack")


def test_the_way_back_of_a_copy_is_that_of_its_source(made: Path, tmp_path: Path) -> None:
    run("convert", made, tmp_path / "copy", "-q").expect(0)
    run("unpack", tmp_path / "copy", tmp_path / "back", "-q").expect(0)
    assert (tmp_path / "back" / "config.json").read_bytes() == (DEMO / "config.json").read_bytes()
