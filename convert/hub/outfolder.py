"""The folder that is pushed: which of its files travel, and whether the repository has them already."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from w4pack.convert.errors import OutputError, SourceError, VerifyError
from w4pack.convert.files.checkpoint import open_checkpoint
from w4pack.convert.files.local import LocalStore
from w4pack.convert.files.weightset import choose
from w4pack.convert.hub.card import record_proof
from w4pack.convert.hub.resolve import tensor_names
from w4pack.convert.jobs import manifest
from w4pack.convert.jobs.verify import verify_output
from w4pack.convert.planning.options import HUB_FILE_LIMIT

CARD = "README.md"
CONFIG = "config.json"
FILE_LIMIT = HUB_FILE_LIMIT
CHUNK = 8 << 20
WEIGHTS = (".safetensors", ".bin")


class LocalFile:
    """One file to push. Hashes are made when first needed, and kept."""

    def __init__(self, name: str, path: Path, size: int) -> None:
        self.name = name
        self.path = path
        self.size = size
        self._digests: dict[str, str] = {}
        self._operation: Any = None

    @property
    def is_weights(self) -> bool:
        """Tell whether it is a weight file, and so goes first."""
        return self.name.endswith(WEIGHTS)

    def equals(self, remote: Any) -> bool:
        """Compare with the repository's entry: sha256 of a large file, git's own hash of a small one."""
        if remote is None or remote.size != self.size:
            return False
        if remote.lfs is not None:
            return bool(remote.lfs.sha256 == self.digest("sha256"))
        return bool(remote.blob_id == self.digest("git"))

    def digest(self, kind: str) -> str:
        """Return the hex hash of the file: ``sha256``, or ``git`` (sha1 of a blob object)."""
        if kind == "sha256" and self._operation is not None:
            return str(self._operation.upload_info.sha256.hex())  # made for the upload
        if kind not in self._digests:
            start = hashlib.sha1(b"blob %d\0" % self.size) if kind == "git" else hashlib.sha256()
            self._digests[kind] = _feed(self.path, start.update, start.hexdigest)
        return self._digests[kind]

    def operation(self) -> Any:
        """Return the client's record of this upload: the same one each time, it remembers what was sent."""
        from huggingface_hub import CommitOperationAdd

        if self._operation is None:
            self._operation = CommitOperationAdd(self.name, self.path)
        return self._operation


def _feed(path: Path, update: Callable[[bytes], None], end: Callable[[], str]) -> str:
    try:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                update(chunk)
    except OSError as err:
        raise OutputError("cannot read a file of the output", where=str(path), found=err.strerror) from err
    return end()


def list_output(out: Path) -> list[LocalFile]:
    """List the files of an output, in a fixed order. Raises OutputError if it is none, or not whole."""
    if not out.is_dir():
        raise OutputError("no such folder", code="no-such-folder", where=str(out))
    files = [
        LocalFile(path.relative_to(out).as_posix(), path, path.stat().st_size)
        for path in sorted(out.rglob("*"))
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(out).parts)
    ]
    names = {f.name for f in files}
    if CONFIG not in names:
        raise OutputError(
            "no config.json, so this is no finished output",
            code="not-an-output",
            where=str(out),
            hint="push the folder that `w4pack convert` has written",
        )
    _require_whole(out)
    _require_sizes(files)
    return files


def prove(out: Path) -> bool:
    """Check every tensor against the manifest, and write the result into our card.

    Returns True if the card changed. Raises VerifyError for a tensor that is not what was written,
    SourceError for a manifest that cannot be read.
    """
    with open_checkpoint(LocalStore(out)) as made:
        proof = verify_output(made, manifest.of(made), None, str(out), None, len(os.sched_getaffinity(0)))
    if not proof.ok:
        first = proof.failures[0]
        raise VerifyError(
            "the output is not what was written; nothing was uploaded",
            where=f"{out}: {first.tensor}",
            expected=first.expected,
            found=first.found,
            hint=f"`w4pack verify {out}` lists all differences",
        )
    return record_proof(out, proof.tensors, proof.compared)


def _require_whole(out: Path) -> None:
    store = LocalStore(out)
    try:
        choose(store, lambda name: tensor_names(store, name))
    except SourceError as err:
        raise OutputError(err.what, code=err.code, where=err.where, found=err.found) from err
    finally:
        store.close()


def _require_sizes(files: list[LocalFile]) -> None:
    for file in files:
        if file.size > FILE_LIMIT:
            raise OutputError(
                "the file is too large for the Hub",
                code="file-too-large",
                where=os.fspath(file.path),
                expected=f"at most {FILE_LIMIT:,} bytes",
                found=f"{file.size:,}",
                hint="convert again with `--max-shard-size 5GB`",
            )
