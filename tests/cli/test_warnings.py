"""Every warning that the human form of a command prints stands in its JSON, in one structure."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

import builders as b
from runner import Run, run

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from quantize import sources  # noqa: E402
from w4pack import cli  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
FIELDS = {"code", "where", "expected", "found", "text"}
FEW = ("--samples", "2", "--seqlen", "80")  # tokens of a window: the model has 64 positions

# Command -> words, and codes that it must warn of; OUT is a folder that does not exist yet.
CASES: dict[str, tuple[tuple[str, ...], set[str]]] = {
    "inspect": (("LIES",), {"sym-flag"}),
    "check": (("LIES", "--engine", "vllm"), {"sym-flag"}),
    "check of all": (("LIES",), {"sym-flag"}),
    "convert": (("LIES", "OUT", "--regroup"), {"sym-flag", "no-effect"}),
    "convert --dry-run": (("LIES", "OUT", "--regroup", "--dry-run"), {"sym-flag", "no-effect"}),
    "convert --max-shard-size": (("LIES", "OUT", "--max-shard-size", "60GB"), {"sym-flag", "shard-size"}),
    "convert --quantize": (
        ("DENSE", "OUT", "--quantize", "gptq", "--calibration", "BOOK", *FEW, "--threads", "1"),
        {"windows-long"},
    ),
    "verify": (("PACKED", "--against", "LIES"), set()),
    "unpack": (("PACKED", "OUT"), set()),
    "eval": (("DENSE", "--text", "BOOK", "--windows", "1", "--seqlen", "80"), {"windows-long"}),
    "eval of what it knows": (
        ("MADE", "--text", "BOOK", "--windows", "9", "--seqlen", "80"),
        {"windows-long", "calibration-overlap"},
    ),
    "generate": (("MADE", "She", "--seed", "3", "--max-new-tokens", "99"), {"no-effect", "context-full"}),
}
ELSEWHERE = {"push": "tests/hub/test_commands.py", "bench": "it warns of nothing, and needs a card"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> dict[str, str]:
    """A label that lies of symmetry and what it becomes; a 16-bit model, its text and what it becomes."""
    root = tmp_path_factory.mktemp("warnings")
    config = b.llama_config(intermediate_size=256, num_key_value_heads=1, vocab_size=64)
    lies = b.write(root / "lies", b.model(1, config), b.gptq, b.gptq_config(sym=False))
    dense, book = (
        sources.save(sources.llama(max_position_embeddings=64), root / "dense"),
        sources.text(root / "book.txt"),
    )
    run("convert", lies, root / "packed", "-q").expect(0)
    words = ("--quantize", "gptq", "--calibration", book, *FEW, "--threads", 1, "--max-kl", 1000)
    run("convert", dense, root / "made", *words, "-q").expect(0)
    ends = root / "made" / "generation_config.json"
    ends.write_text(json.dumps(json.loads(ends.read_text()) | {"eos_token_id": None}))
    made = {"LIES": lies, "PACKED": root / "packed", "DENSE": dense, "BOOK": book, "MADE": root / "made"}
    return {name: str(path) for name, path in made.items()}


def in_json(done: Run) -> list[dict[str, Any]]:
    """Return the warnings of a job's lines, or of an answer or several."""
    events = done.events
    if "event" in events[-1]:
        return [event for event in events if event["event"] == "warning"]
    answers = [one for event in events for one in event.get("engines", [event])]
    return [w for answer in answers for w in answer.get("warnings", [])]


def in_text(done: Run) -> list[str]:
    return [line.removeprefix("warning: ") for line in done.err.splitlines() if line.startswith("warning: ")]


@pytest.mark.parametrize("case", CASES)
def test_the_json_form_warns_of_what_the_human_form_does(
    case: str, folders: dict[str, str], tmp_path: Path
) -> None:
    words, codes = CASES[case]
    name = case.partition(" ")[0]
    said, told = (
        run(name, *(str(tmp_path / form) if w == "OUT" else folders.get(w, w) for w in words), *options)
        for form, options in (("text", ()), ("json", ("--json",)))
    )
    assert said.code == told.code in (0, 3)
    warnings = in_json(told)
    assert {w["code"] for w in warnings} == codes
    assert {w["text"] for w in warnings} == set(in_text(said))
    assert all(w.keys() >= FIELDS for w in warnings)
    assert told.err == ""


def test_each_command_with_a_json_form_has_a_case() -> None:
    known = {case.partition(" ")[0] for case in CASES} | ELSEWHERE.keys()
    assert {
        name for name, command in cli.root.commands.items() if "as_json" in {p.name for p in command.params}
    } == known


def test_warnings_are_printed_where_all_of_them_go_through() -> None:
    """Whoever prints one by itself would forget the other form."""
    found = {
        file.relative_to(ROOT).as_posix()
        for room in ("convert", "kernels")
        for file in (ROOT / room).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value.startswith("warning:")
    }
    assert found == {"convert/console.py", "convert/events.py"}
