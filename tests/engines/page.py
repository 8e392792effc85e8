"""docs/engines.md: what the real engines did."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drive import Outcome

HEAD = """# In the real engines

Written by `make test-engines` and `make test-vllm`, last on {date}; do not edit. Each row was run on a CPU,
one process at a time.

- vLLM: {vllm}
- vLLM with w4pack: {plugin}
- transformers: {hf}

The yardstick of every row is the checkpoint decoded by the tests' own slow decoder and run by plain
transformers in fp32; no code of w4pack takes part in it. *Difference* is the largest gap of any log-
probability of any token of the vocabulary at any of 23 positions. *Noise* is the same gap when the decoded
model itself runs in 16 bit. *Equal* means at most twice the noise; *wrong* means weights that the engine
itself calls missing, or more than four times the noise. Positions at which a router hardly prefers one expert
to the next are left out: 16-bit arithmetic alone may choose the other.

{count} rows, {odd} not as expected.
"""

TITLES = {
    "converted": ("Converted by w4pack, and what `check` said of the result", "-to-"),
    "artifacts": ("Artifacts, and what `check` says", "plugin-"),
    "sources": ("As the tools wrote them, and what `check` says", "-source-"),
}
PATHS = re.compile(r"/\S+/")  # of the machine: the file's own name is enough
ENGINE = {
    "vllm": "vLLM",
    "plugin": "vLLM with w4pack",
    "stock": "vLLM without w4pack",
    "hf": "transformers",
}


def write_page(path: Path, outcomes: Sequence[Outcome], versions: Mapping[str, str], date: str) -> None:
    """Write the page."""
    parts = kept(path, {ENGINE[o.case.engine] for o in outcomes})
    rest = list(outcomes)
    for title, mark in TITLES.values():
        chosen = [o for o in rest if mark in o.case.id]
        rest = [o for o in rest if mark not in o.case.id]
        parts += [section(f"{title}: {ENGINE[e]}", [o for o in chosen if o.case.engine == e]) for e in ENGINE]
    parts += [
        section(f"One rule at a time: {ENGINE[e]}", [o for o in rest if o.case.engine == e]) for e in ENGINE
    ]
    tables = "".join(sorted(filter(None, parts), key=order))
    rows = [line for line in tables.splitlines() if line.startswith("| ") and not line.startswith("| case")]
    odd = sum("**" in line for line in rows)
    head = HEAD.format(date=date, count=len(rows), odd=odd, **versions)
    path.write_text(head + tables, encoding="utf-8")


def kept(path: Path, run: set[str]) -> list[str]:
    """Return the tables of engines that were not run this time."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    tables = ["\n## " + part for part in text.split("\n## ")[1:]]
    return [t for t in tables if t.partition("\n\n")[0].rpartition(": ")[2] not in run]


def order(table: str) -> tuple[int, int]:
    """Sort tables: converted, artifacts, sources, single rules; vLLM first."""
    title = table.strip().splitlines()[0]
    starts = [title.startswith("## " + t) for t, _ in TITLES.values()]
    engine = list(ENGINE.values()).index(title.rpartition(": ")[2])
    return (starts.index(True) if any(starts) else len(starts), engine)


def section(title: str, outcomes: Sequence[Outcome]) -> str:
    """Return one table; empty without rows."""
    if not outcomes:
        return ""
    head = "| case | expected | rule | seen | difference | noise | |\n" + "|---" * 7 + "|\n"
    return f"\n## {title}\n\n{head}" + "".join(map(row, outcomes))


def row(o: Outcome) -> str:
    """Return one row."""
    gap = "" if o.difference is None else f"{o.difference:.4f}"
    seen = o.saw if o.as_expected else f"**{o.saw}**"
    name = o.case.id.removeprefix(f"{o.case.engine}-").removeprefix("source-")
    detail = PATHS.sub("", o.detail.replace("|", "/").replace("\n", " "))[:110]
    rule = f"`{o.case.rule}`" if o.case.rule else ""
    return f"| {name} | {o.case.expect} | {rule} | {seen} | {gap} | {o.noise:.4f} | {detail} |\n"
