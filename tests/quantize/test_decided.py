"""What a run decides before its first step, the rotation gate and the schemes of `--bpw`, is decided once."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from quantize import sources
from quantize.test_outputs import FEW, tree
from quantize.test_signals import STOPPED
from runner import Run, command, run
from w4pack.convert.modeljobs import gate, prepared, quantizerun
from w4pack.convert.modeljobs.gate import GateReport

GPTQ = ("--rotate", "offline", "--quantize", "gptq", "--bpw", 5, *FEW)
RTN = ("--rotate", "offline", "--quantize", "rtn", "--bpw", 5, "--threads", 1)
KEPT = {"--bpw: as the earlier run chose", "the rotated model: as the earlier run held it against its source"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has linears of more than one group."""
    folder = tmp_path_factory.mktemp("decided") / "src"
    return sources.save(sources.llama(hidden_size=128, intermediate_size=256), folder)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the gate was run, and schemes chosen."""
    found: Counter[str] = Counter()
    for module, name in ((gate, "run_gate"), (prepared, "choose")):
        monkeypatch.setattr(module, name, partial(counted, found, name, getattr(module, name)))
    return found


def counted(found: Counter[str], name: str, function: Callable[..., Any], *args: Any) -> Any:
    found[name] += 1
    return function(*args)


def convert(source: Path, out: Path, *words: Any) -> Run:
    return run("convert", source, out, "--json", *words)


def stopped(source: Path, out: Path, *words: Any) -> Path:
    """Stop a run behind what it decides. Returns its journal."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantizerun.QuantizeRun, "run", stop)
        convert(source, out, *words).expect(130)
    return Path(f"{out}.w4pack-staging/journal.jsonl")


def notes(done: Run) -> set[str]:
    return {str(event["text"]) for event in done.events if event["event"] == "note"}


def gates(done: Run) -> list[dict[str, Any]]:
    return [event for event in done.events if event["event"] == "gate"]


def test_a_resumed_run_does_not_decide_again(
    source: Path, book: Path, tmp_path: Path, calls: Counter[str]
) -> None:
    words = (*GPTQ, "--calibration", book)
    whole = convert(source, tmp_path / "one", *words).expect(0)
    assert calls == {"run_gate": 1, "choose": 1} and not KEPT & notes(whole)
    original, done = quantizerun.ModelRun.quantize, []

    def dying(model: Any, index: int) -> Any:
        if done:
            raise KeyboardInterrupt
        done.append(index)
        return original(model, index)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantizerun.ModelRun, "quantize", dying)
        convert(source, tmp_path / "two", *words).expect(130)
    assert calls == {"run_gate": 2, "choose": 2}
    planned = convert(source, tmp_path / "two", *words, "--resume", "--dry-run").expect(0)
    resumed = convert(source, tmp_path / "two", *words, "--resume").expect(0)
    assert calls == {"run_gate": 2, "choose": 2}
    assert notes(planned) >= {"--bpw: as the earlier run chose"} and notes(resumed) >= KEPT
    assert planned.plan["digest"] == resumed.plan["digest"] == whole.plan["digest"]
    assert gates(resumed) == gates(whole)
    assert tree(tmp_path / "two") == tree(tmp_path / "one")


def test_a_run_that_ended_behind_its_decisions_keeps_them(
    source: Path, tmp_path: Path, calls: Counter[str]
) -> None:
    log = stopped(source, tmp_path / "out", *RTN)
    assert [next(iter(json.loads(line))) for line in log.read_text().splitlines()[1:]] == ["chosen", "gate"]
    error = convert(source, tmp_path / "out", *RTN).expect(1).error
    assert error["code"] == "unfinished"
    calls.clear()
    resumed = convert(source, tmp_path / "out", *RTN, "--resume").expect(0)
    assert not calls and notes(resumed) >= KEPT
    assert not any("nothing to resume" in text for text in notes(resumed))


def test_a_run_that_is_complete_is_found_so_without_deciding_again(
    source: Path, tmp_path: Path, calls: Counter[str]
) -> None:
    whole = convert(source, tmp_path / "out", *RTN).expect(0)
    before = tree(tmp_path / "out")
    calls.clear()
    planned = convert(source, tmp_path / "out", *RTN, "--resume", "--dry-run").expect(0)
    again = convert(source, tmp_path / "out", *RTN, "--resume").expect(0)
    assert not calls and again.events[-1]["resumed_complete"]
    assert planned.plan["digest"] == again.plan["digest"] == whole.plan["digest"]
    assert notes(again) >= {"--bpw: as the earlier run chose", *bits(whole)} and bits(again) == bits(whole)
    assert tree(tmp_path / "out") == before


def bits(done: Run) -> set[str]:
    return {text for text in notes(done) if text.startswith("--bpw:") and "x " in text}


@pytest.mark.parametrize("case", ["options", "source", "chosen", "layers", "form"])
def test_schemes_of_another_run_are_not_taken_from_its_output(
    case: str, source: Path, tmp_path: Path, calls: Counter[str]
) -> None:
    out, words = tmp_path / "out", list(RTN)
    convert(source, out, *words).expect(0)
    calls.clear()
    if case == "options":
        words[words.index("--bpw") + 1] = 6
    elif case == "source":
        source = shutil.copytree(source, tmp_path / "other")
        change = json.loads((source / "config.json").read_text()) | {"rms_norm_eps": 1e-3}
        (source / "config.json").write_text(json.dumps(change))
    else:
        path = out / "w4pack.json"
        value = json.loads(path.read_text())
        if case == "chosen":
            value["quantization"]["chosen"].popitem()
        elif case == "form":
            value["quantization"]["chosen"] = dict.fromkeys(value["quantization"]["chosen"], 5)
        else:
            next(iter(value["layers"].values()))["scheme"] = "4 bit g128 sym"
        path.write_text(json.dumps(value))
    before = tree(out)
    for dry in ((), ("--dry-run",)):
        error = convert(source, out, *words, "--resume", *dry).error
        assert error["code"] == ("resume-differs" if case == "source" else "output-exists")
    assert not calls and tree(out) == before
    convert(source, out, *words, "--resume", "--overwrite").expect(0)
    assert calls["choose"] == 1


@pytest.mark.parametrize(
    "options", [(), ("--dry-run",), ("--resume",), ("--resume", "--dry-run"), ("--overwrite",)]
)
def test_a_folder_that_is_not_replaced_is_refused_before_schemes_are_chosen(
    options: tuple[str, ...], source: Path, tmp_path: Path, calls: Counter[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/notes.txt").write_text("mine")
    assert convert(source, tmp_path / "out", *RTN, *options).expect(1).error["code"] == "output-exists"
    assert not calls


def test_an_unfinished_run_is_not_thrown_away_after_schemes_were_chosen(
    left: tuple[Path, dict[str, str]], source: Path, tmp_path: Path, calls: Counter[str]
) -> None:
    shutil.copytree(left[0], tmp_path / "out.w4pack-staging")
    assert convert(source, tmp_path / "out", *RTN).expect(1).error["code"] == "unfinished"
    assert not calls


def bent(line: str, change: Callable[[Any], Any]) -> str:
    """Change what a line tells, and give it the digest of what it tells then."""
    from w4pack.convert.jobs import journal

    value = json.loads(line)
    value.pop(journal.CHECK)
    ((name, told),) = value.items()
    value = {name: change(told)}
    return json.dumps({**value, journal.CHECK: journal._check(value)}, separators=(",", ":"))


def with_first(value: dict[str, Any], **changed: Any) -> dict[str, Any]:
    """Change the first linear's entry."""
    name = next(iter(value))
    return {**value, name: {**value[name], **changed}}


# Line, what becomes of it.
DAMAGE: dict[str, tuple[int, Callable[[str], str]]] = {
    "choice gone": (1, lambda line: "{}"),
    "choice of another shape": (1, lambda line: bent(line, lambda v: [1])),
    "choice for other linears": (1, lambda line: bent(line, lambda v: dict(list(v.items())[1:]))),
    "choice of no scheme": (1, lambda line: bent(line, lambda v: with_first(v, scheme=5))),
    "choice of another size": (
        1,
        lambda line: bent(
            line, lambda v: with_first(v, scheme={**v[next(iter(v))]["scheme"], "in_features": 7})
        ),
    ),
    "gate gone": (2, lambda line: line[:-4] + "0000"),
    "gate of another shape": (2, lambda line: bent(line, lambda v: None)),
    "gate of text": (2, lambda line: bent(line, lambda v: {**v, "worst": "x"})),
    "gate without layers": (2, lambda line: bent(line, lambda v: {**v, "outliers": [], "layers": 0})),
}


@pytest.fixture(scope="module")
def left(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The staging folder of a run that had decided, and what the whole run makes."""
    root = tmp_path_factory.mktemp("left")
    convert(source, root / "whole", *RTN).expect(0)
    return stopped(source, root / "out", *RTN).parent, tree(root / "whole")


@pytest.mark.parametrize("case", DAMAGE)
def test_a_decision_that_is_not_as_it_was_written_is_made_again(
    case: str, left: tuple[Path, dict[str, str]], source: Path, tmp_path: Path, calls: Counter[str]
) -> None:
    log = Path(shutil.copytree(left[0], tmp_path / "out.w4pack-staging")) / "journal.jsonl"
    lines, (at, change) = log.read_text().splitlines(), DAMAGE[case]
    lines[at] = change(lines[at])
    log.write_text("".join(f"{line}\n" for line in lines))
    convert(source, tmp_path / "out", *RTN, "--resume").expect(0)
    assert calls == {"choose" if at == 1 else "run_gate": 1}
    assert tree(tmp_path / "out") == left[1]


def test_decisions_of_another_source_are_refused_before_any_is_made(
    left: tuple[Path, dict[str, str]], source: Path, tmp_path: Path, calls: Counter[str]
) -> None:
    shutil.copytree(left[0], tmp_path / "out.w4pack-staging")
    other = Path(shutil.copytree(source, tmp_path / "src"))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    error = convert(other, tmp_path / "out", *RTN, "--resume").expect(3).error
    assert (error["code"], error["where"]) == ("resume-differs", "config.json")
    assert not calls


def test_a_rotation_without_a_quantizer_keeps_its_gate(
    source: Path, tmp_path: Path, calls: Counter[str]
) -> None:
    from w4pack.convert.jobs import rotated as module

    words, write, done = ("--rotate", "offline", "--to", "dense", "--threads", 1), module.write, []
    convert(source, tmp_path / "one", *words).expect(0)

    def dying(*args: Any) -> None:
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(1)
        write(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "write", dying)
        convert(source, tmp_path / "two", *words).expect(130)
    assert calls == {"run_gate": 2}
    resumed = convert(source, tmp_path / "two", *words, "--resume").expect(0)
    assert calls == {"run_gate": 2} and len(gates(resumed)) == 1
    assert tree(tmp_path / "two") == tree(tmp_path / "one")


def test_a_model_that_fails_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "TOLERANCE", 0.0)
    monkeypatch.setattr(gate, "ROUNDING", 0.0)
    assert convert(source, tmp_path / "out", *RTN).expect(1).error["code"] == "rotation-differs"
    assert list(tmp_path.iterdir()) == []


def test_sigterm_within_the_gate_ends_it_before_the_next_layer(source: Path, tmp_path: Path) -> None:
    import subprocess
    import sys

    words = command("convert", str(source), str(tmp_path / "out"), *map(str, RTN), "-q")[3:]
    place = "w4pack.convert.modeljobs.gate,,_layer,1"
    call = [sys.executable, "-c", STOPPED, place, *words]
    done = subprocess.run(call, timeout=600, check=False, capture_output=True, text=True)
    assert done.returncode == 143 and "0 more" in done.stderr
    assert "--resume" in done.stderr  # the schemes are kept
    assert json.loads((tmp_path / "out.w4pack-staging/journal.jsonl").read_text().splitlines()[1])["chosen"]


def test_figures_of_a_gate_survive_the_way_to_json_and_back() -> None:
    report = GateReport(1.5e-7, "model.layers.0", 2e-7, 2, 128, 1, [(3.5, 2.25), (1e30, 1.0)])
    assert GateReport.from_json(json.loads(json.dumps(report.to_json()))) == report
