"""Everything of the output but its weights: side files, index, manifest, config.json, in a safe order.

config.json comes last: a folder without it loads nowhere.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from w4pack.convert.files.checkpoint import Checkpoint
from w4pack.convert.files.described import settings
from w4pack.convert.files.shards import index_json
from w4pack.convert.files.store import chunks
from w4pack.convert.jobs import manifest
from w4pack.convert.jobs.writing import step, write_all, write_file, writing
from w4pack.convert.planning.output import output_config
from w4pack.convert.planning.plan import Plan

CARD = "README.md"
SOURCE_CARD = "README.source.md"
TWO_SETTINGS = ("gptq", "marlin-legacy")  # targets whose readers also look for quantize_config.json


def carried(checkpoint: Checkpoint) -> dict[str, str]:
    """Return what an output holds byte for byte: name in the output -> name in the source.

    The source's card makes way for ours; a card it has kept of its own source goes before it.
    """
    return {SOURCE_CARD if name == CARD else name: name for name in sorted(checkpoint.side_files)}


def copy_side_files(checkpoint: Checkpoint, out: Path) -> dict[str, str]:
    """Copy every side file byte for byte. Returns name -> sha256."""
    return {target: copy_file(checkpoint, name, out / target) for target, name in carried(checkpoint).items()}


def copy_file(checkpoint: Checkpoint, name: str, path: Path) -> str:
    """Copy one file of the source to ``path`` and fsync it. Returns its sha256."""
    sha = hashlib.sha256()
    blob = checkpoint.store.blob(name)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        step()
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            for offset, data in chunks(blob.read_into, blob.size):
                write_all(fd, memoryview(data), offset)
                sha.update(data)
            os.fsync(fd)
        finally:
            os.close(fd)
    return sha.hexdigest()


def config_bytes(config: Mapping[str, Any]) -> bytes:
    """Return config.json as the field writes it: two spaces, a final newline."""
    return json.dumps(config, indent=2, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"


def write_rest(
    out: Path,
    plan: Plan,
    source_config: Mapping[str, Any],
    side_files: Mapping[str, str],
    manifest_value: Mapping[str, Any],
    card: str | None,
) -> None:
    """Write index, second settings file, card, manifest and, last, config.json.

    The manifest gets the hash of every file but itself and the card, into which `verify` results are written,
    and a digest of every setting of config.json.
    """
    made = {"config.json": config_bytes(output_config(source_config, plan))}
    shards = plan.shards()
    if len(shards) > 1:
        made["model.safetensors.index.json"] = index_json(shards)
    if plan.target in TWO_SETTINGS and plan.quant_config is not None:
        made["quantize_config.json"] = config_bytes(plan.quant_config)
    for name, data in made.items():
        if name != "config.json":
            write_file(out / name, data)
    if card is not None:
        write_file(out / CARD, card.encode())
    hashes = {**side_files, **{name: hashlib.sha256(data).hexdigest() for name, data in made.items()}}
    files = dict(sorted(hashes.items()))
    told = {**manifest_value, "files": files, "config": settings(json.loads(made["config.json"]))}
    write_file(out / manifest.NAME, manifest.dump(told))
    write_file(out / "config.json", made["config.json"])
