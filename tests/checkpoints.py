"""The checkpoints that real tools wrote: the folder beside the repository if it is there, else data/fixtures.

A copy under ``data/fixtures`` leaves out files that another copy already holds (same SHA-256) and the
recorded logits. ``lay_out`` puts a folder together again, without the oracle's own files.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
COPIES = HERE / "data" / "fixtures"
ORACLE_FILES = ("meta.json", "expected.safetensors")


def shared_root() -> Path | None:
    """Return the folder with the full set, if it is there."""
    given = os.environ.get("W4PACK_SHARED")
    root = Path(given) if given else HERE.parents[1] / "shared"
    return root / "fixtures" if (root / "fixtures").is_dir() else None


def fixtures_root() -> Path:
    """Return the fullest set at hand."""
    return shared_root() or COPIES


def names() -> list[str]:
    """Return the checkpoints that decode or are refused, without the hand-broken ones."""
    return sorted(p.parent.name for p in fixtures_root().glob("*/meta.json") if p.parent.name != "repack")


def broken_names() -> list[str]:
    """Return the hand-broken variants."""
    return sorted(p.parent.name for p in (fixtures_root() / "broken").glob("*/meta.json"))


def meta(name: str) -> dict[str, Any]:
    """Return the record of a checkpoint; ``broken/NAME`` for the broken ones."""
    return json.loads((fixtures_root() / name / "meta.json").read_text(encoding="utf-8"))


@functools.cache
def by_digest() -> dict[str, Path]:
    """Index the copies by what they hold."""
    return {hashlib.sha256(p.read_bytes()).hexdigest(): p for p in COPIES.rglob("*") if p.is_file()}


def lay_out(name: str, target: Path) -> Path:
    """Copy a checkpoint to ``target`` as its tool left it."""
    target.mkdir(parents=True)
    source = fixtures_root() / name
    for file, digest in meta(name)["files"].items():
        if file in ORACLE_FILES:
            continue
        found = source / file if (source / file).exists() else by_digest()[digest]
        place = target / file
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(found, place)
    return target
