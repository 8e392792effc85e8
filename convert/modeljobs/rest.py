"""The manifest of a quantized model, and the other files of its output."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from w4pack.convert.dialects import recorded
from w4pack.convert.dialects.online_reading import parse
from w4pack.convert.files.manifestform import FORMAT, SCHEMA
from w4pack.convert.jobs import manifest, sidefiles
from w4pack.convert.jobs.writing import write_file
from w4pack.convert.planning.options import ConvertOptions
from w4pack.convert.planning.plan import Plan
from w4pack.convert.planning.quantize_options import CALIBRATED, QuantizeOptions
from w4pack.convert.planning.quantizing import layer_index
from w4pack.convert.planning.record import to_plain
from w4pack.convert.quantize.pictures import over_layers
from w4pack.convert.quantize.report import error_of, report
from w4pack.convert.source.detect import Source

ERRORS, OUTLIERS = "quantization-errors.svg", "quantization-outliers.svg"
CardMaker = Callable[[Plan, str], str]  # plan, report in Markdown -> README.md


def build(
    plan: Plan, source: Source, written: manifest.Written, outcome: Mapping[str, Any], digest: str
) -> dict[str, Any]:
    """Make the manifest; see ``manifest.build``. ``digest``: of the plan before anything was measured."""
    value: dict[str, Any] = {
        "schema": SCHEMA,
        "tool": {"name": "w4pack", "version": plan.version, "format": FORMAT},
        "target": plan.target,
        "options": dict(plan.options),
        "lossless": False,
        "plan": digest,
        "source": {"origin": plan.origin, "files": to_plain(plan.files)},
        "files": {},
        "config": {},
        "quantization": {**_records_of(plan), **(plan.quantization or {}), **outcome},
    }
    if plan.rotation is not None:
        value["rotation"] = dict(plan.rotation)
    value["tensors"] = manifest.Entries(lambda: manifest.tensor_entries(plan, written))
    value["layers"] = manifest.Entries(lambda: _layers(plan, written))
    return value


def _records_of(plan: Plan) -> dict[str, str]:
    """Return the digest by which every reader sees that the artifact's records are those written here."""
    records = parse((plan.quant_config or {}).get("online", []))
    return {recorded.FINGERPRINT: recorded.fingerprint(records)} if records else {}


def _layers(plan: Plan, written: manifest.Written) -> Iterator[tuple[str, str]]:
    for layer in plan.layers:
        entry = {
            "source": layer.source,
            "action": layer.action,
            "scheme": layer.scheme.label(),
            **written.reports.get(layer.source, {}),
        }
        yield layer.name, json.dumps(entry)


def pictures(
    reports: Mapping[str, Mapping[str, Any]], outcome: Mapping[str, Any], error: str
) -> dict[str, tuple[str, bytes]]:
    """Return file name -> (title, SVG): errors of each kind of linear, outliers of a rotated model.

    ``error``: what the errors are, in words.
    """
    errors: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for name, entry in reports.items():
        if "error" in entry:
            errors[name.rpartition(".")[2]][layer_index(name)].append(entry["error"])
    drawn = {ERRORS: (f"{error}, by decoder layer", _by_layer(errors))}
    if "outliers" in outcome:
        title = "Largest value over root mean square of the stream, by decoder layer"
        drawn[OUTLIERS] = (title, outcome["outliers"])
    return {name: (title, over_layers(title, lines).encode()) for name, (title, lines) in drawn.items()}


def _by_layer(errors: Mapping[str, Mapping[int, list[float]]]) -> dict[str, list[float]]:
    """Return kind of linear -> mean of each layer, 0 where it has none."""
    last = max((layer for found in errors.values() for layer in found), default=-1)
    return {
        kind: [sum(found.get(n, [0.0])) / len(found.get(n, [0.0])) for n in range(last + 1)]
        for kind, found in sorted(errors.items())
    }


def effective(chosen: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return name of each setting that acts -> (value, default), of the options that a plan records."""
    usual = asdict(ConvertOptions())
    asked, own = chosen["quantize"], asdict(QuantizeOptions())
    found = {name: (value, own[name]) for name, value in asked.items()}
    if asked["method"] == "rtn":
        found = {name: pair for name, pair in found.items() if name not in CALIBRATED}
    if asked["bpw"] is not None:  # chosen for each linear
        found = {name: pair for name, pair in found.items() if name not in ("bits", "group_size")}
    rotate = chosen.get("rotate", usual["rotate"])
    names = ["rotate", "ignore", *(["tp"] if rotate == "full" else [])]
    names += ["seed"] if asked["method"] == "gptq" or rotate != "none" else []
    return found | {name: (chosen.get(name, usual[name]), usual[name]) for name in names}


def write_rest(
    folder: Path,
    written: manifest.Written,
    plan: Plan,
    source: Source,
    outcome: Mapping[str, Any],
    card: CardMaker | None,
    digest: str,
) -> None:
    """Write everything but the weights: side files, index, card, manifest and, last, config.json.

    plan    as the output says it: with what was measured
    digest  of the plan without, which is the job's
    """
    value = build(plan, source, written, outcome, digest)
    side_files = sidefiles.copy_side_files(source.checkpoint, folder)
    shown = pictures(written.reports, outcome, error_of(plan))
    for name, (_, data) in shown.items():
        write_file(folder / name, data)
        side_files[name] = hashlib.sha256(data).hexdigest()
    titles = {name: title for name, (title, _) in shown.items()}
    told = report(plan, written.reports, outcome, titles, settings=effective(plan.options))
    text = card(plan, told) if card else None
    sidefiles.write_rest(folder, plan, source.config, side_files, value, text)
