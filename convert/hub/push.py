"""Upload an output so that the repository is whole or not loadable, at every moment, and a rerun goes on.

Order: each group of weight files is uploaded and committed, then everything else with `config.json`. Nothing
loads a repository without `config.json`; where an older one lies there, the first commit takes it away. What
the repository already holds (by hash) is not sent again, so a push that was killed goes on where it was.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from w4pack.convert.errors import HubError, name_some
from w4pack.convert.events import Quiet, Reporter, size_text
from w4pack.convert.files.manifestform import MANIFEST
from w4pack.convert.hub.access import Access, Asking, preflight
from w4pack.convert.hub.client import STEADY, Patience, is_no_xet, session_tools, status_of
from w4pack.convert.hub.outfolder import CARD, CONFIG, LocalFile, list_output, prove

COMMITS = 50  # groups of weights at most; a commit is also the Hub's memory of what has arrived
# The client repeats single requests of an upload itself (5 times); this is on top of it.
UPLOAD = Patience(tries=3, total_s=120.0)
# Files that decide what a folder loads as: one left over from another model would be read with ours.
OWNED_ENDINGS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")
OWNED_NAMES = ("quantize_config.json", "quant_config.json", "quantization_config.json", MANIFEST)


@dataclass(frozen=True, slots=True)
class PushReport:
    """What a push did.

    sent     files that were uploaded by this run
    kept     files that the repository already had
    removed  files of an earlier push that the output no longer has
    commit   head of the branch at the end
    """

    repo_id: str
    url: str
    commit: str
    sent: tuple[str, ...]
    kept: tuple[str, ...]
    removed: tuple[str, ...]
    commits: int
    bytes_sent: int

    def summary(self) -> str:
        """Return one line for people."""
        if not self.commits:
            return f"nothing to do, {self.url} holds these {len(self.kept)} files already"
        held = f", {len(self.kept)} were there" if self.kept else ""
        gone = f", {len(self.removed)} old ones removed" if self.removed else ""
        return f"{len(self.sent)} files ({size_text(self.bytes_sent)}) sent{held}{gone}: {self.url}"

    def to_json(self) -> dict[str, Any]:
        """Return the fields of the ``done`` event."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Step:
    """One commit."""

    title: str
    files: tuple[LocalFile, ...]
    deletes: tuple[str, ...] = ()


def push(
    out: str | Path,
    repo_id: str,
    *,
    private: bool = False,
    token: str | None = None,
    access: Access | None = None,
    reporter: Reporter | None = None,
    bars: bool = False,
    verify: bool = True,
) -> PushReport:
    """Upload the folder ``out`` to ``repo_id``.

    ``access``: the answer of an earlier ``preflight``; without it the questions are asked here.
    ``verify``: check the tensors against the manifest first, and say so in our card. Raises OutputError if
    the folder is no output, VerifyError if it is broken, HubError for all that the Hub and the network say
    (what is forbidden is not repeated, the server's words are shown).
    """
    files = list_output(Path(out))
    if not bars:
        session_tools().disable_progress_bars()
    tell = reporter or Quiet()
    if access is None:
        access = preflight(repo_id, token, private, _card_text(files))
    for text in access.notes:
        tell.event("warning", code="card", where=f"{repo_id}: {CARD}", expected=None, found=None, text=text)
    if verify and any(f.name == MANIFEST for f in files) and prove(Path(out)):
        files = list_output(Path(out))
    return Pusher(Asking(access.repo_id, token, STEADY), files, tell).run()


def _card_text(files: Iterable[LocalFile]) -> str | None:
    card = next((f for f in files if f.name == CARD), None)
    return None if card is None else card.path.read_text(encoding="utf-8", errors="replace")


class Pusher:
    """The state of one push: the head that was last seen, and what lies there."""

    def __init__(self, ask: Asking, files: Sequence[LocalFile], reporter: Reporter) -> None:
        self.ask = ask
        self.files = files
        self.tell = reporter
        self.head: str | None = None
        self.tree: dict[str, Any] = {}
        self.commits = 0

    def run(self) -> PushReport:
        """Bring the branch to the state of the folder."""
        self.ask(self._read_head)
        kept = tuple(f.name for f in self.files if f.equals(self.tree.get(f.name)))
        removed = self._stale()
        steps = plan_steps([f for f in self.files if f.name not in kept], self.files, self.tree, removed)
        for number, step in enumerate(steps, 1):
            self.tell.event("note", text=f"commit {number} of {len(steps)}: {step.title}")
            self._upload(step)
            self._commit(step)
        if steps:
            self._require_arrived(removed)
        again = {f.name for step in steps for f in step.files}
        sent = tuple(f for f in self.files if f.name in again)
        return PushReport(
            repo_id=self.ask.repo_id,
            url=f"{self.ask.api.endpoint}/{self.ask.repo_id}",
            commit=self.head or "",
            sent=tuple(f.name for f in sent),
            kept=tuple(name for name in kept if name not in again),
            removed=removed,
            commits=self.commits,
            bytes_sent=sum(f.size for f in sent),
        )

    def _read_head(self) -> None:
        info = self.ask.api.model_info(self.ask.repo_id)
        found = self.ask.api.list_repo_tree(self.ask.repo_id, recursive=True, revision=info.sha)
        self.tree = {entry.path: entry for entry in found if hasattr(entry, "blob_id")}
        self.head = info.sha

    def _stale(self) -> tuple[str, ...]:
        """Name what an earlier push of ours left and this output lacks. Weights of others stay."""
        ours = {f.name for f in self.files}
        stale = [
            name
            for name in sorted(self.tree)
            if name not in ours and "/" not in name and (name.endswith(OWNED_ENDINGS) or name in OWNED_NAMES)
        ]
        if stale and MANIFEST not in self.tree:
            raise HubError(
                "the repository holds weights that w4pack did not put there",
                code="other-weights",
                where=self.ask.repo_id,
                found=name_some(stale),
                hint="push to another name, or delete these files there first",
            )
        return tuple(stale)

    def _upload(self, step: Step) -> None:
        """Upload the weights one by one, so that a failure costs one file, and the small files together."""
        weights = [[file.operation()] for file in step.files if file.is_weights]
        others = [file.operation() for file in step.files if not file.is_weights]
        for operations in [*weights, *([others] if others else [])]:
            try:
                self._preupload(operations)
            except HubError as err:
                if not is_no_xet(err.__cause__):
                    raise
                self._without_xet()
                self._preupload(operations)

    def _preupload(self, operations: list[Any]) -> None:
        api, repo_id = self.ask.api, self.ask.repo_id
        self.ask(lambda: api.preupload_lfs_files(repo_id, operations, free_memory=False), UPLOAD)

    def _without_xet(self) -> None:
        """Go on over plain HTTP: the endpoint has no xet storage (mirrors, older servers), which the client
        does not notice by itself. The uploaded bytes are the same, and checked against the same sha256.
        """
        from huggingface_hub import constants

        self.tell.event("note", text="no xet storage behind this endpoint; uploading over plain HTTP")
        constants.HF_HUB_DISABLE_XET = True

    def _commit(self, step: Step) -> None:
        """Commit on the head that was last seen; if it has moved, look again and try once more."""
        for last in (False, True):
            try:
                self.ask.persist(Attempt(self, step), STEADY)
            except Exception as err:
                if status_of(err) != 412:
                    raise self.ask.said(err) from err
                if last:
                    raise self._moved(err) from err
                self.ask(self._read_head)
                if self.holds(step):
                    break
                continue
            break
        self.commits += 1

    def _moved(self, err: Exception) -> HubError:
        error = self.ask.said(err)
        return HubError(
            "the branch moves while this push runs: someone else commits to it",
            code="branch-moved",
            where=self.ask.repo_id,
            found=error.found,
            hint="run `w4pack push` again when the other upload has ended",
        )

    def holds(self, step: Step) -> bool:
        """Tell whether the tree that was last read is what the step makes."""
        arrived = all(file.equals(self.tree.get(file.name)) for file in step.files)
        return arrived and not any(name in self.tree for name in step.deletes)

    def _require_arrived(self, removed: Sequence[str]) -> None:
        self.ask(self._read_head)
        wrong = [f.name for f in self.files if not f.equals(self.tree.get(f.name))]
        wrong += [name for name in removed if name in self.tree]
        if wrong:
            raise HubError(
                "the repository does not hold what was pushed",
                code="not-arrived",
                where=self.ask.repo_id,
                found=name_some(wrong),
                hint="run `w4pack push` again",
            )


class Attempt:
    """One commit, to be called until it succeeds. From the second call on the head is looked at first:
    a commit whose answer was lost may have landed.
    """

    def __init__(self, pusher: Pusher, step: Step) -> None:
        self.pusher = pusher
        self.step = step
        self.called = False

    def __call__(self) -> None:
        """Commit, or find it committed."""
        pusher = self.pusher
        if self.called:
            pusher._read_head()
            if pusher.holds(self.step):
                return
        self.called = True
        pusher.head = self._send(pusher)

    def _send(self, pusher: Pusher) -> str:
        from huggingface_hub import CommitOperationDelete

        deletes = [CommitOperationDelete(name, is_folder=False) for name in self.step.deletes]
        info = pusher.ask.api.create_commit(
            pusher.ask.repo_id,
            [*deletes, *(file.operation() for file in self.step.files)],
            commit_message=self.step.title,
            parent_commit=pusher.head,
        )
        return str(info.oid)


def plan_steps(
    changed: Sequence[LocalFile], files: Sequence[LocalFile], tree: Iterable[str], removed: Sequence[str]
) -> list[Step]:
    """Order the commits: weights in groups, the manifest with the first of them, `config.json` in the last.

    Where an old `config.json` lies in the repository and more than texts change, the first commit deletes it.
    """
    if not changed and not removed:
        return []
    weights = [f for f in changed if f.is_weights]
    rest = [f for f in changed if not f.is_weights and f.name != CONFIG]
    config = next(f for f in files if f.name == CONFIG)
    deep = bool(removed) or any(not f.name.endswith(".md") for f in changed)
    if not weights and not removed:
        return [_last_step(changed)]
    first = [f for f in rest if f.name == MANIFEST] if weights else []
    deletes = (*removed, *((CONFIG,) if deep and CONFIG in tree else ()))
    size = -(-len(weights) // COMMITS) or 1
    groups = [weights[i : i + size] for i in range(0, len(weights), size)] or [[]]
    steps = [
        Step(_title(group, removed), (*group, *(first if i == 0 else ())), tuple(deletes) if i == 0 else ())
        for i, group in enumerate(groups)
    ]
    return [*steps, _last_step([*(f for f in rest if f not in first), config])]


def _title(group: Sequence[LocalFile], removed: Sequence[str]) -> str:
    if not group:
        return f"Remove {name_some(removed)}"
    return f"Add {name_some([f.name for f in group])}"


def _last_step(files: Sequence[LocalFile]) -> Step:
    return Step(f"Add {name_some(sorted(f.name for f in files))}", tuple(files))
