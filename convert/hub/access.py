"""Whether a push can succeed, asked before any work: token, repository, right to write, card."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from w4pack.convert.errors import HubError, UsageError
from w4pack.convert.hub.client import (
    STEADY,
    Patience,
    hub_error,
    no_token,
    persist,
    scrub,
    session_tools,
    status_of,
)
from w4pack.convert.hub.resolve import is_hub_id

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Access:
    """What the questions before a push found out.

    user     name the token belongs to
    created  the repository is new
    head     commit of its default branch, or None if the Hub names none
    notes    warnings about the card
    """

    repo_id: str
    user: str
    created: bool
    private: bool | None
    head: str | None
    notes: tuple[str, ...] = ()


def preflight(
    repo_id: str,
    token: str | None = None,
    private: bool = False,
    card: str | None = None,
    *,
    patience: Patience = STEADY,
) -> Access:
    """Prove that ``repo_id`` can be written, creating it if it does not exist.

    ``card`` is the text of the README, whose YAML the Hub checks. Raises UsageError for a name that is none,
    HubError for everything the Hub says no to; what is forbidden is asked once.
    """
    if not is_hub_id(repo_id):
        raise UsageError("not the name of a repository", code="repo-id", where=repo_id, expected="ORG/NAME")
    ask = Asking(repo_id, token, patience)
    user = _user(ask)
    notes = check_card(ask, card) if card is not None else ()
    created = _create(ask, private)
    access = Access(repo_id, user, created, None, None, notes)
    access = _look(ask, access)
    if private and access.private is False:
        raise HubError(
            "the repository exists and is public",
            code="not-private",
            where=repo_id,
            hint="make it private in its settings, or leave out `--private`",
        )
    _prove_write(ask)
    return access


class Asking:
    """The client, bound to one repository: repeats what may pass, says errors in our words."""

    def __init__(self, repo_id: str, token: str | None, patience: Patience) -> None:
        from huggingface_hub import HfApi, get_token

        self.repo_id = repo_id
        self.token = token or get_token()
        if not self.token:
            raise no_token(repo_id)
        self.api = HfApi(token=self.token)
        self.patience = patience

    def __call__(self, call: Callable[[], T], patience: Patience | None = None) -> T:
        """Run one call of the client."""
        try:
            return self.persist(call, patience or self.patience)
        except Exception as err:
            raise self.said(err) from err

    def persist(self, call: Callable[[], T], patience: Patience) -> T:
        """Run one call of the client, whose errors stay as they are."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the card's warnings come from `check_card`
            return persist(call, patience)

    def said(self, err: Exception) -> HubError:
        """Return our error for the client's, without the token."""
        error = hub_error(err, self.repo_id)
        if error.found is not None:
            error.found = scrub(error.found, self.token)
        return error


def _user(ask: Asking) -> str:
    """Ask who the token belongs to; a token that may only read is refused here."""
    found: dict[str, Any] = ask(lambda: ask.api.whoami())
    token = (found.get("auth") or {}).get("accessToken") or {}
    if token.get("role") == "read":
        raise HubError(
            "the access token may only read",
            code="forbidden",
            where=ask.repo_id,
            expected="role `write`, or a fine-grained token with write access to the repository",
            found="role `read`",
        )
    return str(found.get("name") or "")


def _create(ask: Asking, private: bool) -> bool:
    """Create the repository unless it exists. Returns True if it is new."""
    from huggingface_hub.errors import HfHubHTTPError

    def exists() -> bool:
        try:
            ask.api.model_info(ask.repo_id)
        except HfHubHTTPError as err:
            if status_of(err) != 404:
                raise
            return False
        return True

    if ask(exists):
        return False
    # exist_ok: an earlier try may have been answered by a broken connection after it took effect
    ask(lambda: ask.api.create_repo(ask.repo_id, private=private or None, exist_ok=True))
    return True


def _look(ask: Asking, access: Access) -> Access:
    info = ask(lambda: ask.api.model_info(ask.repo_id))
    return replace(access, private=info.private, head=info.sha)


def _prove_write(ask: Asking) -> None:
    """Ask where a small file would be stored: the Hub answers only those who may write, and stores nothing.

    Creating a repository that exists proves nothing: the client takes a 403 for "it is there".
    """
    from huggingface_hub import CommitOperationAdd

    ask(lambda: ask.api.preupload_lfs_files(ask.repo_id, [CommitOperationAdd("config.json", b"{}")]))


def check_card(ask: Asking, card: str) -> tuple[str, ...]:
    """Let the Hub check the card's YAML. Returns its warnings; raises HubError with its complaints."""
    tools = session_tools()

    def post() -> Any:
        from huggingface_hub import constants

        response = tools.get_session().post(
            f"{constants.ENDPOINT}/api/validate-yaml",
            json={"content": card, "repoType": "model"},
            headers=tools.build_hf_headers(token=ask.token),
            timeout=60,
        )
        if response.status_code != 400:
            tools.hf_raise_for_status(response)
        return response.json()

    answer = ask(post)
    problems = _messages(answer, "errors")
    if problems:
        raise HubError(
            "the Hub does not accept the card's metadata",
            code="card",
            where=f"{ask.repo_id}: README.md",
            found="; ".join(problems),
        )
    return _messages(answer, "warnings")


def _messages(answer: Any, key: str) -> tuple[str, ...]:
    items = answer.get(key) if isinstance(answer, dict) else None
    return tuple(str(item.get("message")) for item in items or [] if isinstance(item, dict))
