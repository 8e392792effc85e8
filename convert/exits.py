"""How a command ends: by a signal, by an error of ours, of the system, or of nobody's; as text or as JSON.

Only the errors are imported here: it is there before anything can fail.
"""

import errno
import os
import signal
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, NoReturn

from w4pack.convert.errors import EXIT_SIGINT, EXIT_SIGTERM, NobodyReads, StdoutError, W4PackError

if TYPE_CHECKING:
    from w4pack.convert.jobs.execute import StopFlag


def signal_behind(err: BaseException) -> int:
    """Return the exit code of the signal that an error was made of, or 0.

    Before Python 3.12 what is raised while a class's attributes are named becomes a RuntimeError: the signal
    may have come in the middle of an import.
    """
    seen: set[int] = set()
    at: BaseException | None = err
    while at is not None and id(at) not in seen:
        if isinstance(at, KeyboardInterrupt):
            return EXIT_SIGINT
        if isinstance(at, Terminated):
            return EXIT_SIGTERM
        seen.add(id(at))
        at = at.__cause__ or at.__context__
    return 0


def interrupted(code: int) -> W4PackError:
    """Return the error of a command that a signal ended."""
    # Python kills itself by SIGINT at its end where one fell into an `exec` (of a dataclass that is imported,
    # say), although it was caught. The next `exec` takes that back.
    exec("")
    err = W4PackError("stopped by a signal", code="interrupted")
    err.exit_code = code
    return err


def told(err: Exception) -> W4PackError:
    """Return our error for one that nothing has translated."""
    return _no_memory(err) if _is_memory(err) else _no_files(err) or _bug(err)


def of_options(err: W4PackError, given: Mapping[str, object]) -> W4PackError:
    """Let an error that names a parameter of the Python API name the option that stands for it. A path that
    was given stays what it is, whatever its name.
    """
    paths = {os.path.normpath(value) for value in given.values() if isinstance(value, str)}
    for one in (err, *err.problems):
        if one.where in given and one.where not in paths:
            name, option = f"`{one.where}`", f"--{str(one.where).replace('_', '-')}"
            one.what = one.what.replace(name, f"`{option}`")
            one.hint = one.hint and one.hint.replace(name, f"`{option}`")
            one.where = option
    return err


def leave(err: W4PackError, *, as_json: bool) -> NoReturn:
    """Print an error in the form asked for, and leave with its exit code."""
    if as_json and not isinstance(err, StdoutError):
        tell_json({"schema": 1, **err.to_json()}, f"error: {err}")
    else:
        print(f"error: {err}", file=sys.stderr, flush=True)
    sys.exit(err.exit_code)


def tell_json(fields: dict[str, object], text: str) -> None:
    """Print an error as JSON, or as text on stderr where stdout takes nothing."""
    import json

    try:
        print(json.dumps(fields), flush=True)
    except StdoutError:
        print(text, file=sys.stderr, flush=True)
    except NobodyReads:
        pass  # its exit code still says that it failed


def _is_memory(err: Exception) -> bool:
    """Whether an error says that memory, of the host or of a card, has run out. Known without torch."""
    kinds = {kind.__name__ for kind in type(err).__mro__}
    return bool(kinds & {"MemoryError", "OutOfMemoryError"}) or "can't allocate memory" in str(err)


def _no_memory(err: Exception) -> W4PackError:
    return W4PackError(
        "not enough memory",
        code="memory",
        found=str(err).strip().partition("\n")[0][:200] or None,
        hint="the plan of a conversion (`--dry-run`) says what it takes; `--resume` goes on from here",
    )


def _no_files(err: Exception) -> W4PackError | None:
    """Return the error of a process, or a system, that may open no more files: imports open some, too."""
    if not isinstance(err, OSError) or err.errno not in (errno.EMFILE, errno.ENFILE):
        return None
    return W4PackError(
        "too many open files",
        code="open-files",
        where=None if err.filename is None else str(err.filename),
        hint="allow more (`ulimit -n 1024`), then run the same command, a job with `--resume`",
    )


def _bug(err: Exception) -> W4PackError:
    """Save the traceback of an unexpected error and describe it in one line."""
    import tempfile
    import traceback

    with tempfile.NamedTemporaryFile("w", prefix="w4pack-", suffix=".log", delete=False) as file:
        file.write("".join(traceback.format_exception(err)))
    return W4PackError(
        f"an unexpected error, which is a bug in w4pack: {type(err).__name__}: {err}".partition("\n")[0],
        code="bug",
        where=file.name,
        hint="report it with that file; `--debug` prints it",
    )


class Terminated(BaseException):
    """SIGTERM, as KeyboardInterrupt is SIGINT: no net for errors catches it."""


def terminate(signum: int, frame: object) -> NoReturn:
    """Answer SIGTERM."""
    raise Terminated


def stop_flag() -> "StopFlag":
    """Return a flag that SIGINT and SIGTERM set: workers stop at the next block, all else at once."""
    from w4pack.convert.jobs.execute import StopFlag

    flag = StopFlag()

    def stop(signum: int, frame: object) -> None:
        flag.signum = signum
        if not flag.watched:
            raise Terminated if signum == signal.SIGTERM else KeyboardInterrupt

    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, stop)
    return flag
