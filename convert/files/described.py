"""What the manifest of an output says of its tensors, for whoever is about to use them."""

import json
from collections.abc import Mapping
from typing import Any

from w4pack.convert.errors import SourceError
from w4pack.convert.files.store import Store

MANIFEST = "w4pack.json"
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


def _unreadable(where: str, err: Exception) -> SourceError:
    found = f"{type(err).__name__}: {err}".partition("\n")[0][:200]
    return SourceError("the manifest cannot be read", code="manifest", where=where, found=found)
