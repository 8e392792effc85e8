"""Everything of the output but its weights: side files, index, manifest, config.json, in a safe order.

config.json comes last: a folder without it loads nowhere.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from w4pack.convert.files import tensorfile
from w4pack.convert.files.checkpoint import Checkpoint
from w4pack.convert.files.store import chunks
from w4pack.convert.jobs import manifest
from w4pack.convert.jobs.staging import step, write_all, write_file, writing
from w4pack.convert.planning.plan import Plan, output_config

CARD = "README.md"
SOURCE_CARD = "README.source.md"


def copy_side_files(checkpoint: Checkpoint, out: Path, *, keep_card: bool = False) -> list[str]:
    """Copy every side file byte for byte; the source's card makes way for ours unless ``keep_card``."""
    written = []
    for name in checkpoint.side_files:
        if name == manifest.NAME:
            continue
        target = SOURCE_CARD if name == CARD and not keep_card else name
        copy_file(checkpoint, name, out / target)
        written.append(target)
    return written


def copy_file(checkpoint: Checkpoint, name: str, path: Path) -> None:
    """Copy one file of the source to ``path`` and fsync it."""
    blob = checkpoint.store.blob(name)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        step()
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            for offset, data in chunks(blob.read_into, blob.size):
                write_all(fd, memoryview(data), offset)
            os.fsync(fd)
        finally:
            os.close(fd)


def config_bytes(config: Mapping[str, Any]) -> bytes:
    """Return config.json as the field writes it: two spaces, a final newline."""
    return json.dumps(config, indent=2, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"


def write_rest(
    out: Path,
    plan: Plan,
    source_config: Mapping[str, Any],
    manifest_value: Mapping[str, Any],
    card: str | None,
) -> None:
    """Write index, second settings file, card, manifest and, last, config.json."""
    shards = plan.shards()
    if len(shards) > 1:
        write_file(out / "model.safetensors.index.json", tensorfile.index_json(shards))
    if plan.target in ("gptq", "marlin-legacy") and plan.quant_config is not None:
        write_file(out / "quantize_config.json", config_bytes(plan.quant_config))
    if card is not None:
        write_file(out / CARD, card.encode())
    write_file(out / manifest.NAME, manifest.dump(manifest_value))
    write_file(out / "config.json", config_bytes(output_config(source_config, plan)))
