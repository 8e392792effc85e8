"""Text to calibrate or to measure with, as it lies on this disk. A file that gives none is refused by name.

A ``.jsonl`` file holds one object a line with a ``text``; any other file is one text. A byte order mark is no
text. No torch.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from w4pack.convert.errors import UsageError

SAMPLE = (
    Path(__file__).parent / "data" / "calibration.txt"
)  # the beginning of Jane Austen's Emma (1815), public domain
NAME = "built-in sample"
ENCODING = "utf-8-sig"  # UTF-8, with or without a byte order mark


def read_texts(path: str | None) -> tuple[list[str], str]:
    """Return texts and a name for them. Raises UsageError for a file that gives none."""
    if path is None:
        return [SAMPLE.read_text(encoding="utf-8")], NAME
    file = Path(path)
    try:
        raw = file.read_bytes().decode(ENCODING)
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
    for number, line, value in objects(raw):
        text = (value or {}).get("text")
        if not isinstance(text, str) or not is_text(text):
            raise UsageError(
                "a line is not an object with a text",
                where=f"{path}: line {number}",
                expected='{"text": "..."}',
                found=line[:60],
            )
        yield text


def objects(raw: str) -> Iterator[tuple[int, str, dict[str, Any] | None]]:
    """Yield (number, line, object or None where it holds none) of every line of JSONL that is not blank.

    A line ends at a line feed alone: the other ends of lines that Unicode knows may stand within a text.
    """
    for number, line in enumerate(raw.split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        yield number, line, value if isinstance(value, dict) else None


def is_text(value: str) -> bool:
    """Whether a string of JSON is text that a tokenizer takes: JSON can spell halves of surrogate pairs."""
    return value.isascii() or not any("\ud800" <= char <= "\udfff" for char in value)
