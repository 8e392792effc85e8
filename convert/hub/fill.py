"""Fills the model card from a conversion: plan and source in, text out."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from w4pack.convert.hub.card import CardInfo, model_card
from w4pack.convert.jobs.sidefiles import CARD, SOURCE_CARD
from w4pack.convert.planning.plan import Plan
from w4pack.convert.planning.quantize_options import QuantizeOptions
from w4pack.convert.planning.rotation import describe
from w4pack.convert.source.detect import Source

CARD_LIMIT = 4 << 20  # bytes of a source card that are read


def card_of(
    source: Source,
    plan: Plan,
    origin: Mapping[str, str] | None,
    errors: Mapping[str, float],
    report: str = "",
) -> str:
    """Return README.md of the output. Deterministic: equal conversions give equal text.

    report  of a quantization, in Markdown
    """
    packed = [p for p in plan.layers if p.action != "dense"]
    left = {p.name: p.reason or "dequantized" for p in plan.layers if p.action == "dense"}
    changes: Counter[str] = Counter(note for p in plan.layers for note in p.notes)
    model_type = source.config.get("model_type")
    info = CardInfo(
        target=plan.target,
        version=plan.version,
        lossless=plan.lossless,
        source_format=", ".join(sorted({layer.layout for layer in source.layers})) or "16-bit",
        schemes=tuple(Counter(p.scheme.label() for p in packed).most_common()),
        source_id=(origin or {}).get("id"),
        source_revision=(origin or {}).get("revision"),
        source_card=_source_card(source),
        model_type=model_type if isinstance(model_type, str) else None,
        changes=tuple(changes.most_common()),
        left=left if plan.target != "dense" else {},
        errors=errors,
        rotations=() if plan.rotation is None else tuple(describe(plan.rotation)),
        report=report,
        command=command(plan.options),
    )
    return model_card(info)


def _source_card(source: Source) -> str | None:
    """Return the text of the source's card: of an output of ours, of the card it keeps aside."""
    files = source.checkpoint.store.files()
    name = SOURCE_CARD if SOURCE_CARD in files else CARD
    if name not in files or files[name] > CARD_LIMIT:
        return None
    return source.checkpoint.store.read(name, CARD_LIMIT).decode("utf-8", "replace")


def command(options: Mapping[str, Any]) -> str:
    """Return the command line that makes such an output."""
    words = ["w4pack", "convert", "SRC", "OUT"]
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if name == "quantize":
            words += _quantize_words(value)
        elif value is True:
            words.append(flag)
        elif isinstance(value, tuple | list):
            words += [word for item in value for word in (flag, str(item))]
        else:
            words += [flag, str(value)]
    return " ".join(words)


def _quantize_words(asked: Mapping[str, Any]) -> list[str]:
    """Return the options of quantization that differ from their defaults."""
    words = ["--quantize", str(asked["method"])]
    for field in fields(QuantizeOptions):
        value = asked[field.name]
        if field.name == "method" or value == field.default or (not value and not field.default):
            continue
        flag = {"sym": "--asym", "gptaq": "--no-gptaq"}.get(field.name)
        if flag:
            words.append(flag)
        elif isinstance(value, tuple | list):
            words += [word for item in value for word in ("--" + field.name.replace("_", "-"), str(item))]
        else:
            words += ["--" + field.name.replace("_", "-"), str(value)]
    return words
