"""The one place that knows how the Hub's client fails: its errors in our words, and which of them pass.

``huggingface_hub`` 1.x stands on another HTTP library than 2.x; neither is imported here. The base class of
all its transport errors is found through ``HfHubHTTPError``, which inherits from it in both.
"""

import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from w4pack.convert.errors import HubError

T = TypeVar("T")

PASSING_STATUS = frozenset({408, 429, 500, 502, 503, 504})
SERVER_TEXT_LIMIT = 600  # characters of a server's answer that a message shows


@dataclass(frozen=True, slots=True)
class Patience:
    """How long one call may be repeated.

    tries    calls in all
    total_s  seconds spent waiting, over all repeats of one call
    first_s  first wait; doubles each time up to ``cap_s``
    """

    tries: int
    total_s: float
    first_s: float = 0.5
    cap_s: float = 16.0


QUICK = Patience(tries=4, total_s=15.0)  # a question a person waits for
STEADY = Patience(
    tries=10, total_s=600.0
)  # an upload; the Hub's rate limits count in windows of five minutes


def session_tools() -> Any:
    """Return the client's module of sessions, untyped: its names are imported lazily."""
    import huggingface_hub.utils

    return huggingface_hub.utils


def persist(call: Callable[[], T], patience: Patience) -> T:
    """Run ``call``, again after an error that may pass. Raises the client's own error when it does not.

    ``Retry-After`` (seconds) and the Hub's ``RateLimit`` header are obeyed; where they ask for more than the
    patience that is left, the error is raised at once.
    """
    left, wait = patience.total_s, patience.first_s
    for attempt in range(1, patience.tries + 1):
        try:
            return call()
        except Exception as err:
            if attempt == patience.tries or not may_pass(err):
                raise
            pause = asked_wait(root_cause(err)) or wait * random.uniform(0.8, 1.2)
            if pause > left:
                raise
        time.sleep(pause)
        left, wait = left - pause, min(patience.cap_s, wait * 2)
    raise AssertionError("patience.tries must be at least 1")


def may_pass(err: BaseException) -> bool:
    """Tell whether the same call may succeed later: rate limits, server faults, broken connections."""
    err = root_cause(err)
    status = status_of(err)
    if status is not None:
        return status in PASSING_STATUS
    if isinstance(err, json.JSONDecodeError):  # the client reads an answer before it looks at its status
        return True
    return is_transport(err) and type(err).__name__ not in (
        "UnsupportedProtocol",
        "LocalProtocolError",
        "TooManyRedirects",
    )


def is_transport(err: BaseException) -> bool:
    """Tell whether ``err`` is the HTTP library's own: no answer, a broken one, a timeout."""
    from huggingface_hub.errors import HfHubHTTPError

    return isinstance(err, HfHubHTTPError.__bases__[0]) and not isinstance(err, HfHubHTTPError)


def root_cause(err: BaseException) -> BaseException:
    """Return the HTTP error behind the client's wrappers (an object upload raises a bare RuntimeError)."""
    seen: BaseException | None = err
    while seen is not None:
        if status_of(seen) is not None or is_transport(seen):
            return seen
        seen = seen.__cause__
    return err


def is_no_xet(err: BaseException | None) -> bool:
    """Tell whether the client's xet transfer failed to find its storage (the endpoint has none)."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    is_http = err is not None and (status_of(err) is not None or is_transport(err))
    return isinstance(err, ConnectionError) and not isinstance(err, OfflineModeIsEnabled) and not is_http


def status_of(err: BaseException) -> int | None:
    """Return the HTTP status an error carries, or None."""
    status = getattr(getattr(err, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def asked_wait(err: BaseException) -> float | None:
    """Return the seconds a server asks to wait, or None.

    The ``RateLimit`` header (``"api";r=0;t=55``) comes with every answer: it counts only with nothing left.
    """
    headers: Any = getattr(getattr(err, "response", None), "headers", None) or {}
    value = str(headers.get("retry-after") or "").strip()
    if value.isdigit():
        return float(value)
    fields = dict(
        part.strip().split("=", 1) for part in str(headers.get("ratelimit") or "").split(";") if "=" in part
    )
    if fields.get("r") == "0" and fields.get("t", "").isdigit():
        return float(fields["t"]) + 1
    return None


def server_text(err: BaseException) -> str:
    """Return what the server said, or else the error's first lines."""
    text = str(getattr(err, "server_message", None) or "") or str(err)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    text = " ".join(lines[:4]) or type(err).__name__
    return scrub(text[:SERVER_TEXT_LIMIT])


def scrub(text: str, token: str | None = None) -> str:
    """Take access tokens out of a text that will be printed."""
    from huggingface_hub import get_token

    for secret in (token, get_token()):
        if secret:
            text = text.replace(secret, "***")
    return text


def hub_error(err: Exception, label: str) -> HubError:
    """Say an error of the client in our words. ``label`` names the repository, and its revision if given."""
    if isinstance(err, HubError):
        return err
    from huggingface_hub import errors as known

    cause = root_cause(err)
    status = status_of(cause)
    repo = label.partition("@")[0]
    if isinstance(cause, known.GatedRepoError):
        return _said(
            cause,
            "the repository is gated",
            "gated",
            label,
            f"accept its terms on its page ({_page(repo)}), then log in with `hf auth login`",
        )
    if isinstance(cause, known.RevisionNotFoundError):
        return HubError("no such revision", code="no-revision", where=label)
    if isinstance(cause, known.RepositoryNotFoundError) and not _token_refused(cause):
        return HubError(
            "no such repository on the Hub, or it is private",
            code="no-repository",
            where=label,
            hint="for a private repository log in with `hf auth login` or set HF_TOKEN",
        )
    if isinstance(err, known.OfflineModeIsEnabled):
        return HubError(
            "the Hub client is in offline mode",
            code="offline",
            where=label,
            hint="unset HF_HUB_OFFLINE, or pass a folder",
        )
    if isinstance(err, known.LocalTokenNotFoundError):
        return no_token(label)
    if isinstance(err, known.LocalEntryNotFoundError):
        return _not_cached(err, label)
    if status is not None:
        return _refused(cause, status, label)
    if is_transport(cause) or isinstance(cause, ConnectionError | TimeoutError):
        return unreachable(cause, label)
    return HubError("the Hub client failed", code="client", where=label, found=server_text(cause))


def no_token(label: str) -> HubError:
    """Say that an access token is needed."""
    return HubError(
        "no access token", code="no-token", where=label, hint="log in with `hf auth login`, or set HF_TOKEN"
    )


def unreachable(err: BaseException, label: str) -> HubError:
    """Say that no answer came."""
    from huggingface_hub import constants

    detail = server_text(err)
    return HubError(
        f"cannot reach the Hub at {constants.ENDPOINT}",
        code="unreachable",
        where=label,
        found=f"{type(err).__name__}: {detail}" if detail != type(err).__name__ else detail,
    )


def _token_refused(err: BaseException) -> bool:
    return status_of(err) == 401 and "invalid" in server_text(err).lower()


def _refused(err: BaseException, status: int, label: str) -> HubError:
    found = server_text(err)
    found = found if str(status) in found else f"{status}: {found}"
    match status:
        case 401:
            return HubError(
                "the Hub does not accept the access token",
                code="unauthorized",
                where=label,
                found=found,
                hint="log in with `hf auth login`, or set HF_TOKEN",
            )
        case 403:
            return HubError(
                "the access token has no right to do this", code="forbidden", where=label, found=found
            )
        case 404:
            return HubError("not found on the Hub", code="not-found", where=label, found=found)
        case 429:
            wait = asked_wait(err)
            return HubError(
                "the Hub limits the rate of requests",
                code="rate-limit",
                where=label,
                found=found,
                hint=f"try again in {wait:.0f} seconds" if wait else None,
            )
        case _ if status >= 500:
            return HubError("the Hub has a fault", code="server-fault", where=label, found=found)
        case _:
            return HubError("the Hub refused the request", code="bad-request", where=label, found=found)


def _not_cached(err: Exception, label: str) -> HubError:
    cause = err.__cause__
    if cause is not None and (is_transport(cause) or status_of(cause) is not None):
        return hub_error(cause if isinstance(cause, Exception) else err, label)
    return HubError(
        "not in the local cache",
        code="not-cached",
        where=label,
        hint="leave out `--local-files-only` and HF_HUB_OFFLINE to download it",
    )


def _said(err: BaseException, what: str, code: str, label: str, hint: str) -> HubError:
    return HubError(what, code=code, where=label, found=server_text(err), hint=hint)


def _page(repo: str) -> str:
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/{repo}"
