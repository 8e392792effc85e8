"""Compares tensors with what the converter wrote of each: all bytes on request, a sample always."""

import hashlib
import os
import warnings
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from w4pack.convert.core.facts import Warning_
from w4pack.convert.errors import Refused, SourceError, VerifyError
from w4pack.convert.files import samples
from w4pack.convert.files.checkpoint import CONFIG
from w4pack.convert.files.described import edited, missing, of_tensors, unmatched
from w4pack.convert.files.exchanged import refuse_exchanged
from w4pack.convert.files.jsonfile import MAX_CONFIG
from w4pack.convert.files.local import LocalStore
from w4pack.convert.files.manifestform import MANIFEST
from w4pack.convert.files.tensorfile import TensorInfo
from w4pack.kernels.artifact import Artifact
from w4pack.kernels.workers import WeightFile

BLOCK = 4 << 20  # bytes hashed at a time: stays in the cache


def check(artifact: Artifact, names: Iterable[str], threads: int | None = None) -> None:
    """Raise VerifyError that names every tensor of ``names`` whose bytes have another sha256 than written.

    threads  default: the cores

    Raises SourceError if there is no manifest.
    """
    wanted = _hashes(artifact)
    infos = sorted((artifact.tensors[name] for name in names), key=lambda info: (-info.nbytes, info.name))
    with ExitStack() as stack:
        opened = _opened(artifact, infos, stack)
        pool = stack.enter_context(ThreadPoolExecutor(threads or len(os.sched_getaffinity(0))))
        found = list(pool.map(lambda info: _digest(opened[info.file], info), infos))
    problems = [
        _differs(info, wanted.get(info.name), digest)
        for info, digest in zip(infos, found, strict=True)
        if wanted.get(info.name) != digest
    ]
    if problems:
        raise Refused.together(problems)


def check_samples(artifact: Artifact) -> tuple[Warning_, ...]:
    """Raise VerifyError that names every tensor that has the bytes of another one of the same artifact.

    Returns warnings, for ``tell``, of tensors that have other bytes than they were written with, of a
    config.json that was edited, of tensors that the manifest does not name or that it names alone, and of a
    manifest that is not there.

    Reads half a kilobyte of each tensor. Nothing is compared where the manifest is missing, or of a version
    of w4pack that wrote no samples.
    """
    manifest = artifact.manifest
    if manifest is None:
        return (missing(str(artifact.folder)),)
    written = of_tensors(manifest, "sample")
    infos = [info for name, info in artifact.tensors.items() if name in written]
    with ExitStack() as stack:
        opened = _opened(artifact, infos, stack)

        def sample(info: TensorInfo) -> str:
            return samples.digest(opened[info.file].read, info.offset, info.nbytes)

        changed = refuse_exchanged(infos, written, sample, str(artifact.folder))
    folder = str(artifact.folder)
    with LocalStore(folder) as store:
        told = edited(store.read(CONFIG, MAX_CONFIG), manifest, folder)
    return (*told, *unmatched(artifact.tensors, manifest, folder), *changed)


def tell(found: Iterable[Warning_]) -> None:
    """Give warnings as Python does, to whoever called the caller's caller."""
    for warning in found:
        warnings.warn(warning.text(), stacklevel=4)


def _opened(artifact: Artifact, infos: Iterable[TensorInfo], stack: ExitStack) -> dict[str, WeightFile]:
    files = sorted({info.file for info in infos})
    return {name: stack.enter_context(WeightFile(*artifact.files[name])) for name in files}


def _digest(file: WeightFile, info: TensorInfo) -> str:
    sha = hashlib.sha256()
    block = memoryview(bytearray(min(BLOCK, info.nbytes)))
    for at in range(0, info.nbytes, BLOCK):
        part = block[: min(BLOCK, info.nbytes - at)]
        file.fill(part, info.offset + at)
        sha.update(part)
    return sha.hexdigest()


def _differs(info: TensorInfo, wanted: str | None, found: str) -> VerifyError:
    return VerifyError(
        "the bytes of a tensor are not those that were written",
        code="tensor-hash",
        where=f"{info.file}, {info.name}",
        expected=f"sha256 {wanted}" if wanted else f"a sha256 in {MANIFEST}",
        found=f"sha256 {found}",
        hint="fetch the file again, or make the artifact again from its source",
    )


def _hashes(artifact: Artifact) -> dict[str, str]:
    """Return tensor name -> sha256 from the manifest of an artifact."""
    if artifact.manifest is None:
        raise SourceError(
            "the artifact has no manifest to check against",
            code="no-manifest",
            where=str(artifact.folder / MANIFEST),
        )
    return of_tensors(artifact.manifest, "sha256")
