"""The staging folder: what is being written, beside OUT on its file system, until one rename publishes it.

    OUT.w4pack-staging/journal.jsonl   what is finished (``journal``)
    OUT.w4pack-staging/out/            the future OUT

Nothing is ever half-published: OUT appears complete by a rename, or not at all.
"""

import contextlib
import fcntl
import os
import shutil
from pathlib import Path

from w4pack.convert.errors import OutputError
from w4pack.convert.jobs.writing import step, sync_folder, write_file, writing

STAGING_SUFFIX = ".w4pack-staging"
OLD_SUFFIX = ".w4pack-old"
REPLACING = "replacing"  # mark in the staging folder: OUT.w4pack-old is the OUT that is being replaced
MODEL_FILES = ("config.json", "w4pack.json")


class Staging:
    """The staging folder of one OUT, locked against a second process."""

    def __init__(self, out: Path) -> None:
        self.named = out
        if out.is_symlink():
            out = out.resolve()  # work beside the folder itself, and leave the link as it is
        self.target = out
        self.root = out.parent / (out.name + STAGING_SUFFIX)
        self.out = self.root / "out"
        self.journal = self.root / "journal.jsonl"
        self.old = out.parent / (out.name + OLD_SUFFIX)
        self._lock: int | None = None

    @property
    def standing(self) -> Path:
        """Where the OUT of an earlier run lies now, if there is one: moved aside if an overwrite died."""
        return self.old if self._old_comes_back() else self.named

    @property
    def unfinished(self) -> bool:
        """Whether there is finished work of an earlier run that is not published."""
        if not (self.out.is_dir() and self.journal.is_file()):
            return False
        try:
            return self.journal.read_bytes().count(b"\n") > 1  # more than the line that names the job
        except OSError:
            return True  # nobody knows, so nothing is thrown away

    def check(self, *, overwrite: bool, resume: bool) -> None:
        """Raise the OutputError that ``prepare`` would raise. Changes nothing."""
        found = self._is_there()
        if found:
            with writing(self.root):
                self._take_lock()
            self.close()
        self.check_standing(overwrite=overwrite, resume=resume)

    def check_standing(self, *, overwrite: bool, resume: bool) -> None:
        """Raise what ``check`` does, but for another process at work. Takes no lock: a whole team may ask."""
        found = self._is_there()
        self._check_free(self.standing, overwrite or self._was_published(found, resume))
        self._keep_unfinished(overwrite=overwrite, resume=resume)

    def put_back(self) -> None:
        """Put an OUT back that an overwrite which died had moved aside. Raises OutputError."""
        if not self._old_comes_back():
            return
        found = self._is_there()
        with writing(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            self._recover()
        if not found:
            self.discard()
        self.close()

    def prepare(self, *, overwrite: bool, resume: bool) -> bool:
        """Make or re-enter the folder. Returns True if an earlier run's work is there to resume.

        Raises OutputError if OUT has content, or an earlier run has left work, and ``overwrite`` is not
        given; or if another process is at work.
        """
        found = self._is_there()
        try:
            with writing(self.root):
                self.root.mkdir(parents=True, exist_ok=True)
                self._take_lock()
                self._recover()
            self._check_free(self.named, overwrite or self._was_published(found, resume))
            self._keep_unfinished(overwrite=overwrite, resume=resume)
        except OutputError as err:
            if not found and err.code != "locked":
                self.discard()
            raise
        with writing(self.root):
            if found and not resume:
                self._empty()
            self.out.mkdir(exist_ok=True)
        return found and resume and self.journal.is_file()

    def _check_free(self, out: Path, overwrite: bool) -> None:
        check_free(out, overwrite=overwrite, unfinished=self.unfinished)

    def _was_published(self, found: bool, resume: bool) -> bool:
        """Claim: the run that is resumed had renamed its result to OUT when it ended."""
        return resume and found and not self.out.exists()

    def _keep_unfinished(self, *, overwrite: bool, resume: bool) -> None:
        """Raise OutputError where neither option says what becomes of an earlier run's work."""
        if not (overwrite or resume) and self.unfinished:
            raise OutputError(
                "an unfinished run of this output is there",
                code="unfinished",
                where=str(self.root),
                expected="`--resume`, which goes on with it, or `--overwrite`, which deletes it",
                found="neither",
                hint="the command that began it, with `--resume`",
            )

    def _is_there(self) -> bool:
        """Whether there is a staging folder. Raises OutputError for one that no earlier run has made."""
        found = self.root.is_dir() or self.root.is_symlink()
        if found:
            self._refuse_foreign()
        return found

    def _refuse_foreign(self) -> None:
        """Raise OutputError if what has the staging folder's name was not made by an earlier run."""
        names = (
            set()
            if self.root.is_symlink() or not self.root.is_dir()
            else {p.name for p in self.root.iterdir()}
        )
        ours = (
            names <= {"journal.jsonl", "out", REPLACING} and not self.root.is_symlink() and self.root.is_dir()
        )
        begun = self.journal.is_file() or not (self.out.is_dir() and any(self.out.iterdir()))
        if not (ours and begun and not self.out.is_symlink()):
            raise OutputError(
                "something that is not ours has the name of the staging folder",
                code="output-exists",
                where=str(self.root),
                expected="a folder that an earlier run left, or nothing",
                found="other content",
                hint="move it away, or choose another OUT",
            )

    def _recover(self) -> None:
        """Finish what an overwrite that died left between its renames: put OLD back, or remove it.

        A mark in the staging folder, or a manifest in OLD, says that it is ours to move; only the mark lets
        it be removed.
        """
        if self._old_comes_back():
            step()
            self.old.rename(self.target)
        self.remove_old()

    def _old_comes_back(self) -> bool:
        ours = (self.root / REPLACING).exists() or (self.old / "w4pack.json").is_file()
        return ours and not self.target.exists() and self.old.is_dir() and not self.old.is_symlink()

    def remove_old(self) -> None:
        """Remove what an overwrite moved aside, if a new OUT stands in its place."""
        mark = self.root / REPLACING
        if mark.exists() and self.old.is_dir() and self.target.exists():
            step()
            shutil.rmtree(self.old)
        mark.unlink(missing_ok=True)

    def _take_lock(self) -> None:
        self._lock = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            self._lock = None
            raise OutputError(
                "another process is writing this output",
                code="locked",
                where=str(self.root),
                hint="wait for it to end, or choose another OUT",
            ) from None

    def _empty(self) -> None:
        """Remove an earlier run's work; the folder itself stays, as the lock is on it."""
        self.journal.unlink(missing_ok=True)
        if self.out.exists():
            shutil.rmtree(self.out)

    def publish(self, *, overwrite: bool) -> None:
        """Make OUT appear: fsync everything, move an old OUT aside, rename, remove what is left."""
        with writing(self.target):
            for folder, _, _ in os.walk(self.out, topdown=False):
                sync_folder(Path(folder))
            had_old = overwrite and self.target.exists() and any(self.target.iterdir())
            if had_old:
                self._move_aside()
            step()
            self.out.rename(self.target)
            sync_folder(self.target.parent)
            self.remove_old()
            self.discard()

    def _move_aside(self) -> None:
        if self.old.exists() or self.old.is_symlink():
            raise OutputError(
                "the place for the old OUT is taken",
                code="output-exists",
                where=str(self.old),
                hint="move it away, then run the same command with `--resume`",
            )
        write_file(self.root / REPLACING, b"")
        sync_folder(self.root)
        step()
        self.target.rename(self.old)

    def discard(self) -> None:
        """Remove the staging folder: the work is published, or cannot be continued.

        The journal goes last: without it an earlier run's files are nobody's. Where the future OUT is gone,
        as behind a publication, or empty, this takes no file descriptor: there may be none left.
        """
        step()
        try:
            self.out.rmdir()
        except FileNotFoundError:
            pass
        except OSError:
            shutil.rmtree(self.out, ignore_errors=True)
        with contextlib.suppress(OSError):
            (self.root / REPLACING).unlink(missing_ok=True)
            self.journal.unlink(missing_ok=True)
            self.root.rmdir()
        self.close()

    def close(self) -> None:
        """Release the lock; the folder stays for ``--resume``."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def check_free(out: Path, *, overwrite: bool, unfinished: bool = False) -> None:
    """Raise OutputError unless OUT is new, an empty folder, or may be replaced.

    unfinished  work that is to replace OUT is there, which ``--overwrite`` alone would delete
    """
    if out.is_symlink() and not out.exists():
        hint = "remove the link, or choose another OUT"
        raise OutputError("OUT is a link to nothing", code="output-exists", where=str(out), hint=hint)
    if not out.exists():
        return
    if out.is_mount():
        raise OutputError(
            "OUT is a mount point, which no rename can replace",
            code="output-exists",
            where=str(out),
            hint=f"write to a folder inside it: {out / 'model'}",
        )
    if not out.is_dir():
        raise OutputError(
            "OUT is a file",
            code="output-exists",
            where=str(out),
            expected="a new or an empty folder",
            found="a file",
            hint="choose another OUT",
        )
    names = {p.name for p in out.iterdir()}
    if names and overwrite and not any(n in MODEL_FILES or n.endswith(".safetensors") for n in names):
        raise OutputError(
            "OUT holds no model, so `--overwrite` does not replace it",
            code="output-exists",
            where=str(out),
            expected="an earlier output, a model, or an empty folder",
            found=", ".join(sorted(names)[:3]),
            hint="remove it yourself, or choose another folder",
        )
    if names and not overwrite:
        hint = "choose another folder, or replace this one with `--overwrite`"
        if unfinished:
            hint = (
                "`--resume --overwrite` with the command that began the unfinished run goes on with it and "
                "replaces OUT; `--overwrite` alone deletes its work"
            )
        raise OutputError(
            "OUT is not empty",
            code="output-exists",
            where=str(out),
            expected="a new or an empty folder",
            found="a folder with content",
            hint=hint,
        )


def check_apart(source: Path, out: Path) -> None:
    """Raise OutputError if OUT, or a folder made beside it, overlaps SRC, which is never written."""
    src, dst = source.resolve(), out.resolve()
    beside = [dst.parent / (dst.name + suffix) for suffix in (STAGING_SUFFIX, OLD_SUFFIX)]
    for place in (dst, *beside):
        if src == place or src in place.parents or place in src.parents:
            raise OutputError(
                "OUT and SRC overlap",
                code="output-in-source",
                where=str(out),
                expected="a folder apart from the source",
                found=f"source {source}",
                hint="choose another OUT",
            )
