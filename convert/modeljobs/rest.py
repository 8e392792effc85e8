"""The manifest of a quantized model, and the other files of its output."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from w4pack.convert.jobs import manifest, sidefiles
from w4pack.convert.planning.plan import FORMAT_VERSION, Plan
from w4pack.convert.planning.record import to_plain
from w4pack.convert.quantize.report import report
from w4pack.convert.source.detect import Source

CardMaker = Callable[[Plan, str], str]  # plan, report in Markdown -> README.md


def build(
    plan: Plan, source: Source, written: manifest.Written, outcome: Mapping[str, Any]
) -> dict[str, Any]:
    """Make the manifest; see ``manifest.build``."""
    value: dict[str, Any] = {
        "schema": 1,
        "tool": {"name": "w4pack", "version": plan.version, "format": FORMAT_VERSION},
        "target": plan.target,
        "options": dict(plan.options),
        "lossless": False,
        "plan": plan.digest,
        "source": {"origin": plan.origin, "files": to_plain(plan.files)},
        "files": {},
        "quantization": {**(plan.quantization or {}), **outcome},
    }
    if plan.rotation is not None:
        value["rotation"] = dict(plan.rotation)
    value["tensors"] = manifest.Entries(lambda: manifest.tensor_entries(plan, written))
    value["layers"] = manifest.Entries(lambda: _layers(plan, written))
    return value


def _layers(plan: Plan, written: manifest.Written) -> Iterator[tuple[str, str]]:
    for layer in plan.layers:
        entry = {
            "source": layer.source,
            "action": layer.action,
            "scheme": layer.scheme.label(),
            **written.reports.get(layer.source, {}),
        }
        yield layer.name, json.dumps(entry)


def write_rest(
    folder: Path,
    written: manifest.Written,
    plan: Plan,
    source: Source,
    outcome: Mapping[str, Any],
    card: CardMaker | None,
) -> None:
    """Write everything but the weights: side files, index, card, manifest and, last, config.json."""
    value = build(plan, source, written, outcome)
    side_files = sidefiles.copy_side_files(source.checkpoint, folder)
    text = card(plan, report(plan, written.reports, outcome)) if card else None
    sidefiles.write_rest(folder, plan, source.config, side_files, value, text)
