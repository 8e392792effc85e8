"""What ``inspect`` and ``check`` print. Data goes to stdout, warnings and notes to stderr."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

from w4pack.convert import questions
from w4pack.convert.console import Given, print_json, question_reporter, warn, where_of
from w4pack.convert.errors import printable
from w4pack.convert.events import SCHEMA, size_text
from w4pack.convert.source.describe import text as described


def run_inspect(given: Given) -> None:
    """Print what a checkpoint is."""
    value = questions.inspect(
        given["path"], where=where_of(given), thorough=given["thorough"], reporter=question_reporter(given)
    )
    if given["as_json"]:
        print_json(value)
    elif not given["quiet"]:
        print(printable(described(value)), flush=True)
        warn(value["warnings"])
        warn({"text": f"not convertible as it is: {p['what']} ({p['where']})"} for p in value["problems"])


def run_check(given: Given) -> bool:
    """Print what engines do with a checkpoint; True if every asked combination works."""
    engines = given["engine"] or questions.ENGINES
    answers = questions.check(
        given["path"],
        engines=engines,
        tp=tuple(dict.fromkeys(chain.from_iterable(given["tp"]))),
        where=where_of(given),
        thorough=given["thorough"],
        reporter=question_reporter(given),
    )
    ok = all(answer["ok"] for answer in answers)
    if given["as_json"]:
        print_json(answers[0] if len(answers) == 1 else _together(answers, ok=ok))
    elif not given["quiet"]:
        print(printable("\n".join(_check_text(answers))), flush=True)
        warn(answers[0]["warnings"])
    return ok


def _together(answers: Sequence[Given], *, ok: bool) -> dict[str, Any]:
    first = answers[0]
    return {
        "schema": SCHEMA,
        "path": first["path"],
        "engine": "all",
        "ok": ok,
        "evidence": first["evidence"],
        "bytes_read": first["bytes_read"],
        "engines": list(answers),
    }


def _check_text(answers: Sequence[Given]) -> list[str]:
    lines = [f"path      {answers[0]['path']}"]
    for answer in answers:
        lines.append(f"{answer['engine']} {answer['engine_version']}")
        for result in answer["results"]:
            lines.append(f"  TP {result['tp']:<4}{_verdict(result['verdict'])}")
            lines += _blocker_lines(result["blockers"])
        lines += _ways(answer)
    lines.append(f"evidence  {answers[0]['evidence']}: {size_text(answers[0]['bytes_read'])} read")
    return lines


def _ways(answer: Given) -> list[str]:
    """Return the command that gets around the blockers, or in words what would, once for each rule."""
    if answer["suggestion"]:
        return [f"  try: {answer['suggestion']}"]
    cures = dict.fromkeys(b["cure"] for result in answer["results"] for b in result["blockers"])
    return [f"  way on: {cure}" for cure in cures if cure]


def _verdict(verdict: str) -> str:
    words = {
        "ok": "takes it",
        "refuses": "refuses it",
        "wrong": "loads it and computes something else",
        "slow": "takes it, by a slow path",
    }
    return words.get(verdict, verdict)


def _blocker_lines(blockers: Sequence[Given]) -> list[str]:
    return [
        f"         {b['layer']}: {b['rule']}: expected {b['expected']}, found {b['found']}" for b in blockers
    ]
