"""Opening a source that the user names: a folder, or a repository on the Hub, whole or by range requests."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from w4pack.convert.events import Reporter
from w4pack.convert.files.checkpoint import Checkpoint, open_checkpoint
from w4pack.convert.files.local import LocalStore
from w4pack.convert.hub.resolve import HubSource, LocalSource, commit_of, parse_source, snapshot


@dataclass(frozen=True, slots=True)
class Where:
    """How to reach a source on the Hub."""

    revision: str | None = None
    cache_dir: str | None = None
    local_files_only: bool = False


@contextmanager
def opened(
    text: str | Path, where: Where, reporter: Reporter
) -> Iterator[tuple[Checkpoint, Mapping[str, str] | None]]:
    """Open a source for reading whole, a Hub id downloaded first. Yields it and its origin, if any."""
    found = parse_source(str(text), where.revision)
    origin: Mapping[str, str] | None = None
    if isinstance(found, HubSource):
        reporter.event("note", text=found.notice)
        folder = snapshot(found, cache_dir=where.cache_dir, local_files_only=where.local_files_only)
        commit = commit_of(folder)
        origin = {"id": found.repo_id, **({"revision": commit} if commit else {})}
    else:
        folder = found.path
    with open_checkpoint(LocalStore(folder)) as checkpoint:
        yield checkpoint, origin


@contextmanager
def glimpsed(
    text: str | Path, where: Where, reporter: Reporter, *, thorough: bool
) -> Iterator[tuple[Checkpoint, str]]:
    """Open a source for a question: a folder, or the Hub by range requests, without a download."""
    found = parse_source(str(text), where.revision)
    if isinstance(found, LocalSource):
        with open_checkpoint(LocalStore(found.path)) as checkpoint:
            yield checkpoint, found.label
        return
    if where.local_files_only:
        with opened(text, where, reporter) as (checkpoint, _):
            yield checkpoint, found.label
        return
    from w4pack.convert.hub.remote import HubStore

    reporter.event("note", text=found.notice)
    with open_checkpoint(HubStore(found, thorough=thorough)) as checkpoint:
        yield checkpoint, found.label
