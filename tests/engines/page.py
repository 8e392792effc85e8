"""docs/engines.md: what the real engines did."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cases import Case
    from drive import Outcome

Answer = tuple[bool, str, str]  # of a server: whether a claim holds, the claim, what was seen

HEAD = """# In the real engines

Written by `make test-engines` and `make test-vllm`, last on {date} at commit {commit}; do not edit.
Each row was run on a CPU.

- vLLM: {vllm}
- vLLM with w4pack: {plugin}
- older vLLM with w4pack: {older}
- transformers: {hf}

The yardstick of every row is the checkpoint decoded by the tests' own slow decoder and run by plain
transformers in fp32; no code of w4pack takes part in it. *Difference* is the largest gap of any log-
probability of any token of the vocabulary at any of 23 positions. *Noise* is the same gap when the decoded
model itself runs in 16 bit. *Equal* means at most twice the noise; *wrong* means weights that the engine
itself calls missing, or more than four times the noise. Where a row of vLLM lies between, vLLM also runs the
decoded model in 16 bit itself, and that gap counts as noise if it is larger. Positions at which a router
hardly prefers one expert to the next are left out: 16-bit arithmetic alone may choose the other.

{count} rows, {odd} not as expected.
"""

TITLES = {
    "converted": "Converted by w4pack, and what `check` said of the result",
    "quantized": "Quantized by w4pack from 16 bit, and what `check` says",
    "artifacts": "Artifacts, and what `check` says",
    "flags": "Artifacts, with other options of the engine",
    "servers": "The OpenAI server",
    "sources": "As the tools wrote them, and what `check` says",
    "rules": "One rule at a time",
}
PATHS = re.compile(r"/\S+/")  # of the machine: the file's own name is enough
ENGINE = {
    "vllm": "vLLM",
    "plugin": "vLLM with w4pack",
    "older": "older vLLM with w4pack",
    "stock": "vLLM without w4pack",
    "hf": "transformers",
}


def group(case: Case) -> str:
    """Return which of the tables a case stands in."""
    if "-to-" in case.id:
        return "converted"
    if "-quantized-" in case.id:
        return "quantized"
    if case.engine in ("plugin", "older"):
        return "flags" if "-flag-" in case.id else "artifacts"
    return "sources" if "-source-" in case.id else "rules"


def write_page(
    path: Path,
    outcomes: Sequence[Outcome],
    servers: Mapping[str, Sequence[Answer]],
    versions: Mapping[str, str],
    date: str,
    commit: str,
) -> None:
    """Write the page: what was run, and the tables of what was not."""
    parts = {
        f"{title}: {ENGINE[e]}": [o for o in outcomes if group(o.case) == key and o.case.engine == e]
        for key, title in TITLES.items()
        for e in ENGINE
    }
    made = {title: section(title, rows) for title, rows in parts.items() if rows}
    for engine, answers in servers.items():
        title = f"{TITLES['servers']}: {ENGINE[engine]}"
        made[title] = table(title, "| case | seen | |", map(answer_row, answers))
    tables = "".join(sorted((kept(path) | made).values(), key=order))
    rows = [line for line in tables.splitlines() if line.startswith("| ") and not line.startswith("| case")]
    odd = sum("**" in line for line in rows)
    head = HEAD.format(date=date, commit=commit, count=len(rows), odd=odd, **versions)
    path.write_text(head + tables, encoding="utf-8")


def kept(path: Path) -> dict[str, str]:
    """Return the tables of the page as it is, by title."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    tables = text.split("\n## ")[1:]
    return {part.partition("\n\n")[0]: "\n## " + part for part in tables}


def order(table: str) -> tuple[int, int]:
    """Sort tables by group, then by engine."""
    title, _, engine = table.strip().splitlines()[0].removeprefix("## ").rpartition(": ")
    return (list(TITLES.values()).index(title), list(ENGINE.values()).index(engine))


def section(title: str, outcomes: Sequence[Outcome]) -> str:
    """Return the table of some cases."""
    return table(title, "| case | expected | rule | seen | difference | noise | |", map(row, outcomes))


def table(title: str, head: str, rows: Iterable[str]) -> str:
    """Return one table."""
    line = "|---" * (head.count("|") - 1) + "|"
    return f"\n## {title}\n\n{head}\n{line}\n" + "".join(rows)


def answer_row(answer: Answer) -> str:
    """Return one row about a server."""
    holds, claim, found = answer
    return f"| {claim} | {'yes' if holds else '**no**'} | {found.replace('|', '/')[:110]} |\n"


def row(o: Outcome) -> str:
    """Return one row."""
    gap = "" if o.difference is None else f"{o.difference:.4f}"
    seen = o.saw if o.as_expected else f"**{o.saw}**"
    name = o.case.id.removeprefix(f"{o.case.engine}-")
    name = name.removeprefix("source-").removeprefix("flag-").removeprefix("quantized-")
    detail = PATHS.sub("", o.detail.replace("|", "/").replace("\n", " "))[:110]
    rule = f"`{o.case.rule}`" if o.case.rule else ""
    return f"| {name} | {o.case.expect} | {rule} | {seen} | {gap} | {o.noise:.4f} | {detail} |\n"
