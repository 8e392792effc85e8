"""The limit of the divergence: what a refusal says and keeps, and which limits are none."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quantize.test_outputs import quantize, tree
from w4pack.convert import api
from w4pack.convert.errors import UsageError
from w4pack.convert.jobs.running import Running
from w4pack.convert.modeljobs import judging, quantizerun
from w4pack.convert.planning.options import ConvertOptions
from w4pack.convert.planning.quantize_options import QuantizeOptions
from w4pack.convert.quantize.whole import Outcome

NOTHING = ("--max-kl", 0)  # a limit that no rounding meets


def refused(source: Path, out: Path, *options: Any, text: Path) -> dict[str, Any]:
    """Return the error of a quantization that meets no limit."""
    return quantize(source, out, *options, *NOTHING, text=text).expect(4).error


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of the layers whose codes were chosen."""
    found: list[int] = []
    original = quantizerun.ModelRun.quantize

    def counting(self: Any, index: int) -> Any:
        found.append(index)
        return original(self, index)

    monkeypatch.setattr(quantizerun.ModelRun, "quantize", counting)
    return found


def test_f81_another_limit_publishes_what_was_computed_and_computes_nothing_again(
    llama: Path, book: Path, tmp_path: Path, computed: list[int]
) -> None:
    quantize(llama, tmp_path / "one", text=book).expect(0)
    computed.clear()
    error = refused(llama, tmp_path / "two", text=book)
    assert error["code"] == "quality" and computed == [0, 1]
    assert not (tmp_path / "two").exists()
    assert str(tmp_path / "two.w4pack-staging") in error["hint"]
    done = quantize(llama, tmp_path / "two", "--resume", text=book).expect(
        0
    )  # the limit is the default again
    assert computed == [0, 1]
    notes = [e["text"] for e in done.events if e["event"] == "note"]
    assert any(text.startswith("resumed: ") and "steps of the earlier run are kept" in text for text in notes)
    assert sum(" kept, mean output error" in text for text in notes) == 2
    assert tree(tmp_path / "two") == tree(tmp_path / "one")
    assert not list(tmp_path.glob("*.w4pack-staging"))


def test_the_limit_that_the_hint_names_is_enough(llama: Path, book: Path, tmp_path: Path) -> None:
    error = refused(llama, tmp_path / "out", text=book)
    limit = error["hint"].partition("--max-kl ")[2].partition("`")[0]
    assert float(error["found"]) < float(limit) < 1.2 * float(error["found"])
    quantize(llama, tmp_path / "out", "--resume", "--max-kl", limit, text=book).expect(0)


def test_a_second_refusal_keeps_the_layers_too(
    llama: Path, book: Path, tmp_path: Path, computed: list[int]
) -> None:
    first = refused(llama, tmp_path / "out", text=book)
    second = refused(llama, tmp_path / "out", "--resume", text=book)
    assert computed == [0, 1] and second["found"] == first["found"]


def test_nothing_to_resume_is_said(llama: Path, book: Path, tmp_path: Path) -> None:
    done = quantize(llama, tmp_path / "out", "--resume", text=book).expect(0)
    notes = [e["text"] for e in done.events if e["event"] == "note"]
    assert "there is nothing to resume: the work starts at the beginning" in notes


def test_other_codes_are_not_resumed(llama: Path, book: Path, tmp_path: Path) -> None:
    refused(llama, tmp_path / "out", text=book)
    error = quantize(llama, tmp_path / "out", "--resume", "--bits", 8, text=book).expect(3).error
    assert error["code"] == "resume-differs"


def test_the_tokens_are_those_that_were_compared(llama: Path, book: Path, tmp_path: Path) -> None:
    """Of 8 windows of 64 tokens the first."""
    assert refused(llama, tmp_path / "out", text=book)["where"] == "the first 64 of 512 calibration tokens"


@pytest.mark.parametrize(
    ("options", "named", "not_named"),
    [
        ((), ["`--bits 8`", "`--rotate offline`", "more calibration text"], ["--group-size", "--gptaq"]),
        (("--rotate", "offline"), ["`--bits 8`"], ["--rotate"]),
        (("--rotate", "full", "--kv-bits", 4), ["`--kv-bits 16`"], ["--rotate", "--act-bits"]),
        (("--bits", 8, "--no-gptaq"), ["`--gptaq`", "`--rotate offline`"], ["--bits 8"]),
        (("--group-size", 64), ["`--group-size 32`"], []),
    ],
)
def test_the_hint_names_what_was_not_given(
    options: tuple[Any, ...],
    named: list[str],
    not_named: list[str],
    llama: Path,
    book: Path,
    tmp_path: Path,
) -> None:
    ways = refused(llama, tmp_path / "out", *options, text=book)["hint"].partition(". The finished")[0]
    assert all(way in ways for way in named) and not any(way in ways for way in not_named), ways


def test_the_hint_names_no_scheme_that_the_target_lacks(llama: Path, book: Path, tmp_path: Path) -> None:
    done = quantize(llama, tmp_path / "out", "--asym", *NOTHING, text=book, to="awq").expect(4)
    assert "--bits" not in done.error["hint"]


def test_an_architecture_without_a_rotation_is_not_told_to_rotate() -> None:
    source: Any = SimpleNamespace(
        config={"architectures": ["NobodyKnowsForCausalLM"]}, checkpoint=SimpleNamespace(tensors={})
    )
    prepared: Any = SimpleNamespace(source=source, options=ConvertOptions(quantize=QuantizeOptions()))
    assert not judging._rotatable(prepared)


@pytest.mark.parametrize(
    ("value", "limit", "text"),
    [
        (0.0001234, 0, "0.000123"),  # three decimals were 0.000
        (0.50000001, 0.5, "0.50000001"),
        (5.4321, 4, "5.43"),
        (4.0000000000000009, 4, "4.000000000000001"),
    ],
)
def test_a_divergence_is_told_in_as_many_digits_as_show_it(value: float, limit: float, text: str) -> None:
    assert judging.above(value, limit) == text


def test_a_divergence_at_the_limit_passes() -> None:
    nothing: Any = None
    judging.judge(Outcome(0.5, 64), 0.5, nothing, nothing, Path("out"))


@pytest.mark.parametrize("limit", ["inf", "nan", "-1"])
def test_limits_that_would_let_everything_pass_are_usage_errors(
    limit: str, llama: Path, book: Path, tmp_path: Path
) -> None:
    quantize(llama, tmp_path / "out", "--max-kl", limit, text=book).expect(2)
    options = ConvertOptions(
        quantize=QuantizeOptions(group_size=32, calibration=str(book), samples=2, seqlen=32)
    )
    running = Running(max_kl=float(limit))
    with pytest.raises(UsageError, match="no such limit"):
        api.convert(llama, tmp_path / "out", options=options, running=running)
    assert not list(tmp_path.iterdir())


def test_the_limit_is_checked_before_a_plan_is_shown(llama: Path, tmp_path: Path) -> None:
    options = ConvertOptions(quantize=QuantizeOptions("rtn", group_size=32))
    with pytest.raises(UsageError, match="no such limit"):
        api.plan(llama, tmp_path / "out", options=options, where=api.Where(), running=Running(max_kl=-1))
