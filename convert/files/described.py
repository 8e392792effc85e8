"""What the manifest of an output says of its tensors and settings, for whoever is about to use them."""

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from w4pack.convert.core.facts import Warning_
from w4pack.convert.errors import VerifyError, name_some
from w4pack.convert.files.jsonfile import parse_object
from w4pack.convert.files.manifestform import LIMIT, MANIFEST, parse
from w4pack.convert.files.store import Store
from w4pack.convert.files.tensorfile import TensorInfo

# Tables that models compute for themselves: old files hold some, and nobody reads them.
COMPUTED = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
# Keys of config.json that no layer of a model and no loader reads, so their values change no number.
IDLE = ("_name_or_path", "transformers_version", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id")
DIGITS = 16  # of the digest of a setting


def read_manifest(store: Store) -> Mapping[str, Any] | None:
    """Return the manifest of an output, None without one. Raises as ``manifestform.parse``."""
    if MANIFEST not in store.files():
        return None
    return parse(store.read(MANIFEST, LIMIT), f"{store.label}/{MANIFEST}")


def of_tensors(manifest: Mapping[str, Any], key: str) -> dict[str, str]:
    """Return tensor name -> what a manifest says of it, as far as it does."""
    return {name: entry[key] for name, entry in manifest.get("tensors", {}).items() if key in entry}


def relabelled(
    tensors: Mapping[str, TensorInfo], manifest: Mapping[str, Any], folder: str
) -> Iterator[VerifyError]:
    """Yield what says that a header gives a tensor another dtype or shape than it was written with.

    Bytes tell nothing of it: their hashes are right, and mean other numbers. Tensors that the manifest does
    not know are left alone.

    tensors   name -> what the headers say
    manifest  as ``read_manifest`` returns it, or empty
    folder    of the output, for messages
    """
    for name, entry in manifest.get("tensors", {}).items():
        info = tensors.get(name)
        if info is None or (entry["dtype"], entry["shape"]) == (info.dtype, list(info.shape)):
            continue
        yield VerifyError(
            "a tensor has another dtype or shape than it was written with",
            code="tensor-relabelled",
            where=f"{info.file}, {name}",
            expected=f"{entry['dtype']} {entry['shape']}, as {MANIFEST} says",
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


def unmatched(tensors: Collection[str], manifest: Mapping[str, Any], folder: str) -> tuple[Warning_, ...]:
    """Return warnings of tensors that the manifest of an artifact does not name, and of those that it names
    alone: a model says what it misses, but nothing else tells whether the others are the ones it was made of.
    """
    told = manifest["tensors"]
    more = [name for name in tensors if name not in told and not name.endswith(COMPUTED)]
    gone = [name for name in told if name not in tensors]
    hint, found = f"w4pack verify {folder}", []
    if more:
        none = "none, so nothing of it is compared"
        found.append(Warning_("tensor-unlisted", name_some(more), f"its record in {MANIFEST}", none, hint))
    if gone:
        found.append(Warning_("tensor-gone", name_some(gone), f"a tensor, as {MANIFEST} says", "none", hint))
    return tuple(found)


def settings(config: Mapping[str, Any]) -> dict[str, str]:
    """Return key -> digest of its value, as it is read from a file, however it is written there (spaces, the
    order of keys, 1 or 1.0).

    Artifacts hold it: a later version must come to the same of what it knew before.
    """
    texts = {key: json.dumps(_canonical(value), sort_keys=True) for key, value in config.items()}
    return {key: hashlib.sha256(text.encode()).hexdigest()[:DIGITS] for key, text in texts.items()}


def _canonical(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _canonical(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_canonical(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def edited(raw: bytes, manifest: Mapping[str, Any], folder: str) -> tuple[Warning_, ...]:
    """Return a warning where config.json, ``raw``, says something else than was written; none where not.

    People edit them on purpose. But heads of another number and size, say, may have weights of the same
    shapes, and compute another model. The first manifests have the hash of the file alone.
    """
    if hashlib.sha256(raw).hexdigest() == manifest["files"]["config.json"]:
        return ()
    where, told = f"{folder}/config.json", manifest.get("config")
    if told is None:
        found = "another, which is taken as it is"
        return (Warning_("file-edited", where, "the file as it was written", found),)
    own = settings(parse_object(raw, where))
    keys = [key for key in {**told, **own} if told.get(key) != own.get(key) and key not in IDLE]
    if not keys:
        return ()
    found = f"others of {name_some(keys)}, which are taken as they are"
    return (Warning_("file-edited", where, "the values that were written", found),)
