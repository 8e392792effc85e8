"""From a plan to the values of a card."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from w4pack.convert.errors import SourceError
from w4pack.convert.hub.card import CardInfo, model_card
from w4pack.convert.planning.plan import Plan
from w4pack.convert.source.detect import Source

SOURCE_CARD = "README.md"
CARD_LIMIT = 4 << 20  # bytes of a source's README that are looked at


def card_of(source: Source, plan: Plan, origin: Mapping[str, str] | None, errors: Mapping[str, float]) -> str:
    """Return the README of the output. ``errors``: relative error per re-quantized linear, by source name."""
    return model_card(card_info(source, plan, origin, errors))


def card_info(
    source: Source, plan: Plan, origin: Mapping[str, str] | None, errors: Mapping[str, float]
) -> CardInfo:
    """Gather what the card says. ``origin``: Hub id and commit of the source; None for a folder."""
    where = origin or {}
    packed = [p for p in plan.layers if p.action != "dense"]
    names = {p.source: p.name for p in plan.layers}
    as_dense = plan.target == "dense"
    return CardInfo(
        target=plan.target,
        version=plan.version,
        lossless=plan.lossless,
        source_format=", ".join(sorted({layer.layout for layer in source.layers})) or "16-bit",
        schemes=_counted(p.scheme.label() for p in packed),
        source_id=where.get("id"),
        source_revision=where.get("revision"),
        source_card=_source_card(source),
        model_type=_text(source.config.get("model_type")),
        changes=_counted(note for p in plan.layers for note in p.notes),
        left={} if as_dense else {p.name: p.reason or "" for p in plan.layers if p.action == "dense"},
        errors={names.get(name, name): float(value) for name, value in errors.items()},
        command=_command(plan, where),
    )


def _counted(items: Iterable[str]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(Counter(items).items(), key=lambda item: (-item[1], item[0])))


def _source_card(source: Source) -> str | None:
    store = source.checkpoint.store
    try:
        return store.read(SOURCE_CARD, CARD_LIMIT).decode("utf-8", "replace")
    except SourceError:
        return None


def _command(plan: Plan, origin: Mapping[str, str]) -> str:
    name = origin.get("id", "SRC")
    revision = f"@{origin['revision']}" if "revision" in origin else ""
    words = ["w4pack", "convert", f"{name}{revision}", "OUT", "--to", plan.target]
    for option, value in plan.options.items():
        if option != "to":
            words += _option(f"--{option.replace('_', '-')}", value)
    return " ".join(words)


def _option(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [name] if value else []
    if isinstance(value, list | tuple):
        return [word for item in value for word in (name, str(item))]
    return [name, str(value)]


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
