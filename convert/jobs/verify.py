"""Proof of an output: every tensor there, every hash right, every number finite, and equal to its source."""

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from w4pack.convert.core import dtypes
from w4pack.convert.errors import VerifyError, name_some
from w4pack.convert.files.checkpoint import Checkpoint
from w4pack.convert.files.store import chunks, digest
from w4pack.convert.files.tensorfile import TensorInfo
from w4pack.convert.jobs import manifest
from w4pack.convert.jobs.compare import Comparison, Failure, compare_files, first_difference
from w4pack.convert.jobs.sidefiles import CARD, SOURCE_CARD, carried
from w4pack.convert.planning.making import make_plan
from w4pack.convert.planning.options import ConvertOptions
from w4pack.convert.planning.plan import Plan
from w4pack.convert.source.detect import Source, read_source
from w4pack.convert.source.reading import DetectOptions


@dataclass(frozen=True, slots=True)
class Proof:
    """Result of a verification. ``compared``: output tensors compared with the source; 0 without one."""

    path: str
    against: str | None
    lossless: bool
    tensors: int
    compared: int
    failures: tuple[Failure, ...]

    @property
    def ok(self) -> bool:
        """Claim: nothing is wrong."""
        return not self.failures


def check_output(checkpoint: Checkpoint, value: Mapping[str, Any], threads: int) -> list[Failure]:
    """Compare an output's tensors with its manifest: presence, dtype, shape, hash; and that all is finite."""
    wanted: Mapping[str, Mapping[str, Any]] = value["tensors"]
    failures = [
        Failure(n, "extra", "no such tensor", "a tensor the manifest does not name")
        for n in checkpoint.tensors
        if n not in wanted
    ]
    failures += [
        Failure(n, "missing", f"{wanted[n]['dtype']} {wanted[n]['shape']}", "nothing")
        for n in wanted
        if n not in checkpoint.tensors
    ]
    present = [n for n in wanted if n in checkpoint.tensors]
    failures += _check_files(checkpoint, value["files"])
    with ThreadPoolExecutor(threads) as pool:
        for found in pool.map(lambda n: _check_tensor(checkpoint, checkpoint.tensors[n], wanted[n]), present):
            failures += found
    return failures


def refuse_damaged(checkpoint: Checkpoint, value: Mapping[str, Any], threads: int) -> None:
    """Raise VerifyError unless every tensor and side file is what the manifest says: nothing else proves it.

    The files that people edit on purpose (config, index, card) are left to ``verify``.
    """
    kept = set(checkpoint.side_files) - {CARD}
    found = check_output(checkpoint, value, threads)
    wrong = [f for f in found if f.kind != "nonfinite" and (f.kind != "file" or f.tensor in kept)]
    if wrong:
        raise VerifyError(
            "the artifact is damaged" if value["target"] == "marlin" else "the output of w4pack is damaged",
            code="damaged",
            where=name_some([f.tensor for f in wrong]),
            expected=wrong[0].expected,
            found=wrong[0].found,
            hint=f"w4pack verify {checkpoint.label}",
        )


def _check_files(checkpoint: Checkpoint, wanted: Mapping[str, str]) -> list[Failure]:
    """Compare config.json, index and side files with their hashes: they decide what the tensors mean."""
    store, failures = checkpoint.store, []
    for name, sha in wanted.items():
        if name not in store.files():
            failures.append(Failure(name, "missing", "a file of the output", "nothing"))
            continue
        blob = store.blob(name)
        found = digest(chunks(blob.read_into, blob.size))
        if found != sha:
            failures.append(Failure(name, "file", sha, found))
    return failures


def _check_tensor(checkpoint: Checkpoint, info: TensorInfo, wanted: Mapping[str, Any]) -> list[Failure]:
    if info.dtype != wanted["dtype"] or list(info.shape) != wanted["shape"]:
        return [
            Failure(
                info.name, "shape", f"{wanted['dtype']} {wanted['shape']}", f"{info.dtype} {list(info.shape)}"
            )
        ]
    sha, bad, first = hashlib.sha256(), 0, None
    for offset, data in checkpoint.chunks(info):
        sha.update(data)
        if info.dtype in dtypes.FLOAT_TAGS:
            item = dtypes.numpy_dtype(info.dtype)
            marks = np.flatnonzero(dtypes.nonfinite(np.frombuffer(data, item), info.dtype))
            if marks.size and first is None:
                first = offset // item.itemsize + int(marks[0])
            bad += marks.size
    failures = []
    if sha.hexdigest() != wanted["sha256"]:
        failures.append(Failure(info.name, "hash", wanted["sha256"], sha.hexdigest()))
    if bad:
        index = [int(i) for i in np.unravel_index(first or 0, info.shape)] if info.shape else []
        failures.append(
            Failure(info.name, "nonfinite", "finite values", f"{bad} not finite, the first at {index}")
        )
    return failures


def verify_output(
    checkpoint: Checkpoint,
    value: Mapping[str, Any],
    source: Source | None,
    label: str,
    against: str | None,
    threads: int,
) -> Proof:
    """Verify an output of w4pack, and compare it with its source if one is given."""
    failures = check_output(checkpoint, value, threads)
    compared = 0
    if source is not None:
        options = ConvertOptions.from_chosen(dict(value["options"]))
        plan, _ = make_plan(source, options, None, ())
        compared, more = compare_output(checkpoint, value, source, plan, threads)
        failures += more
    return Proof(
        label, against, bool(value["lossless"]), len(value["tensors"]), compared, tuple(_once(failures))
    )


def compare_output(
    checkpoint: Checkpoint, value: Mapping[str, Any], source: Source, plan: Plan, threads: int
) -> tuple[int, list[Failure]]:
    """Compare an output with the source of its plan: tensors by value, side files byte by byte.

    Returns (tensors compared, failures). The hashes of the manifest are not looked at.
    """
    output = read_source(checkpoint, DetectOptions())
    failures = [
        Failure(p.where or checkpoint.label, "unreadable", p.expected or "", p.found or p.what)
        for p in output.problems
    ]
    compared, more = Comparison(output, source, plan, value).run(threads)
    failures += more
    failures += compare_files(carried(source.checkpoint), checkpoint, source.checkpoint)
    return compared, failures


def _once(failures: list[Failure]) -> list[Failure]:
    seen: dict[tuple[str, str], Failure] = {}
    for item in failures:
        seen.setdefault((item.tensor, item.kind), item)
    return list(seen.values())


def compare_plain(checkpoint: Checkpoint, source: Checkpoint, label: str, against: str) -> Proof:
    """Compare two checkpoints byte by byte (what `unpack` gave back): tensors in whatever shards, and files.

    The cards of a source that w4pack wrote are not compared: `unpack` gives back the card of the model.
    """
    failures = [
        Failure(n, "missing", "a tensor of the source", "nothing")
        for n in source.tensors
        if n not in checkpoint.tensors
    ]
    failures += [
        Failure(n, "extra", "no such tensor", "a tensor")
        for n in checkpoint.tensors
        if n not in source.tensors
    ]
    for name in sorted(set(source.tensors) & set(checkpoint.tensors)):
        a, b = source.tensors[name], checkpoint.tensors[name]
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            failures.append(
                Failure(name, "shape", f"{a.dtype} {list(a.shape)}", f"{b.dtype} {list(b.shape)}")
            )
        elif first_difference(source, a, checkpoint, b) is not None:
            failures.append(Failure(name, "bytes", f"the bytes of {against}", "others"))
    for name in {**source.raw, **checkpoint.raw}:
        if source.raw.get(name) != checkpoint.raw.get(name):
            failures.append(Failure(name, "file", f"the file of {against}", "another, or none"))
    cards = (CARD, SOURCE_CARD) if manifest.NAME in source.store.files() else ()
    wanted = {name: name for name in source.side_files if name not in cards}
    failures += compare_files(wanted, checkpoint, source)
    failures += [
        Failure(name, "extra", f"no such file, as in {against}", "a file")
        for name in checkpoint.side_files
        if name not in source.side_files and name not in cards
    ]
    return Proof(
        label,
        against,
        True,
        len(checkpoint.tensors),
        len(set(source.tensors) & set(checkpoint.tensors)),
        tuple(failures),
    )
