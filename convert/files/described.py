"""What the manifest of an output says of its tensors, for whoever is about to use them."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from w4pack.convert.core.facts import Warning_
from w4pack.convert.errors import SourceError, VerifyError
from w4pack.convert.files.store import Store
from w4pack.convert.files.tensorfile import TensorInfo

MANIFEST = "w4pack.json"
HEAD_BYTES = 1 << 18  # what may name many layers lies before the large tables
LIMIT = 512 << 20  # bytes; the manifest of a 70B model with folded orders has a few MB


def read_manifest(store: Store) -> Mapping[str, Any] | None:
    """Return the manifest of an output, None without one. Raises SourceError for one that is no object."""
    if MANIFEST not in store.files():
        return None
    where = f"{store.label}/{MANIFEST}"
    try:
        found = json.loads(store.read(MANIFEST, LIMIT))
    except (ValueError, RecursionError) as err:
        raise _unreadable(where, err) from err
    if not isinstance(found, dict):
        raise _unreadable(where, TypeError("no object"))
    return found


def of_tensors(folder: str, manifest: Mapping[str, Any], key: str, *, in_all: bool) -> dict[str, str]:
    """Return tensor name -> what a manifest says of it.

    in_all  of every tensor, or the manifest is incomplete

    Raises SourceError for one that cannot be used.
    """
    try:
        tensors = manifest["tensors"]
        return {str(name): str(entry[key]) for name, entry in tensors.items() if in_all or key in entry}
    except (KeyError, TypeError, AttributeError) as err:
        raise _unreadable(f"{folder}/{MANIFEST}", err) from err


def relabelled(
    tensors: Mapping[str, TensorInfo], manifest: Mapping[str, Any], folder: str
) -> Iterator[VerifyError]:
    """Yield what says that a header gives a tensor another dtype or shape than it was written with.

    Bytes tell nothing of it: their hashes are right, and mean other numbers. Tensors that the manifest does
    not know, or says nothing of, are left alone.

    tensors   name -> what the headers say
    manifest  as ``read_manifest`` returns it
    folder    of the output, for messages

    Raises SourceError for a manifest that cannot be used.
    """
    try:
        told = manifest.get("tensors", {}).items()
        written = [(name, entry.get("dtype"), entry.get("shape")) for name, entry in told]
    except AttributeError as err:
        raise _unreadable(f"{folder}/{MANIFEST}", err) from err
    for name, dtype, shape in written:
        info = tensors.get(name)
        if info is None or (dtype in (None, info.dtype) and shape in (None, list(info.shape))):
            continue
        wanted = f"{dtype or info.dtype} {list(info.shape) if shape is None else shape}"
        yield VerifyError(
            "a tensor has another dtype or shape than it was written with",
            code="tensor-relabelled",
            where=f"{info.file}, {name}",
            expected=f"{wanted}, as {MANIFEST} says",
            found=f"{info.dtype} {list(info.shape)}",
            hint=f"w4pack verify {folder}; take the file as it was written",
        )


def missing(folder: str) -> Warning_:
    """Return the warning of an artifact without a manifest: whatever was changed in it goes unseen."""
    return Warning_(
        "no-manifest",
        folder,
        f"{MANIFEST}, with which tensors and records are compared",
        "none",
        "take it from where the weights are from",
    )


def edited(store: Store, name: str, manifest: Mapping[str, Any]) -> tuple[Warning_, ...]:
    """Return a warning where a settings file is not the one that was written; none where nothing tells.

    People edit them on purpose. But heads of another number and size, say, may have weights of the same
    shapes, and compute another model.
    """
    files = manifest.get("files")
    told = files.get(name) if isinstance(files, Mapping) else None
    if not isinstance(told, str) or hashlib.sha256(store.read(name, LIMIT)).hexdigest() == told:
        return ()
    where = f"{store.label}/{name}"
    return (Warning_("file-edited", where, "the file as it was written", "another, which is taken as it is"),)


def manifest_head(store: Store) -> dict[str, Any]:
    """Return the first members of an output's manifest; none where there is none that can be read.

    Options, report and rotation stand before its tables, so of a far manifest of megabytes no more is read.
    """
    if MANIFEST not in store.files():
        return {}
    blob = store.blob(MANIFEST)
    head = bytearray(min(blob.size, HEAD_BYTES))
    blob.read_into(0, memoryview(head))
    return _members(head.decode("utf-8", "replace"))


def _members(text: str) -> dict[str, Any]:
    """Return the members of the JSON object that a text begins with, as far as they are whole."""
    found: dict[str, Any] = {}
    decoder, mark, rest = json.JSONDecoder(), *text.lstrip().partition("{")[1:]
    while mark in ("{", ","):
        try:
            key, end = decoder.raw_decode(rest.lstrip())
            rest = rest.lstrip()[end:].partition(":")[2].lstrip()
            value, end = decoder.raw_decode(rest)
        except (ValueError, RecursionError):
            break
        found[str(key)] = value
        rest = rest[end:].lstrip()
        mark, rest = rest[:1], rest[1:]
    return found


def _unreadable(where: str, err: Exception) -> SourceError:
    found = f"{type(err).__name__}: {err}".partition("\n")[0][:200]
    return SourceError("the manifest cannot be read", code="manifest", where=where, found=found)
