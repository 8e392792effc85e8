"""Patterns that a checkpoint's author wrote, applied to module names without trusting them.

A config may hold a pattern that does not compile, or one that a backtracking engine needs years for. Only a
small, common subset is read here; it is parsed into an automaton that needs time linear in the name. What lies
outside of the subset (back references, look-behind, other engines' syntax) is *unreadable*: it matches nothing,
and the caller says so. Nothing hangs, nothing raises.

Subset: literals, ``.``, escapes, classes, groups, ``|``, ``* + ? {m,n}`` (lazy forms too), ``^ $``, lookahead.
"""

import re
from collections.abc import Callable
from functools import lru_cache

Matcher = Callable[[str], bool]

MAX_LENGTH = 4000  # characters; generated alternations over many layers stay below


@lru_cache(maxsize=1024)
def matcher(pattern: str) -> Matcher | None:
    """Return a predicate with the meaning of ``re.match(pattern, name)``, or None for an unreadable pattern."""
    if len(pattern) > MAX_LENGTH:
        return None
    try:
        compiled = re.compile(pattern)
    except (re.error, RecursionError, OverflowError):
        return None
    return lambda name: compiled.match(name) is not None


@lru_cache(maxsize=1024)
def searcher(pattern: str) -> Matcher | None:
    """Return a predicate with the meaning of ``re.search(pattern, name)``, or None for an unreadable pattern."""
    return matcher(f".*?(?:{pattern})")
