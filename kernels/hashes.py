"""Compares tensors with the sha256 that the converter wrote of each: proof before loading, on request."""

import hashlib
import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from w4pack.convert.errors import Refused, SourceError
from w4pack.convert.files.local import LocalStore
from w4pack.convert.files.tensorfile import TensorInfo
from w4pack.kernels.artifact import Artifact
from w4pack.kernels.workers import WeightFile

MANIFEST = "w4pack.json"
LIMIT = 512 << 20  # bytes; the manifest of a 70B model with folded orders has a few MB
BLOCK = 4 << 20  # bytes hashed at a time: stays in the cache


def check(artifact: Artifact, names: Iterable[str], threads: int | None = None) -> None:
    """Raise SourceError that names every tensor of ``names`` whose bytes have another sha256 than written.

    threads  default: the cores
    """
    wanted = read_hashes(artifact.folder)
    infos = sorted((artifact.tensors[name] for name in names), key=lambda info: (-info.nbytes, info.name))
    with ExitStack() as stack:
        opened = {
            name: stack.enter_context(WeightFile(*artifact.files[name]))
            for name in sorted({info.file for info in infos})
        }
        pool = stack.enter_context(ThreadPoolExecutor(threads or len(os.sched_getaffinity(0))))
        found = list(pool.map(lambda info: _digest(opened[info.file], info), infos))
    problems = [
        _differs(info, wanted.get(info.name), digest)
        for info, digest in zip(infos, found, strict=True)
        if wanted.get(info.name) != digest
    ]
    if problems:
        raise Refused.together(problems)


def _digest(file: WeightFile, info: TensorInfo) -> str:
    sha = hashlib.sha256()
    block = memoryview(bytearray(min(BLOCK, info.nbytes)))
    for at in range(0, info.nbytes, BLOCK):
        part = block[: min(BLOCK, info.nbytes - at)]
        file.fill(part, info.offset + at)
        sha.update(part)
    return sha.hexdigest()


def _differs(info: TensorInfo, wanted: str | None, found: str) -> SourceError:
    return SourceError(
        "the bytes of a tensor are not those that were written",
        code="tensor-hash",
        where=f"{info.file}, {info.name}",
        expected=f"sha256 {wanted}" if wanted else f"a sha256 in {MANIFEST}",
        found=f"sha256 {found}",
    )


def read_hashes(folder: Path) -> dict[str, str]:
    """Return tensor name -> sha256 from the manifest of an artifact.

    Raises SourceError if there is no manifest, or none that can be used.
    """
    with LocalStore(folder) as store:
        where = store.path_of(MANIFEST)
        if MANIFEST not in store.files():
            raise SourceError(
                "the artifact has no manifest to check against", code="no-manifest", where=where
            )
        raw = store.read(MANIFEST, LIMIT)
    try:
        tensors = json.loads(raw)["tensors"]
        return {str(name): str(entry["sha256"]) for name, entry in tensors.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
        found = f"{type(err).__name__}: {err}".partition("\n")[0][:200]
        raise SourceError("the manifest cannot be read", code="manifest", where=where, found=found) from err
