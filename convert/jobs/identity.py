"""The source as a job knows it again: where it lies, its files, the manifest of one that is ours."""

import hashlib
from pathlib import Path

from w4pack.convert.files.checkpoint import Checkpoint
from w4pack.convert.files.store import Blob, chunks, digest
from w4pack.convert.jobs import manifest
from w4pack.convert.jobs.verify import refuse_damaged
from w4pack.convert.planning.plan import SourceFile

HEAD_BYTES = 1 << 20  # bytes of a pickle that identify it without ``--strict``
# Pages of a weight file that stand for its values: another training changes all of them, and they cost a few
# reads. Some bytes elsewhere are seen with ``--strict`` alone.
PAGES, PAGE = 64, 4096


def folder_of(checkpoint: Checkpoint) -> Path | None:
    """Return the folder a checkpoint lies in, or None if it is read from elsewhere."""
    root = getattr(checkpoint.store, "root", None)
    return None if root is None else Path(root)


def source_files(checkpoint: Checkpoint, *, strict: bool) -> tuple[SourceFile, ...]:
    """Identify the files that decide a result: weights by size, header and a sample, others by their content.

    ``strict`` adds the sha256 of the whole file, weights included.
    """
    found = []
    for name in checkpoint.weight_files:
        blob = checkpoint.store.blob(name)
        whole = digest(chunks(blob.read_into, blob.size)) if strict else None
        head = _head(blob)
        sample = sample_digest(blob, len(head))
        found.append(SourceFile(name, blob.size, hashlib.sha256(head).hexdigest(), sample, whole))
    for name in _beside_weights(checkpoint):
        blob = checkpoint.store.blob(name)
        content = digest(chunks(blob.read_into, blob.size))
        found.append(SourceFile(name, blob.size, content, None, content if strict else None))
    return tuple(found)


def _beside_weights(checkpoint: Checkpoint) -> list[str]:
    """Return the files beside the weights that a job reads or copies.

    Of a source that is not in a folder those that opening it has read: its revision names the others, which
    a plan need not fetch.
    """
    opened = (*checkpoint.raw, checkpoint.index, manifest.NAME)
    read = {name for name in checkpoint.store.files() if name in opened}
    return sorted(read if folder_of(checkpoint) is None else {*read, *checkpoint.side_files})


def _head(blob: Blob) -> bytes:
    """Return a file's first bytes: of a safetensors file, its whole header."""
    prefix = bytearray(min(8, blob.size))
    blob.read_into(0, memoryview(prefix))
    length = int.from_bytes(prefix, "little") if blob.name.endswith(".safetensors") else HEAD_BYTES
    head = bytearray(min(8 + length, blob.size))
    blob.read_into(0, memoryview(head))
    return bytes(head)


def sample_digest(blob: Blob, start: int) -> str:
    """Return the sha256 of pages that lie evenly from ``start`` to a file's end; of a short one, of all."""
    room, found = blob.size - start, hashlib.sha256()
    if room <= PAGES * PAGE:
        places = [start] if room else []
        page = bytearray(room)
    else:
        places = [start + (room - PAGE) * number // (PAGES - 1) for number in range(PAGES)]
        page = bytearray(PAGE)
    for at in places:
        blob.read_into(at, memoryview(page))
        found.update(page)
    return found.hexdigest()


def refuse_damaged_source(checkpoint: Checkpoint, threads: int) -> None:
    """Raise VerifyError if a source that w4pack wrote is no longer what its manifest says."""
    value = checkpoint.manifest()
    if value is not None:
        refuse_damaged(checkpoint, value, threads)
