"""Whether a model has a place for all that its ``online`` records say: loader, `eval` and `check` ask here.

Names and widths are enough: nothing but headers is read, and the manifest.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from w4pack.convert.core.facts import DenseFacts, ModelFacts, Warning_
from w4pack.convert.dialects.online import Online, misfit
from w4pack.convert.dialects.online_reading import parse
from w4pack.convert.dialects.recorded import changed
from w4pack.convert.errors import W4PackError
from w4pack.convert.files.tensorfile import TensorInfo
from w4pack.convert.source.detect import Source
from w4pack.convert.source.online_places import GUIDE, Linear, place, plain
from w4pack.convert.source.online_rules import misfits, without_kernel
from w4pack.convert.source.written import is_artifact, unusable


def problems_of(source: Source) -> tuple[W4PackError, ...]:
    """Return what stops w4pack's loader from running the records of an artifact as they were calibrated.

    Records that were changed come first, as they do for the loader: what does not fit follows from it.
    """
    other = () if unusable(source) else tuple(unlike_written(source))
    tensors = dict(source.checkpoint.tensors)
    return other or _problems(records_of(source), source.config, tensors, _linears(source))


def unlike_written(source: Source) -> Iterator[W4PackError]:
    """Yield what says that an artifact's records are not those that were written: its manifest, or guides.

    Its block may be gone too. Nothing of a block that is not known: that is a problem of the source.

    Raises SourceError and Refused for a manifest that cannot be used.
    """
    if source.claims is not None and source.claims.refusals:
        return
    records, label = records_of(source), source.checkpoint.label
    problems = tuple(changed(records, source.checkpoint.manifest() or {}, label))
    yield from problems
    if problems or records or not any(layer.layout == "marlin" for layer in source.layers):
        return
    stray = next((name for name in source.checkpoint.tensors if name.endswith(f".{GUIDE}")), None)
    if stray is not None:
        yield misfit("kv_quant", f"a record, as there is {stray}", "none")


def without_kernels(source: Source, act_bits: int | None, kv_bits: int | None) -> tuple[Warning_, ...]:
    """Return what no kernel runs of an artifact at bits that are chosen, as measuring it is no running of it.

    None of bits: as it was calibrated. Raises UsageError for bits that the records do not have.
    """
    records = records_of(source)
    if not records:
        return ()
    settings = records.settings(act_bits, kv_bits)
    at = place(source.config, source.checkpoint.tensors, _linears(source))
    problems = tuple(without_kernel(records, settings, at))
    return tuple(
        replace(told, hint=f"{p.what}, so nothing runs what is measured; {p.hint}")
        for told, p in zip(shown(problems), problems, strict=True)
    )


def planned_problems(facts: ModelFacts) -> tuple[W4PackError, ...]:
    """Return the same of an artifact that is only planned."""
    records = parse((facts.quant_config or {}).get("online", []))
    linears = plain(facts.dense)
    for layer in facts.layers:
        act_order = layer.act_order == "groups"
        linears[layer.name] = Linear.of_codes(layer.in_features, sym=layer.sym, act_order=act_order)
    tensors: dict[str, TensorInfo | DenseFacts | None] = {t.name: t for t in facts.dense}
    tensors |= {f"{layer.name}.weight": None for layer in facts.layers}
    return _problems(records, facts.config, tensors, linears)


def misplaced(source: Source) -> tuple[W4PackError, ...]:
    """Return what would let the records of an artifact compute another model, whatever bits are chosen."""
    records = records_of(source)
    if not records:
        return ()
    try:
        return tuple(misfits(records, place(source.config, source.checkpoint.tensors, _linears(source))))
    except W4PackError as err:
        return err.problems or (err,)


def _problems(
    records: Online,
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo | DenseFacts | None],
    linears: Mapping[str, Linear],
) -> tuple[W4PackError, ...]:
    if not records:
        return ()
    try:
        settings = records.settings()
        at = place(config, tensors, linears)
    except W4PackError as err:
        return err.problems or (err,)
    return (*misfits(records, at), *without_kernel(records, settings, at))


def shown(problems: Iterable[W4PackError]) -> tuple[Warning_, ...]:
    """Return problems as facts of a model (``ModelFacts.unfit``)."""
    return tuple(
        Warning_(p.code, p.where or "", p.expected or p.what, p.found or "", p.hint) for p in problems
    )


def records_of(source: Source) -> Online:
    """Return the records of an artifact; none for another checkpoint, and none where some are not known."""
    if not is_artifact(source) or (source.claims is not None and source.claims.refusals):
        return Online()
    return parse((source.quant_config or {}).get("online", []))


def _linears(source: Source) -> dict[str, Linear]:
    found = plain(source.dense)
    for layer in source.layers:  # by tensors, as the loader sees it: whatever values are in them
        sym, act_order = "weight_zero_point" not in layer.tensors, "act_perm" in layer.tensors
        found[layer.name] = Linear.of_codes(layer.scheme.in_features, sym=sym, act_order=act_order)
    return found
