"""Text to calibrate or to measure with, as it lies on this disk. A file that gives none is refused by name.

A ``.jsonl`` file holds one object a line with a ``text``; any other file is one text. A byte order mark is no
text. Read as far as it is asked for: lines one by one, and of one long text its beginning. No torch.
"""

import json
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from w4pack.convert.errors import UsageError

SAMPLE = (
    Path(__file__).parent / "data" / "calibration.txt"
)  # the beginning of Jane Austen's Emma (1815), public domain
NAME = "built-in sample"
ENCODING = "utf-8-sig"  # UTF-8, with or without a byte order mark


class Texts:
    """The texts of a file, read anew by each loop over them, and no further than the loop goes.

    name   what is recorded of it
    where  the file as it was given
    cut    after a loop: the file is one text, and longer than what was read of it

    A loop raises UsageError for what is no text, with its line, and for a file that gives none.
    """

    def __init__(self, path: str | None, characters: int | None = None) -> None:
        """``path=None``: the built-in sample. ``characters``: how much of one text is read; None: all."""
        self.file = SAMPLE if path is None else Path(path)
        self.name = NAME if path is None else self.file.name
        self.where = NAME if path is None else path
        self.characters = -1 if characters is None else characters
        self.cut = False

    def __iter__(self) -> Iterator[str]:
        blank = True
        try:
            for text in self._lines() if self.file.suffix == ".jsonl" else self._whole():
                blank = blank and not text.strip()
                yield text
        except (OSError, UnicodeDecodeError) as err:
            reason = "bytes that are no UTF-8" if isinstance(err, UnicodeDecodeError) else str(err.strerror)
            raise UsageError(
                "the text cannot be read",
                where=self.where,
                expected="a text or JSONL file in UTF-8",
                found=reason,
            ) from err
        if blank and not self.cut:
            expected = "text to calibrate or to measure with"
            raise UsageError("the text is empty", where=self.where, expected=expected)

    def check(self) -> None:
        """Read as far as the first text. Raises UsageError as a loop does."""
        next((text for text in self if text.strip()), None)

    def _whole(self) -> Iterator[str]:
        text, self.cut = beginning(self.file, self.characters)
        yield text

    def _lines(self) -> Iterator[str]:
        for number, line, value in objects(self.file):
            text = (value or {}).get("text")
            where = f"{self.where}: line {number}"
            if not isinstance(text, str):
                raise UsageError(
                    "a line is not an object with a text",
                    where=where,
                    expected='{"text": "..."}',
                    found=line[:60],
                )
            if half := half_of_pair(text):
                raise UsageError(HALF, where=where, expected=WHOLE, found=half, hint="leave out that line")
            yield text


def beginning(path: Path, characters: int) -> tuple[str, bool]:
    """Return the first characters of a file, -1: all, and whether there are more.

    The text is what stands there: no end of a line becomes another. Raises UnicodeDecodeError, OSError.
    """
    with path.open(encoding=ENCODING, newline="") as file:
        told = path.stat()  # bytes, so at least the characters; of what is no plain file nobody knows
        size = told.st_size if stat.S_ISREG(told.st_mode) else sys.maxsize
        return file.read(characters if characters < size else -1), file.read(1) != ""


def objects(path: Path) -> Iterator[tuple[int, str, dict[str, Any] | None]]:
    """Yield (number, line, object or None where it holds none) of every line of JSONL that is not blank.

    A line ends at a line feed alone: the other ends of lines that Unicode knows may stand within a text.
    Raises UnicodeDecodeError for a line that is no UTF-8, OSError.
    """
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            line = raw.decode(ENCODING if number == 1 else "utf-8").removesuffix("\n")
            if not line.strip():
                continue
            try:
                value = json.loads(line, parse_int=float)  # of any length: none of them is text
            except (ValueError, RecursionError):
                value = None
            yield number, line, value if isinstance(value, dict) else None


HALF = "a text holds half of a surrogate pair, which no tokenizer takes"
WHOLE = "characters, or both halves of a pair, high and low"


def half_of_pair(value: str) -> str | None:
    """Return the first half of a surrogate pair that stands alone, as JSON spells it; None: there is none."""
    halves = () if value.isascii() else (char for char in value if "\ud800" <= char <= "\udfff")
    return next((f"\\u{ord(char):04x}" for char in halves), None)
