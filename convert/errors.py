"""Every error a user can meet, its exit code, and the one place that turns it into text.

An error has four parts: *what* is wrong, *where*, *expected* and *found*, and a *hint* that can be pasted.
Parts that would add nothing are left out. Each class carries the process exit code; each instance carries
a stable ``code`` slug that tests and JSON consumers may rely on.
"""

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_REFUSED = 3
EXIT_VERIFY = 4
EXIT_SIGINT = 130
EXIT_SIGTERM = 143

# The way on from a checkpoint whose codes no reader here understands.
FROM_16_BIT = (
    "start from the 16-bit checkpoint that it was made from: `w4pack convert SOURCE OUT --quantize gptq`"
)

SHOWN = 3  # members of a list that the text form names; the JSON form names all of them


def printable(text: str) -> str:
    """Return a text for a terminal, which obeys escape sequences: what is in a file may hold some."""
    if all(line.isprintable() for line in text.split("\n")):
        return text
    kept = (c if c in "\n\t" or ord(c) > 0x9F or c.isprintable() else f"\\x{ord(c):02x}" for c in text)
    return "".join(kept)


class W4PackError(Exception):
    """Something failed. ``str(err)`` is the full text form, without the leading ``error:``."""

    exit_code = EXIT_FAILED
    default_code = "failed"

    def __init__(
        self,
        what: str,
        *,
        code: str | None = None,
        where: str | None = None,
        expected: str | None = None,
        found: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.code = code or self.default_code
        self.where = where
        self.expected = expected
        self.found = found
        self.hint = hint

    def __str__(self) -> str:
        """Return the text form; of Python's API, also what the options that it names are there."""
        named = "" if self.in_python is None else f"\n\nin Python: {self.in_python}"
        return printable(self._told() + named)

    def _told(self) -> str:
        """Return the text form; of several problems the first few of each rule, with a count of the rest."""
        if len(self.problems) < 2 or self.tells_all:
            return self._text()
        rules: dict[tuple[str, str], list[W4PackError]] = {}
        for problem in self.problems:
            rules.setdefault((problem.code, problem.what), []).append(problem)
        return "\n\n".join(_rule_text(items) for items in rules.values())

    def _text(self) -> str:
        lines = [self.what]
        for label in ("where", "expected", "found"):
            value = getattr(self, label)
            if value is not None:
                lines.append(f"  {label}: {value}")
        if self.hint is not None:
            lines += ["", f"hint: {self.hint}"]
        return "\n".join(lines)

    problems: tuple["W4PackError", ...] = ()
    in_python: str | None = None  # what the options that it names are called in Python
    tells_all = False  # its own fields tell of all problems at once

    def to_json(self) -> dict[str, object]:
        """Return the fields of the ``error`` event; ``problems`` lists every one where several were found."""
        fields = self._fields()
        if self.problems:
            fields["problems"] = [p._fields() for p in self.problems]
        return fields

    def _fields(self) -> dict[str, object]:
        return {
            "event": "error",
            "code": self.code,
            "exit": self.exit_code,
            "what": self.what,
            "where": self.where,
            "expected": self.expected,
            "found": self.found,
            "hint": self.hint,
        }


def quantize_hint(label: str, to: str = "marlin") -> str:
    """Return the way on from a 16-bit checkpoint where a packed one is needed. ``label``: its path."""
    target = "" if to == "marlin" else f" --to {to}"
    command = f"w4pack convert {label} OUT{target} --quantize gptq"
    return f"its weights are 16 bit: `{command}` chooses codes for them"


class SourceError(W4PackError):
    """The input is broken, unreadable or hostile."""

    default_code = "source"


class OutputError(W4PackError):
    """The output cannot be written: disk full, no permission, folder not empty."""

    default_code = "output"


class StdoutError(W4PackError):
    """What the command prints cannot be written."""

    default_code = "stdout"


class NobodyReads(Exception):
    """The reader of stdout has gone: the command ends without a word. No error of a job."""


class HubError(W4PackError):
    """The Hub could not be reached, or said no."""

    default_code = "hub"


class UsageError(W4PackError):
    """Options or arguments that make no sense together."""

    exit_code = EXIT_USAGE
    default_code = "usage"


def extra_missing(doing: str, missing: Sequence[str], extra: str) -> UsageError:
    """Return the error of a job whose packages are not installed.

    extra  of w4pack, that brings them
    """
    return UsageError(
        f"{doing} needs {' and '.join(missing)}",
        code="extra-missing",
        hint=f"pip install 'w4pack[{extra}]'",
    )


def require_installed(doing: str, packages: Sequence[str], extra: str) -> None:
    """Raise UsageError where a package is not installed; imports none."""
    missing = [name for name in packages if not installed(name)]
    if missing:
        raise extra_missing(doing, missing, extra)


def require_extra(doing: str, packages: Sequence[str], extra: str) -> None:
    """Import packages. Raises UsageError where one is not installed, or is and cannot be imported."""
    require_installed(doing, packages, extra)
    for name in packages:
        try:
            import_module(name)
        except Exception as err:  # a library that it loads is not there, or of another version: any kind
            raise UsageError(
                f"{doing} needs {name}, which is installed but cannot be imported",
                code="extra-broken",
                expected=f"a whole installation of {name}: `python -c 'import {name}'` says nothing",
                found=f"{type(err).__name__}: {err}".partition("\n")[0][:200],
                hint=f"pip install --force-reinstall 'w4pack[{extra}]'",
            ) from err


def installed(name: str) -> bool:
    """Tell whether there is a module of this name, without importing it."""
    try:
        return find_spec(name) is not None
    except ImportError:  # its parent package is not there
        return False


class VerifyError(W4PackError):
    """A check of an output failed."""

    exit_code = EXIT_VERIFY
    default_code = "verify"


class Refused(W4PackError):
    """The plan says no: the input was understood, and the target cannot carry it, or it is ambiguous.

    ``problems`` holds every reason that was found, not just the first: the text form shows the first few of
    each rule with a count, the JSON form all of them.
    """

    exit_code = EXIT_REFUSED
    default_code = "refused"

    @classmethod
    def together(cls, problems: Sequence[W4PackError]) -> W4PackError:
        """Merge ``problems`` into one error; a broken source (exit 1) outranks a refusal (exit 3).

        Checks that failed, all of them, stay one that did (exit 4).
        """
        if len(problems) == 1:
            return problems[0]
        broken = [p for p in problems if p.exit_code == EXIT_FAILED]
        first = (broken or list(problems))[0]
        checks = all(isinstance(p, VerifyError) for p in problems)
        kind: type[W4PackError] = SourceError if broken else VerifyError if checks else cls
        merged = kind(
            first.what,
            code=first.code,
            where=first.where,
            expected=first.expected,
            found=first.found,
            hint=first.hint,
        )
        merged.problems = tuple(problems)
        return merged


def _rule_text(items: Sequence[W4PackError]) -> str:
    """Return one rule's problems: the first in full, where the others are, how many there are."""
    first = items[0]
    if len(items) == 1:
        return first._text()
    places = name_some([item.where or "?" for item in items])
    shown = W4PackError(first.what, where=places, expected=first.expected, found=first.found, hint=first.hint)
    return f"{shown._text()}\n({len(items)} such problems)" if first.hint is None else shown._text()


def name_some(names: Sequence[str], shown: int = SHOWN) -> str:
    """Join the first ``shown`` names and the count of the rest: ``a, b, c and 41 more``."""
    head = ", ".join(names[:shown])
    rest = len(names) - shown
    return f"{head} and {rest} more" if rest > 0 else head
