"""Text to calibrate or to measure with, as it lies on this disk. A file that gives none is refused by name.

A ``.jsonl`` file holds one object a line with a ``text``; any other file is one text. No torch.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from w4pack.convert.errors import UsageError

SAMPLE = (
    Path(__file__).parent / "data" / "calibration.txt"
)  # the beginning of Jane Austen's Emma (1815), public domain
NAME = "built-in sample"


def read_texts(path: str | None) -> tuple[list[str], str]:
    """Return texts and a name for them. Raises UsageError for a file that gives none."""
    if path is None:
        return [SAMPLE.read_text(encoding="utf-8")], NAME
    file = Path(path)
    try:
        raw = file.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as err:
        reason = "bytes that are no UTF-8" if isinstance(err, UnicodeDecodeError) else str(err.strerror)
        raise UsageError(
            "the text cannot be read", where=path, expected="a text or JSONL file in UTF-8", found=reason
        ) from err
    texts = list(_json_lines(raw, path)) if file.suffix == ".jsonl" else [raw]
    if not any(text.strip() for text in texts):
        raise UsageError("the text is empty", where=path, expected="text to calibrate or to measure with")
    return texts, file.name


def _json_lines(raw: str, path: str) -> Iterable[str]:
    for number, line in enumerate(raw.splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if not isinstance(value, dict) or not isinstance(value.get("text"), str):
            raise UsageError(
                "a line is not an object with a text",
                where=f"{path}: line {number}",
                expected='{"text": "..."}',
                found=line[:60],
            )
        yield value["text"]
