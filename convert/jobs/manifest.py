"""``w4pack.json``: what was done, to what, and the hashes that prove it.

Deterministic: no dates, no local paths.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from w4pack.convert.dialects.recorded import transforms
from w4pack.convert.errors import SourceError
from w4pack.convert.files import manifestform
from w4pack.convert.files.checkpoint import Checkpoint
from w4pack.convert.files.manifestform import FORMAT, LIMIT, MANIFEST, SCHEMA
from w4pack.convert.planning.decisions import DensePlan, LayerPlan
from w4pack.convert.planning.plan import Plan
from w4pack.convert.planning.record import to_plain
from w4pack.convert.source.detect import Source
from w4pack.convert.source.layers import SourceLayer

NAME = MANIFEST
TARGETS_WITH_RECORDS = ("marlin",)


@dataclass(frozen=True, slots=True)
class Written:
    """What execution found out, by name: hashes of output tensors, reports of operations by source name, and
    the digests of the tensors' samples.
    """

    hashes: Mapping[str, str]
    reports: Mapping[str, Mapping[str, Any]]
    samples: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Entries:
    """An object of many members that are made one by one as they are written: (name, value as JSON text)."""

    make: Callable[[], Iterator[tuple[str, str]]]


def build(plan: Plan, source: Source, written: Written, original: Mapping[str, Any] | None) -> dict[str, Any]:
    """Make the manifest, to be written by ``dump``.

    original  the manifest of a source that w4pack wrote itself, or None
    """
    manifest: dict[str, Any] = {
        "schema": SCHEMA,
        "tool": {"name": "w4pack", "version": plan.version, "format": FORMAT},
        "target": plan.target,
        "options": dict(plan.options),
        "lossless": plan.lossless,
        "plan": plan.digest,
        "source": {"origin": plan.origin, "files": to_plain(plan.files)},
        "files": {},
        "config": {},
    }
    if plan.rotation is not None:
        manifest["rotation"] = dict(plan.rotation)
    if original is not None:
        manifest["original"] = original.get("original", original.get("source"))
    manifest["tensors"] = Entries(lambda: tensor_entries(plan, written))
    manifest["layers"] = Entries(lambda: _layers(plan, source, written))
    if plan.target in TARGETS_WITH_RECORDS:
        copied = original.get("unpack") if original is not None and is_copy(plan, source) else None
        manifest["unpack"] = copied or _unpack(plan, source, written)
    return manifest


def tensor_entries(plan: Plan, written: Written) -> Iterator[tuple[str, str]]:
    """Yield (name, dtype, shape, hash and sample as JSON text) of every tensor."""
    for t in plan.tensors:
        entry = {"dtype": t.dtype, "shape": list(t.shape), "sha256": written.hashes[t.name]}
        entry["sample"] = written.samples[t.name]
        yield t.name, json.dumps(entry)


def _layers(plan: Plan, source: Source, written: Written) -> Iterator[tuple[str, str]]:
    layers = {layer.name: layer for layer in source.layers}
    for p in plan.layers:
        yield p.name, json.dumps(_layer(p, layers[p.source], written))


def is_copy(plan: Plan, source: Source) -> bool:
    """Tell whether an artifact becomes the same artifact, so that it still goes back to the first source."""
    layers = {layer.name: layer for layer in source.layers}
    same = all(
        layers[p.source].layout == "marlin"
        and p.name == p.source
        and p.action == "pack"
        and p.scheme == layers[p.source].scheme
        and p.cols_from is None
        for p in plan.layers
    )
    return same and not plan.dropped and not plan.config_changes


def _layer(plan: LayerPlan, layer: SourceLayer, written: Written) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "source": plan.source,
        "decoded_from": f"{layer.layout} {layer.scheme.label()}",
        "zeros": layer.zeros.kind,
        "action": plan.action,
        "scheme": plan.scheme.label(),
    }
    if plan.notes:
        entry["notes"] = list(plan.notes)
    if plan.reason:
        entry["reason"] = plan.reason
    error = written.reports.get(plan.source, {}).get("relative_error")
    if error is not None:
        entry["relative_error"] = error
    return entry


def _unpack(plan: Plan, source: Source, written: Written) -> dict[str, Any]:
    checkpoint = source.checkpoint
    return {
        "layers": Entries(lambda: ((p.name, written.reports[p.source]["unpack"]) for p in plan.layers)),
        "dense": [_dense(d, checkpoint, written) for d in plan.dense],
        "dropped": [
            {"name": n, "dtype": checkpoint.tensors[n].dtype, "shape": list(checkpoint.tensors[n].shape)}
            for n in plan.dropped
        ],
        "source_tensors": names_digest((t.name, t.dtype, t.shape) for t in checkpoint.tensors.values()),
        "configs": {name: raw.decode("utf-8", "surrogateescape") for name, raw in checkpoint.raw.items()},
    }


def names_digest(tensors: Iterable[tuple[str, str, Sequence[int]]]) -> str:
    """Return a digest of names, dtypes and shapes: what `unpack` must come to, whatever the records say."""
    lines = sorted(f"{name} {dtype} {list(shape)}" for name, dtype, shape in tensors)
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogatepass")).hexdigest()


def _dense(plan: DensePlan, checkpoint: Checkpoint, written: Written) -> dict[str, Any]:
    """Say how a tensor outside the linears goes back; a copy's hash is that of its source."""
    info = checkpoint.tensors[plan.source]
    entry: dict[str, Any] = to_plain(plan)
    made = written.reports.get(plan.source, {}).get("sha256", written.hashes[plan.name])
    return entry | {"source_shape": list(info.shape), "sha256": made}


def dump(manifest: Mapping[str, Any]) -> Iterator[bytes]:
    """Return the file's bytes in pieces: one line for each member of the large objects."""
    yield from (part.encode() for part in _object(manifest, 0))
    yield b"\n"


def _object(members: Mapping[str, Any], depth: int) -> Iterator[str]:
    pad = " " * (depth + 1)
    yield "{"
    for number, (key, value) in enumerate(members.items()):
        yield f"{',' if number else ''}\n{pad}{json.dumps(key)}: "
        if isinstance(value, Entries):
            yield from _entries(value, pad)
        elif isinstance(value, Mapping) and any(isinstance(v, Entries) for v in value.values()):
            yield from _object(value, depth + 1)
        else:
            yield json.dumps(value)
    yield f"\n{' ' * depth}}}"


def _entries(entries: Entries, pad: str) -> Iterator[str]:
    yield "{"
    for number, (name, text) in enumerate(entries.make()):
        yield f"{',' if number else ''}\n{pad} {json.dumps(name)}: {text}"
    yield f"\n{pad}}}"


def of(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Return the manifest of an open output. Raises as ``load``."""
    value = checkpoint.manifest()
    if value is None:
        raise _absent(checkpoint.label)
    transforms(value, checkpoint.label)
    return value


def load(folder: Path) -> dict[str, Any]:
    """Read the manifest of an output. Raises as ``manifestform.parse``, and SourceError if there is none, or
    none that can be understood.
    """
    path = folder / NAME
    try:
        if path.stat().st_size > LIMIT:
            raise SourceError(
                "the manifest is too large",
                code="manifest",
                where=str(path),
                expected=f"at most {LIMIT} bytes",
            )
        raw = path.read_bytes()
    except FileNotFoundError:
        raise _absent(str(folder)) from None
    except OSError as err:
        raise manifestform.unreadable(str(path), err.strerror) from err
    value = manifestform.parse(raw, str(path))
    transforms(value, str(folder))
    return value


def _absent(folder: str) -> SourceError:
    return SourceError(
        "not an output of w4pack: it has no manifest",
        code="no-manifest",
        where=f"{folder}/{NAME}",
        hint=f"`w4pack inspect {folder}` says what it is",
    )
