"""What a source argument means: a folder, or a repository on the Hub; and how the latter gets onto this disk.

A folder that exists always wins. What can only be a path never becomes a request.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from w4pack.convert.errors import HubError, SourceError, UsageError
from w4pack.convert.files.local import LocalStore
from w4pack.convert.files.store import Store
from w4pack.convert.files.tensorfile import read_header
from w4pack.convert.files.weightset import choose
from w4pack.convert.hub.client import QUICK, hub_error, persist, session_tools

# The Hub's own rule for names, without the few that contain `--` or `..`.
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95}", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")

# Weights in one form or another; of these only the model's own are fetched.
WEIGHT_ENDINGS = {
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".gguf",
    ".ggml",
    ".onnx",
    ".onnx_data",
    ".h5",
}
WEIGHT_ENDINGS |= {".msgpack", ".tflite", ".mlmodel", ".ot"}


@dataclass(frozen=True, slots=True)
class LocalSource:
    """A folder on this disk. ``text`` is the argument as given."""

    path: Path
    text: str

    @property
    def label(self) -> str:
        """What messages call it."""
        return self.text


@dataclass(frozen=True, slots=True)
class HubSource:
    """A model repository. ``revision`` is a branch, tag or commit, or None: the default branch."""

    repo_id: str
    revision: str | None

    @property
    def label(self) -> str:
        """What messages call it: ``ORG/NAME`` or ``ORG/NAME@revision``."""
        return f"{self.repo_id}@{self.revision}" if self.revision else self.repo_id

    @property
    def notice(self) -> str:
        """The line that tells the user where the bytes come from."""
        return f"reading from the Hub: {self.label}"


def parse_source(text: str, revision: str | None = None) -> LocalSource | HubSource:
    """Read a source argument. Touches the local disk only, never the network.

    Raises UsageError for a revision that is given twice, is empty or belongs to a folder; SourceError for a
    path that is no folder.
    """
    path = Path(os.path.expanduser(text))  # noqa: PTH111 - pathlib's own raises for a user that does not exist
    try:
        is_folder, is_file = bool(text) and path.is_dir(), path.is_file()
    except (OSError, ValueError):  # too long for a name, or no name at all
        raise _no_folder(text) from None
    if is_folder:
        if revision is not None:
            raise UsageError(
                "`--revision` belongs to a Hub id, and this is a folder",
                code="revision-of-folder",
                where=text,
            )
        return LocalSource(path, text)
    if is_file:
        raise SourceError(
            "not a folder",
            code="not-a-folder",
            where=text,
            hint="pass the folder that holds config.json and the weights",
        )
    name, at, suffix = text.partition("@")
    if not is_hub_id(name):
        raise _no_folder(text)
    if at and revision is not None:
        raise UsageError(
            "the revision is given twice",
            code="two-revisions",
            where=text,
            expected="`ORG/NAME@revision` or `--revision`, not both",
            found=f"{suffix} and {revision}",
        )
    if (at and not suffix) or revision == "":
        raise UsageError("the revision is empty", code="empty-revision", where=text)
    return HubSource(name, suffix if at else revision)


def is_hub_id(name: str) -> bool:
    """Tell whether ``name`` can be a repository: one slash, and no leading ``/``, ``.`` or ``~``."""
    return (
        bool(_HUB_ID.fullmatch(name))
        and "--" not in name
        and ".." not in name
        and not name.endswith((".git", ".", "-"))
    )


def _no_folder(text: str) -> SourceError:
    one_word = bool(text) and "/" not in text and not text.startswith((".", "~"))
    return SourceError(
        "no such folder",
        code="no-such-folder",
        where=text or "(empty)",
        hint="a model on the Hub is written ORG/NAME" if one_word else None,
    )


def is_side_file(name: str) -> bool:
    """Tell whether a file travels beside the weights: configs, tokenizers, code, texts."""
    path = PurePosixPath(name)
    hidden = any(part.startswith(".") for part in path.parts)
    return not hidden and path.suffix.lower() not in WEIGHT_ENDINGS and not name.endswith(".index.json")


def snapshot(
    source: HubSource,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
    *,
    quiet: bool = False,
) -> Path:
    """Bring a repository into the client's cache and return its folder.

    Only the weight files that the index names are fetched, and the side files. The client's environment
    (HF_ENDPOINT, HF_HOME, HF_HUB_CACHE, HF_TOKEN, HF_HUB_OFFLINE) works as ever. Raises HubError.
    """
    from huggingface_hub import constants, snapshot_download

    if quiet:
        session_tools().disable_progress_bars()
    offline = local_files_only or constants.HF_HUB_OFFLINE
    # Offline, client 2.4 demands every file it once listed; ours are checked below, so one name is enough.
    patterns = ["config.json"] if offline else [_literal(name) for name in wanted_files(source)]
    try:
        found = persist(
            lambda: snapshot_download(
                source.repo_id,
                revision=source.revision,
                cache_dir=cache_dir,
                allow_patterns=patterns,
                local_files_only=offline,
            ),
            QUICK,
        )
    except Exception as err:
        raise hub_error(err, source.label) from err
    folder = Path(found)
    if offline:
        _require_complete(folder, source)
    return folder


def commit_of(folder: Path) -> str | None:
    """Return the commit that a snapshot folder holds, or None for any other folder."""
    return folder.name if folder.parent.name == "snapshots" and _COMMIT.fullmatch(folder.name) else None


def wanted_files(source: HubSource) -> list[str]:
    """List the files that a conversion needs: the model's weights, their index, and side files."""
    from w4pack.convert.hub.remote import HubStore

    with HubStore(source) as store:
        chosen = choose(store, lambda name: tensor_names(store, name))
        sides = [name for name in store.files() if is_side_file(name)]
    return [*sides, *([chosen.index] if chosen.index else []), *chosen.files]


def tensor_names(store: Store, name: str) -> frozenset[str]:
    """Return the tensor names in the header of one safetensors file."""
    blob = store.blob(name)

    def read(offset: int, length: int) -> bytes:
        data = bytearray(length)
        blob.read_into(offset, memoryview(data))
        return bytes(data)

    return frozenset(info.name for info in read_header(name, blob.size, read).tensors)


def _require_complete(folder: Path, source: HubSource) -> None:
    """Refuse a cached snapshot that an interrupted download left without all its shards."""
    store = LocalStore(folder)
    try:
        choose(store, lambda name: tensor_names(store, name))
    except SourceError as err:
        raise HubError(
            "the local cache holds only a part of the repository",
            code="not-complete",
            where=source.label,
            found=err.what,
            hint="leave out `--local-files-only` and HF_HUB_OFFLINE to download the rest",
        ) from err
    finally:
        store.close()


def _literal(name: str) -> str:
    """Return the pattern that matches just ``name``."""
    return re.sub(r"([*?\[])", r"[\1]", name)
