"""Calibration text of a data set on the Hub: ``hub:ORG/NAME[@revision][:SPLIT[:COLUMN]]``.

Its files are read as they lie in the repository, without the code of the data set: Parquet, JSONL, or plain
text. Those of a split are the ones whose path has the split as a word of its own (``train.jsonl``,
``data/train-00000-of-00002.parquet``); they are taken in natural order until there is enough text, and the
rest is not downloaded.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from w4pack.convert.core.families import natural_key
from w4pack.convert.errors import SourceError, UsageError
from w4pack.convert.hub.client import QUICK, hub_error, persist
from w4pack.convert.hub.resolve import is_hub_id
from w4pack.convert.quantize.texts import HALF, WHOLE, beginning, half_of_pair, objects

PREFIX = "hub:"
SPLIT, COLUMN = "train", "text"
ENDINGS = (".parquet", ".jsonl", ".txt")  # in the order in which they are preferred
LEAST = 1 << 22  # characters that are read of a plain text in any case
ROWS = 1024  # of a Parquet file in memory at a time


@dataclass(frozen=True, slots=True)
class DataSet:
    """A data set as ``--calibration`` names it."""

    repo_id: str
    revision: str | None
    split: str
    column: str

    def name(self, commit: str) -> str:
        """Return what is recorded: enough to find the same text again."""
        return f"{PREFIX}{self.repo_id}@{commit}:{self.split}:{self.column}"


def parse(spec: str) -> DataSet:
    """Read ``hub:ORG/NAME[@revision][:SPLIT[:COLUMN]]``. Raises UsageError."""
    name, *rest = spec.removeprefix(PREFIX).split(":")
    repo_id, at, revision = name.partition("@")
    if not is_hub_id(repo_id) or (at and not revision) or len(rest) > 2 or not all(rest):
        raise UsageError(
            "not the name of a data set",
            where="--calibration",
            expected=f"{PREFIX}ORG/NAME[@revision][:SPLIT[:COLUMN]]",
            found=spec,
        )
    split, column = [*rest, *(SPLIT, COLUMN)[len(rest) :]]
    return DataSet(repo_id, revision or None, split, column)


def read(spec: str, characters: int) -> tuple[list[str], str]:
    """Download and read a data set until it has given so many characters. Returns (texts, a name for them).

    Raises UsageError for a name that is none, a split or a column that is not there, and for Parquet files
    where pyarrow is not installed; HubError for what the Hub refuses; SourceError for a file that cannot be
    read.
    """
    asked = parse(spec)
    commit, files = _listed(asked)
    texts: list[str] = []
    left = characters
    for name in _of_split(asked, files):
        for text in _texts(_fetched(asked, commit, name), name, asked, max(left, LEAST)):
            texts.append(text)
            left -= len(text)
            if left <= 0:
                return texts, asked.name(commit)
    if not any(text.strip() for text in texts):
        raise UsageError("the data set has no text", where=spec, expected="text to calibrate with")
    return texts, asked.name(commit)


def _listed(asked: DataSet) -> tuple[str, list[str]]:
    """Ask for the commit and the names of all files."""
    from huggingface_hub import HfApi

    try:
        info: Any = persist(lambda: HfApi().dataset_info(asked.repo_id, revision=asked.revision), QUICK)
    except Exception as err:
        raise hub_error(err, asked.repo_id) from err
    return str(info.sha), [str(s.rfilename) for s in info.siblings or ()]


def _fetched(asked: DataSet, commit: str, name: str) -> Path:
    from huggingface_hub import hf_hub_download

    def fetch() -> str:
        return str(hf_hub_download(asked.repo_id, name, repo_type="dataset", revision=commit))

    try:
        return Path(persist(fetch, QUICK))
    except Exception as err:
        raise hub_error(err, asked.repo_id) from err


def _of_split(asked: DataSet, files: list[str]) -> list[str]:
    """Return the files of a split, all of one kind, in natural order."""
    for ending in ENDINGS:
        named = [f for f in files if f.endswith(ending) and asked.split in re.split(r"[/._-]", f)]
        if named:
            return sorted(named, key=natural_key)
    known = [f for f in files if f.endswith(ENDINGS)]
    raise UsageError(
        "the data set has no file of this split",
        where=asked.repo_id,
        expected=f"a {', '.join(ENDINGS)} file with `{asked.split}` in its path",
        found=", ".join(sorted(known, key=natural_key)[:5]) or f"{len(files)} files of other kinds",
        hint=f"`{PREFIX}{asked.repo_id}:SPLIT` takes another one",
    )


def _texts(path: Path, name: str, asked: DataSet, characters: int) -> Iterator[str]:
    """Yield the texts of a file, read one by one; of a plain text the first ``characters``."""
    if name.endswith(".parquet"):
        yield from _parquet(path, name, asked)
        return
    try:
        if name.endswith(".txt"):
            yield beginning(path, characters)[0]
            return
        for number, _, row in objects(path):
            yield _value(row, f"{asked.repo_id}: {name}, line {number}", asked)
    except UnicodeDecodeError as err:
        raise _unreadable(name, asked, "bytes that are no UTF-8") from err


def _value(row: dict[str, Any] | None, where: str, asked: DataSet) -> str:
    if row is None:
        raise SourceError("a line is no object", where=where, expected=f'{{"{asked.column}": "..."}}')
    value = row.get(asked.column)
    if not isinstance(value, str):
        raise _no_column(where, asked, sorted(row))
    if half := half_of_pair(value):
        raise SourceError(HALF, where=where, expected=WHOLE, found=half)
    return value


def _parquet(path: Path, name: str, asked: DataSet) -> Iterator[str]:
    if find_spec("pyarrow") is None:
        raise UsageError(
            "reading a Parquet file needs pyarrow",
            code="extra-missing",
            where=f"{asked.repo_id}: {name}",
            hint="pip install pyarrow",
        )
    from pyarrow import ArrowException, parquet

    try:
        file = parquet.ParquetFile(path)
    except (ArrowException, OSError) as err:
        raise _unreadable(name, asked, str(err).partition("\n")[0][:160]) from err
    if asked.column not in file.schema_arrow.names:
        raise _no_column(f"{asked.repo_id}: {name}", asked, file.schema_arrow.names)
    for batch in file.iter_batches(ROWS, columns=[asked.column]):
        for value in batch.column(0).to_pylist():
            if isinstance(value, str):
                yield value


def _no_column(where: str, asked: DataSet, columns: Iterable[str]) -> UsageError:
    return UsageError(
        "the data set has no such column of text",
        where=where,
        expected=asked.column,
        found=", ".join(map(str, columns)) or "no column",
        hint=f"`{PREFIX}{asked.repo_id}:{asked.split}:COLUMN` takes another one",
    )


def _unreadable(name: str, asked: DataSet, found: str) -> SourceError:
    return SourceError("a file of the data set cannot be read", where=f"{asked.repo_id}: {name}", found=found)
