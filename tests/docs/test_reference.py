"""The reference pages name what programs rely on: JSON keys, exit codes, functions and their keywords."""

import importlib
import inspect as python_inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import w4pack.convert as api
from w4pack.convert import errors
from w4pack.convert.planning.options import ConvertOptions

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "examples" / "demo-gptq"
REFERENCE = ROOT / "docs" / "reference"


def section(page: str, head: str) -> str:
    text = (REFERENCE / page).read_text(encoding="utf-8")
    assert f"## {head}\n" in text
    return text.partition(f"## {head}\n")[2].partition("\n## ")[0]


def printed(*words: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "w4pack", *words, "--json"], capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    return [json.loads(line) for line in done.stdout.splitlines()]


def missing(text: str, keys: set[str]) -> set[str]:
    return {key for key in keys if f"`{key}`" not in text}


def test_keys_of_inspect() -> None:
    value = api.inspect(DEMO)
    text = section("json.md", "inspect")
    assert missing(text, {*value, *value["layers"][0], *value["other"][0]}) == set()


def test_keys_of_check() -> None:
    (vllm,), (both,) = (
        printed("check", str(DEMO), "--engine", "vllm"),
        printed("check", str(DEMO), "--engine", "vllm", "--engine", "sglang"),
    )
    result = vllm["results"][0]
    keys = {*vllm, *both, *result, *result["blockers"][0]}
    assert missing(section("json.md", "check"), keys) == set()


def test_keys_of_verify_and_its_kinds(tmp_path: Path) -> None:
    api.convert(DEMO, tmp_path / "out")
    value = api.verify(tmp_path / "out", against=DEMO)
    text = section("json.md", "verify")
    assert missing(text, {*value, "tensor", "kind", "expected", "found"}) == set()
    source = (ROOT / "convert" / "jobs" / "verify.py").read_text(encoding="utf-8")
    kinds = set(re.findall(r'Failure\(\s*[^,()]+,\s*"(\w+)"', source)) | set(
        re.findall(r'_same_bits\([^,]+, "(\w+)"', source)
    )
    assert len(kinds) > 6
    assert missing(text, kinds) == set()


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_keys_of_the_events(dry: tuple[str, ...], tmp_path: Path) -> None:
    events = printed("convert", str(DEMO), str(tmp_path / "out"), "--to", "gptq", "--regroup", *dry)
    assert events[-1]["event"] == "done"
    text = section("json.md", "convert")
    for event in events:
        assert missing(text, {event["event"], *event} - {"schema", "event"}) == set(), event["event"]


def test_keys_of_an_error(tmp_path: Path) -> None:
    (event,) = printed("convert", str(DEMO), str(tmp_path / "out"), "--to", "awq")
    assert missing(section("json.md", "error"), set(event) - {"schema"}) == set()


def test_every_exit_code_has_a_row() -> None:
    text = (REFERENCE / "exit-codes.md").read_text(encoding="utf-8")
    codes = {value for name, value in vars(errors).items() if name.startswith("EXIT_")}
    assert codes == {int(code) for code in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)}


@pytest.mark.parametrize("name", ["convert", "inspect", "check", "verify", "unpack", "push"])
def test_every_keyword_of_a_function_is_named(name: str) -> None:
    text = (REFERENCE / "python.md").read_text(encoding="utf-8")
    (row,) = re.findall(rf"^\| `{name}\(.*$", text, re.MULTILINE)
    parameters = python_inspect.signature(getattr(api, name)).parameters.values()
    keywords = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} | (
        {"where", "running"} & set(python_inspect.signature(getattr(api, name)).parameters)
    )
    assert missing(row, keywords) == set()
    if name == "convert":
        assert missing(row, set(ConvertOptions.__dataclass_fields__)) == set()


def test_the_example_of_the_python_page_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (REFERENCE / "python.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, "python.md", "exec"), names)
    names["build"](str(DEMO), tmp_path)
    assert capsys.readouterr().out.startswith("gptq\nTrue ")
    assert (tmp_path / "back" / "config.json").is_file()


def test_the_names_of_the_python_page_can_be_imported() -> None:
    text = (REFERENCE / "python.md").read_text(encoding="utf-8")
    found = re.findall(r"`(w4pack(?:\.\w+)+)\.(\w+)\(([\w, ]+)\)`", text)
    assert len(found) == 2
    for module, name, fields in found:
        value = getattr(importlib.import_module(module), name)
        assert set(fields.split(", ")) == set(value.__dataclass_fields__)
