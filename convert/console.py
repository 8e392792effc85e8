"""What commands share: where answers, notes and events go, and the options that say how to reach a source."""

import json
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from w4pack.convert.errors import printable
from w4pack.convert.events import Human, JsonLines, Quiet, Reporter
from w4pack.convert.opening import Where

Given = Mapping[str, Any]


def say(*lines: str) -> None:
    """Print lines on stderr."""
    for line in lines:
        print(printable(line), file=sys.stderr)


def warn(warnings: Iterable[Given]) -> None:
    """Print the warnings of an answer on stderr; ``Human`` prints those of a job as they come."""
    say(*(f"warning: {warning['text']}" for warning in warnings))


def print_json(value: Any) -> None:
    """Print the answer to a question."""
    print(json.dumps(value), flush=True)


def where_of(given: Given) -> Where:
    """Return how to reach a source, from the command's options."""
    return Where(given["revision"], given["cache_dir"], given["local_files_only"])


def reporter_of(given: Given) -> Reporter:
    """Return where a job's events go."""
    if given["as_json"]:
        return JsonLines()
    return Quiet() if given["quiet"] else Human()


def question_reporter(given: Given) -> Reporter:
    """Return where a question's notes go: stdout is for the answer alone."""
    return Quiet() if given["as_json"] or given["quiet"] else Human()
