"""The model card of an output: what the Hub shows, and what its search reads.

A pure function of its values: no dates, no local paths, so equal conversions give equal bytes. Of the card of
the source only known keys of plain text are carried; a broken one carries nothing.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from w4pack.convert.hub.cardtext import (
    DEQUANTIZED,
    LOADING,
    LOSSLESS,
    LOSSY,
    QUANTIZED,
    ROTATED,
    TITLES,
    UNVERIFIED,
)

FRONT_MATTER = re.compile(r"\A\ufeff?\s*---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|\Z)", re.DOTALL)
FRONT_LIMIT = 100_000  # characters of YAML that are parsed
CARRIED = ("license", "license_name", "license_link", "language", "pipeline_tag")
TAGS_LIMIT = 40
# Tags that say how the source is packed: wrong for the output.
PACKING_TAGS = frozenset(
    {"gptq", "awq", "autoawq", "autogptq", "gptqmodel", "compressed-tensors", "llmcompressor", "auto-round"}
    | {"autoround", "marlin", "w4pack", "4-bit", "8-bit", "int4", "int8", "safetensors"}
)
ROWS = 20  # layers a table shows; all of them are in the manifest
BEGIN, END = "<!-- w4pack verify: begin -->", "<!-- w4pack verify: end -->"


@dataclass(frozen=True, slots=True)
class CardInfo:
    """What a card says.

    target         as ``--to`` names it
    version        of w4pack
    lossless       codes, zero points, scales and group order are the source's, bit for bit
    source_format  e.g. ``gptq``; several are joined by a comma
    source_id      Hub id of the source, or None for a folder
    source_card    text of the source's README, or None
    model_type     ``model_type`` of config.json, or None
    schemes        (scheme, number of linears) that are packed in the output
    changes        (what was done, number of linears), exact ones included
    left           name -> reason, for linears that are no longer packed
    rotations      lines that say which rotations the weights hold, and which not and why
    errors         name -> relative Frobenius error of W, for linears that were re-quantized
    command        the command that makes this output, with SRC and OUT for places on a disk
    report         what quantization did, in Markdown; empty where nothing was quantized
    """

    target: str
    version: str
    lossless: bool
    source_format: str
    schemes: tuple[tuple[str, int], ...]
    source_id: str | None = None
    source_revision: str | None = None
    source_card: str | None = None
    model_type: str | None = None
    changes: tuple[tuple[str, int], ...] = ()
    left: Mapping[str, str] = field(default_factory=dict)
    errors: Mapping[str, float] = field(default_factory=dict)
    rotations: tuple[str, ...] = ()
    command: str = ""
    report: str = ""


def model_card(info: CardInfo) -> str:
    """Return the text of README.md."""
    import yaml  # comes with huggingface_hub

    front = yaml.safe_dump(metadata(info), sort_keys=False, allow_unicode=True, width=1000)
    parts = [
        f"---\n{front}---",
        f"# {_title(info)}",
        _origin(info),
        f"## What was done\n\n{_done(info)}",
        *([f"## Quantization\n\n{info.report}"] if info.report else []),
        f"## Loading\n\n{LOADING[info.target]}",
        f"## Proof\n\n{BEGIN}\n{UNVERIFIED.format(source=info.source_id or 'SRC')}\n{END}",
    ]
    return "\n\n".join(parts) + "\n"


def metadata(info: CardInfo) -> dict[str, Any]:
    """Return the card's metadata, in the order in which it is written."""
    source = front_matter(info.source_card or "")
    values: dict[str, Any] = {key: source[key] for key in CARRIED if key in source}
    base = info.source_id or source.get("base_model")
    if base:
        values["base_model"] = base
    values["base_model_relation"] = "quantized"
    values["library_name"] = "w4pack" if info.target == "marlin" else "transformers"
    values["tags"] = _tags(info, source.get("tags", []))
    return values


def front_matter(card: str) -> dict[str, Any]:
    """Return the source card's known keys: text, or lists of text. Broken YAML gives nothing."""
    import yaml

    match = FRONT_MATTER.match(card)
    if match is None or len(match[1]) > FRONT_LIMIT:
        return {}
    try:
        found = yaml.safe_load(match[1])
    except (yaml.YAMLError, ValueError, RecursionError, TypeError):
        return {}
    if not isinstance(found, dict):
        return {}
    plain = {key: _plain(key, found.get(key)) for key in (*CARRIED, "base_model", "tags")}
    return {key: value for key, value in plain.items() if value}


def _plain(key: str, value: Any) -> str | list[str] | None:
    """Return text or a list of text; YAML reads the language code ``no`` as false."""
    if key == "language":
        value = [_language(v) for v in value] if isinstance(value, list) else _language(value)
    if key == "tags" and isinstance(value, str):
        value = [value]
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, list):
        return [item.strip() for item in value if isinstance(item, str)][:200]
    return None


def _language(value: Any) -> Any:
    return "no" if value is False else value


def _tags(info: CardInfo, source: Any) -> list[str]:
    bits = sorted({scheme.split()[0] + "-bit" for scheme, _ in info.schemes})
    own = ["w4pack", *([] if info.target == "dense" else [info.target]), *bits]
    carried = [
        tag
        for tag in (source if isinstance(source, list) else [])
        if tag.lower() not in PACKING_TAGS and not tag.startswith(("base_model:", "license:", "region:"))
    ]
    return list(dict.fromkeys([*own, *carried]))[:TAGS_LIMIT]


def _title(info: CardInfo) -> str:
    name = info.source_id.partition("/")[2] if info.source_id else (info.model_type or "Model")
    return f"{name}: {TITLES[info.target]}"


def _origin(info: CardInfo) -> str:
    revision = f" at commit `{info.source_revision}`" if info.source_revision else ""
    if info.source_id:
        source = f"[{info.source_id}](https://huggingface.co/{info.source_id}){revision}"
    else:
        source = f"a {info.source_format} checkpoint"
    made = f"Made from {source} by w4pack {info.version}"
    return f"{made}:\n\n```\n{info.command}\n```" if info.command else f"{made}."


def _done(info: CardInfo) -> str:
    packed = [f"- {count} linears: {scheme}" for scheme, count in info.schemes]
    changed = [f"- {what}: {_linears(count)}" for what, count in info.changes]
    turned = [f"- rotated: {line}" for line in info.rotations]
    parts = [_claim(info), "\n".join([f"- read as: {info.source_format}", *packed, *changed, *turned])]
    if info.left:
        rows = [(name, info.left[name]) for name in sorted(info.left)]
        parts.append("Linears that are no longer packed:\n\n" + _table(("linear", "why"), rows))
    if info.errors:
        worst = sorted(info.errors, key=lambda name: (-info.errors[name], name))
        rows = [(name, f"{info.errors[name]:.3e}") for name in worst]
        text = "Linears that were quantized again, with the relative Frobenius error of their weights:\n\n"
        parts.append(text + _table(("linear", "error"), rows))
    return "\n\n".join(parts)


def _claim(info: CardInfo) -> str:
    if info.report:
        return QUANTIZED
    if info.lossless:
        return LOSSLESS
    if info.rotations and info.target == "dense":
        return ROTATED
    return DEQUANTIZED if info.target == "dense" and not info.errors else LOSSY


def _linears(count: int) -> str:
    return "1 linear" if count == 1 else f"{count} linears"


def _table(head: tuple[str, str], rows: list[tuple[str, str]]) -> str:
    lines = [f"| {head[0]} | {head[1]} |", "|---|---|"]
    lines += [f"| `{a}` | {b} |" for a, b in rows[:ROWS]]
    more = len(rows) - ROWS
    return "\n".join(lines) + (f"\n\nand {more} more, in `w4pack.json`" if more > 0 else "")


def with_proof(card: str, tensors: int, compared: int) -> str:
    """Write the result of a verification that found nothing wrong into a card of ours; other cards stay.

    compared  tensors that were compared with the source; 0: hashes only. That never replaces a comparison.
    """
    start, end = card.find(BEGIN), card.find(END)
    if start < 0 or end < start:
        return card
    section = card[start + len(BEGIN) : end]
    if not compared and "compared with the source" in section:
        return card
    lines = [
        line for line in section.strip().splitlines() if not line.startswith(("Verified:", "Not verified"))
    ]
    result = f"Verified: {tensors} tensors are present, with the recorded hashes, and no NaN or infinity."
    if compared:
        result += (
            f" {compared} of them were compared with the source and are what the plan says, bit for bit."
        )
    return card[: start + len(BEGIN)] + "\n" + "\n".join([*lines, result]) + "\n" + card[end:]


def record_proof(out: Path, tensors: int, compared: int) -> bool:
    """Put a good verification into the card of the output folder. Returns True if the file changed."""
    path = out / "README.md"
    if not path.is_file():
        return False
    card = path.read_text(encoding="utf-8", errors="surrogateescape")
    new = with_proof(card, tensors, compared)
    if new == card:
        return False
    fresh = path.with_name(".README.md.w4pack")
    fresh.write_text(new, encoding="utf-8", errors="surrogateescape")
    fresh.replace(path)
    return True
