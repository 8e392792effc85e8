"""What a build of the GPU code has made: a row for each file, kept from file to file and at the end."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from threading import get_ident

from w4pack.kernels.compiler import NVRTC_VERSION

CUBINS = Path(__file__).resolve().parent / "cubins"
NOTES = "manifest.part"  # a row a line, of what a build has made so far
Row = dict[str, object]


def write_whole(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.{get_ident()}")
    part.write_bytes(content)
    part.replace(path)


def note(rows: Iterable[Row], out: Path) -> None:
    """Keep the rows of what was made, for a build that does not come to its end."""
    with (out / NOTES).open("a") as notes:
        notes.writelines(json.dumps(row) + "\n" for row in rows)


def read_manifest(out: Path = CUBINS) -> list[Row]:
    """Return the rows of a build's manifest, and of one that did not end; none where there was none."""
    try:
        rows = json.loads((out / "manifest.json").read_text())["files"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        rows = []
    found = {str(row["path"]): row for row in rows}
    notes = out / NOTES
    for line in notes.read_text().splitlines() if notes.is_file() else ():
        try:
            row = json.loads(line)
        except ValueError:  # the last one, torn
            continue
        found[str(row["path"])] = row
    return list(found.values())


def write_manifest(rows: list[Row], out: Path = CUBINS) -> None:
    """Write the manifest, and keep version control away from what was built."""
    out.mkdir(parents=True, exist_ok=True)
    (out / ".gitignore").write_text("*\n")
    version = ".".join(map(str, NVRTC_VERSION))
    text = json.dumps({"nvrtc": version, "files": rows}, indent=1) + "\n"
    write_whole(out / "manifest.json", text.encode())
    (out / NOTES).unlink(missing_ok=True)
