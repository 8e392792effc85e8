"""Lists of modules as few anchored patterns, and the choice of defaults: what the writing dialects share."""

import re
from collections.abc import Iterable, Mapping
from itertools import product

from w4pack.convert.core.families import fused_sets, natural_key
from w4pack.convert.core.scheme import QuantScheme

Shape = tuple[str | None, ...]  # the fixed parts of a dotted name; None where a number or the leaf stands
Columns = tuple[tuple[str, ...], ...]


def common_scheme(layers: Mapping[str, QuantScheme]) -> QuantScheme:
    """Return the scheme most layers share in bits, group size and symmetry; the earliest name wins a tie."""
    counts: dict[tuple[int, int, bool], int] = {}
    for scheme in layers.values():
        key = (scheme.bits, scheme.group_size, scheme.sym)
        counts[key] = counts.get(key, 0) + 1
    most = max(counts.values())
    names = sorted(layers, key=natural_key)
    chosen = (layers[name] for name in names)
    return next(s for s in chosen if counts[(s.bits, s.group_size, s.sym)] == most)


def with_fused(names: Iterable[str], everything: Iterable[str]) -> list[str]:
    """Add to ``names`` the fused name of every set of modules that lies wholly in it.

    Engines ask about ``qkv_proj``, ``gate_up_proj`` and ``experts``, not about the parts.
    """
    chosen = dict.fromkeys(names)
    whole = [fused.name for fused in fused_sets(everything) if all(part in chosen for part in fused.members)]
    return [*chosen, *(name for name in whole if name not in chosen)]


def anchored(names: Iterable[str]) -> list[str]:
    """Return patterns ``^...$`` that together match exactly ``names``, one for each regular part of the list.

    ``layers.1.q, layers.1.k, layers.7.q, layers.7.k`` become ``^layers\\.(1|7)\\.(k|q)$``.
    """
    return [pattern for pattern, _ in products(names)]


def products(names: Iterable[str]) -> list[tuple[str, tuple[str, ...]]]:
    """Return (pattern, the names it matches), in natural order of each pattern's first name."""
    shapes: dict[Shape, list[tuple[str, ...]]] = {}
    for name in sorted(set(names), key=natural_key):
        parts = name.split(".")
        free = [p.isdigit() or i == len(parts) - 1 for i, p in enumerate(parts)]
        shape = tuple(None if slot else part for part, slot in zip(parts, free, strict=True))
        shapes.setdefault(shape, []).append(tuple(p for p, slot in zip(parts, free, strict=True) if slot))
    out = []
    for shape, rows in shapes.items():
        for columns in _factor(rows):
            out.append((_pattern(shape, columns), _members(shape, columns)))
    return out


def _factor(rows: list[tuple[str, ...]]) -> list[Columns]:
    """Write a set of equally long rows as a union of products of columns, exactly."""
    if len(rows[0]) == 1:
        return [(tuple(row[0] for row in rows),)]
    tails: dict[str, list[tuple[str, ...]]] = {}
    for row in rows:
        tails.setdefault(row[0], []).append(row[1:])
    heads: dict[tuple[Columns, ...], list[str]] = {}
    for head, rest in tails.items():
        heads.setdefault(tuple(_factor(rest)), []).append(head)
    return [(tuple(first), *columns) for products_, first in heads.items() for columns in products_]


def _pattern(shape: Shape, columns: Columns) -> str:
    values = iter(columns)
    parts = [_choice(next(values)) if part is None else re.escape(part) for part in shape]
    return "^" + r"\.".join(parts) + "$"


def _choice(values: tuple[str, ...]) -> str:
    if len(values) == 1:
        return re.escape(values[0])
    return "(" + "|".join(re.escape(value) for value in values) + ")"


def _members(shape: Shape, columns: Columns) -> tuple[str, ...]:
    names = []
    for row in product(*columns):
        values = iter(row)
        names.append(".".join(next(values) if part is None else part for part in shape))
    return tuple(names)
