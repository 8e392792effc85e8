"""Compares tensors with what the converter wrote of each: all bytes on request, a sample always.

A sample is half a kilobyte. It tells tensors of one shape that were exchanged, which nothing else would: a
model would load and say nonsense. A tensor that is none of those that were written is left alone: whoever
changed it may have meant to.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from w4pack.convert.errors import Refused, SourceError, VerifyError, name_some
from w4pack.convert.files import samples
from w4pack.convert.files.local import LocalStore
from w4pack.convert.files.tensorfile import TensorInfo
from w4pack.kernels.artifact import Artifact
from w4pack.kernels.workers import WeightFile

MANIFEST = "w4pack.json"
LIMIT = 512 << 20  # bytes; the manifest of a 70B model with folded orders has a few MB
BLOCK = 4 << 20  # bytes hashed at a time: stays in the cache
READERS = 16  # threads that read samples: they wait for the disk, not for a core
TOGETHER = 64  # tensors that one of them takes at a time


def check(artifact: Artifact, names: Iterable[str], threads: int | None = None) -> None:
    """Raise SourceError that names every tensor of ``names`` whose bytes have another sha256 than written.

    threads  default: the cores
    """
    wanted = read_hashes(artifact.folder)
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


def check_samples(artifact: Artifact) -> None:
    """Raise VerifyError that names every tensor that has the bytes of another one of the same artifact.

    Also for a config.json that has lost its ``online`` records: the weights are rotated for them. Reads half
    a kilobyte of each tensor. Nothing is compared where the manifest is missing, or of a version of w4pack
    that wrote no samples.
    """
    manifest = _manifest(artifact.folder)
    if manifest is None:
        return
    if not artifact.quant.get("online") and _ran_online(manifest):
        raise _lost_records(artifact)
    written = _of_tensors(artifact.folder, manifest, "sample", in_all=False)
    infos = [info for name, info in artifact.tensors.items() if name in written]
    infos.sort(key=lambda info: (info.file, info.offset))
    parts = [infos[at : at + TOGETHER] for at in range(0, len(infos), TOGETHER)]
    with ExitStack() as stack:
        opened = _opened(artifact, infos, stack)

        def differing(part: Sequence[TensorInfo]) -> list[tuple[TensorInfo, str]]:
            found = [(i, samples.digest(opened[i.file].read, i.offset, i.nbytes)) for i in part]
            return [(info, digest) for info, digest in found if digest != written[info.name]]

        pool = stack.enter_context(ThreadPoolExecutor(READERS))
        changed = [pair for pairs in pool.map(differing, parts) for pair in pairs]
    owners = {digest: name for name, digest in written.items()} if changed else {}
    exchanged = {info: owners[digest] for info, digest in changed if digest in owners}
    if exchanged:
        raise _exchanged(exchanged, artifact)


def _opened(artifact: Artifact, infos: Iterable[TensorInfo], stack: ExitStack) -> dict[str, WeightFile]:
    files = sorted({info.file for info in infos})
    return {name: stack.enter_context(WeightFile(*artifact.files[name])) for name in files}


class _Exchanged(VerifyError):
    """Tensors with the bytes of others: whose bytes each has is told of all at once."""

    def __str__(self) -> str:
        return self._text()


def _exchanged(owners: Mapping[TensorInfo, str], artifact: Artifact) -> VerifyError:
    """Return the error of tensors that have the bytes of others: tensor -> whose."""
    problems = [_holds([(info, owner)], artifact) for info, owner in owners.items()]
    err = _holds(list(owners.items()), artifact)
    err.problems = tuple(problems) if len(problems) > 1 else ()
    return err


def _holds(pairs: Sequence[tuple[TensorInfo, str]], artifact: Artifact) -> VerifyError:
    one = len(pairs) == 1
    files = name_some(list(dict.fromkeys(info.file for info, _ in pairs)))
    names = name_some([info.name for info, _ in pairs])
    found = pairs[0][1] if one else name_some([f"{owner} in {info.name}" for info, owner in pairs])
    return _Exchanged(
        f"{'a tensor holds' if one else 'tensors hold'} the bytes that were written as another one",
        code="tensor-exchanged",
        where=f"{files}{', ' if one else ': '}{names}",
        expected=f"its own, as {MANIFEST} says",
        found=f"those of {found}",
        hint=f"w4pack verify {artifact.folder}",
    )


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
    manifest = _manifest(folder)
    if manifest is None:
        raise SourceError(
            "the artifact has no manifest to check against", code="no-manifest", where=str(folder / MANIFEST)
        )
    return _of_tensors(folder, manifest, "sha256", in_all=True)


def _ran_online(manifest: Mapping[str, Any]) -> bool:
    """Return whether the artifact was made with work between its layers, by the options of the conversion."""
    options = manifest.get("options")
    asked = options if isinstance(options, dict) else {}
    quantize = asked.get("quantize")
    bits = [quantize.get(name, 16) for name in ("act_bits", "kv_bits")] if isinstance(quantize, dict) else []
    return asked.get("rotate") == "full" or any(b != 16 for b in bits)


def _lost_records(artifact: Artifact) -> SourceError:
    return SourceError(
        "config.json has lost what runs between the layers: these weights would compute another model",
        code="artifact-online",
        where=f"{artifact.folder / 'config.json'}: quantization_config.online",
        expected=f"the records, as the options in {MANIFEST} say",
        found="none",
        hint=f"w4pack verify {artifact.folder}; take config.json as it was written",
    )


def _manifest(folder: Path) -> Mapping[str, Any] | None:
    """Return the manifest of an artifact, None without one. Raises SourceError for one that is no object."""
    with LocalStore(folder) as store:
        if MANIFEST not in store.files():
            return None
        where, raw = store.path_of(MANIFEST), store.read(MANIFEST, LIMIT)
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError) as err:
        raise _unreadable(where, err) from err
    if not isinstance(found, dict):
        raise _unreadable(where, TypeError("no object"))
    return found


def _of_tensors(folder: Path, manifest: Mapping[str, Any], key: str, *, in_all: bool) -> dict[str, str]:
    """Return tensor name -> what a manifest says of it.

    in_all  of every tensor, or the manifest is incomplete
    Raises SourceError for one that cannot be used.
    """
    try:
        tensors = manifest["tensors"]
        return {str(name): str(entry[key]) for name, entry in tensors.items() if in_all or key in entry}
    except (KeyError, TypeError, AttributeError) as err:
        raise _unreadable(folder / MANIFEST, err) from err


def _unreadable(where: object, err: Exception) -> SourceError:
    found = f"{type(err).__name__}: {err}".partition("\n")[0][:200]
    return SourceError("the manifest cannot be read", code="manifest", where=str(where), found=found)
