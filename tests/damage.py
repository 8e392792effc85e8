"""What the two fuzzers share: how much they do, and where a JSON value can be damaged."""

from __future__ import annotations

import os
import random
from typing import Any

TIMES = int(os.environ.get("W4PACK_FUZZ", "1"))  # multiplies the number of cases
ROUNDS = (1, 1, 1, 2, 3)  # changes of one value, drawn from
STEPS = (-8, -1, 1, 8, 2**32, -(2**40))  # by which numbers are changed

Rng = random.Random


def spots(value: Any) -> list[tuple[Any, Any]]:
    """Return every (container, key) of a JSON value."""
    found: list[tuple[Any, Any]] = []
    pending = [value]
    while pending:
        item = pending.pop()
        keys = list(item) if isinstance(item, dict) else range(len(item)) if isinstance(item, list) else []
        for key in keys:
            found.append((item, key))
            pending.append(item[key])
    return found
