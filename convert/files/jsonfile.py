"""Small JSON files of a checkpoint: configs and weight indexes, as hostile as everything else.

Sizes, depth and text are bounded; what cannot be used is refused with the file and the place. The bytes and
the order of the keys are kept, because most of a config travels on unchanged.
"""

import json
import math
from typing import Any, NoReturn

from w4pack.convert.errors import SourceError
from w4pack.convert.files.store import Store

MAX_CONFIG = 16 << 20  # bytes; the largest configs seen list 100,000 module names
MAX_INDEX = 64 << 20  # bytes; the indexes of the largest models have 25 million
MAX_WIDE = 25_000_000  # bytes, with other than ASCII text: Python spends up to 4 bytes a character
MAX_VALUES = 1_000_000  # of an index: names of tensors; of a config: anything
MAX_DEPTH = 64


def read_object(store: Store, name: str, limit: int = MAX_CONFIG) -> tuple[bytes, dict[str, Any]]:
    """Return the bytes and the parsed object of a JSON file of ``store``.

    A key given twice keeps its last value, as in every other reader. Raises SourceError for a file that is
    too large, is not JSON, is not an object, is nested deeper than 64, or holds text that is not Unicode.
    """
    raw = store.read(name, limit)
    return raw, parse_object(raw, name)


def parse_object(raw: bytes, name: str) -> dict[str, Any]:
    """Parse the bytes of the JSON file ``name``. Raises SourceError as ``read_object`` does."""
    if raw.count(b"[") + raw.count(b"{") > MAX_VALUES or raw.count(b",") > MAX_VALUES:
        _refuse("holds too many values", name, f"at most {MAX_VALUES:,}", f"{len(raw):,} bytes")
    if len(raw) > MAX_WIDE and not raw.isascii():
        _refuse("is too large", name, f"at most {MAX_WIDE:,} bytes, or ASCII text", f"{len(raw):,} bytes")
    try:
        value = json.loads(raw.decode("utf-8-sig"))
    except json.JSONDecodeError as err:
        _refuse("is not JSON", name, "a JSON object", f"line {err.lineno}, column {err.colno}: {err.msg}")
    except RecursionError:
        _refuse("is nested too deep", name, f"at most {MAX_DEPTH} levels", None)
    except ValueError as err:
        _refuse("is not JSON", name, "a JSON object in UTF-8", str(err)[:200])
    if not isinstance(value, dict):
        _refuse("is not a JSON object", name, "an object", f"a {type(value).__name__}")
    _check(value, name)
    return value


def refuse_nonfinite(value: Any, where: str) -> None:
    """Raise SourceError if settings hold NaN or infinity (also an overflowing number such as 1e999).

    Only settings that are read are held to this: some model configs carry ``Infinity`` on purpose.
    """
    stack: list[tuple[str, Any]] = [(where, value)]
    while stack:
        path, item = stack.pop()
        if isinstance(item, dict):
            stack.extend((f"{path}.{key}", child) for key, child in item.items())
        elif isinstance(item, list):
            stack.extend((f"{path}[{i}]", child) for i, child in enumerate(item))
        elif isinstance(item, float) and not math.isfinite(item):
            what = "a quantization setting is not a finite number"
            expected = "a finite number"
            raise SourceError(what, code="config-not-finite", where=path, expected=expected, found=str(item))


def _check(value: dict[str, Any], name: str) -> None:
    """Walk without recursion: depth at most 64, every string and key valid Unicode."""
    stack: list[tuple[int, Any]] = [(1, value)]
    while stack:
        depth, item = stack.pop()
        if isinstance(item, str):
            if not item.isascii() and any("\ud800" <= char <= "\udfff" for char in item):
                _refuse("holds text that is not Unicode", name, "text", "half of a surrogate pair")
        elif isinstance(item, dict | list):
            if depth > MAX_DEPTH:
                _refuse("is nested too deep", name, f"at most {MAX_DEPTH} levels", f"{depth} levels")
            if isinstance(item, dict):
                stack.extend((depth, key) for key in item)
                stack.extend((depth + 1, child) for child in item.values())
            else:
                stack.extend((depth + 1, child) for child in item)


def _refuse(what: str, name: str, expected: str, found: str | None) -> NoReturn:
    raise SourceError(f"`{name}` {what}", code="bad-json", where=name, expected=expected, found=found)
