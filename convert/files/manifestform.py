"""The form of ``w4pack.json``: the versions that are known, and what every member is, in one place.

Whoever reads a manifest reads it through ``parse``, so nobody behind it meets a member of another type, and
every command and loader says the same of one that is damaged. Members that are not known are left alone: a
later w4pack may add some without another version.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from w4pack.convert.errors import Refused, SourceError

MANIFEST = "w4pack.json"
LIMIT = 512 << 20  # bytes; the manifest of a 70B model with folded orders has a few MB
SCHEMA = 1  # of the manifest
FORMAT = 1  # of what it says of the tensors: ``tool.format``
AS_WRITTEN = f"take {MANIFEST} as it was written, from where the weights are from"
SHOWN = 80  # letters of a value that a message shows

Misfit = tuple[str, str, str]  # which member below, what is expected, what is there


class Rule(Protocol):
    """What one member must be. Called with a value, it returns what is wrong with it, if anything is."""

    @property
    def expected(self) -> str:
        """The rule in words."""
        ...

    def __call__(self, value: Any) -> Misfit | None:
        """Hold a value against the rule."""
        ...


def parse(raw: bytes, where: str) -> dict[str, Any]:
    """Return the manifest in a file's bytes. ``where``: its path, for messages.

    Raises SourceError for what is no JSON object, and for one that is not of the form that w4pack writes;
    Refused for a version that is not known here.
    """
    value = _read(raw, where)
    if not isinstance(value, dict):
        raise unreadable(where, _named(value))
    _check_versions(value, where)
    misfit = FORM(value)
    if misfit is not None:
        raise damaged(where, *misfit)
    return value


def _read(raw: bytes, where: str) -> Any:
    try:
        return json.loads(raw.decode("utf-8-sig"), object_pairs_hook=partial(_once, where))
    except json.JSONDecodeError as err:
        raise unreadable(where, f"line {err.lineno}, column {err.colno}: {err.msg}") from err
    except UnicodeDecodeError as err:
        raise unreadable(where, f"no UTF-8 at byte {err.start:,}") from err
    except RecursionError as err:
        raise unreadable(where, "values nested too deep") from err
    except ValueError as err:  # what Python does not take for a number
        raise unreadable(where, "a number of thousands of digits") from err


def _once(where: str, members: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of its members. A name given twice is refused: readers take one or the other."""
    made = dict(members)
    if len(made) < len(members):
        twice, times = Counter(name for name, _ in members).most_common(1)[0]
        raise damaged(where, twice, "one member of this name", str(times))
    return made


def unreadable(where: str, found: str | None) -> SourceError:
    """Return the error of a file that is no manifest at all."""
    return SourceError(
        "the manifest cannot be read",
        code="manifest",
        where=where,
        expected="a JSON object",
        found=found,
        hint=AS_WRITTEN,
    )


def damaged(where: str, member: str, expected: str, found: str) -> SourceError:
    """Return the error of a member that is not what w4pack writes. ``where``: the manifest's path."""
    return SourceError(
        "the manifest is damaged",
        code="manifest",
        where=f"{where}: {member}",
        expected=expected,
        found=found,
        hint=AS_WRITTEN,
    )


def _check_versions(value: Mapping[str, Any], where: str) -> None:
    """Refuse another version before anything else is looked at: other members may mean other things."""
    tool = value.get("tool")
    writer = tool if isinstance(tool, dict) else {}
    for member, holder, known in (("schema", value, SCHEMA), ("tool.format", writer, FORMAT)):
        version = holder.get(member.rpartition(".")[2])
        if type(version) is int and version != known:
            raise Refused(
                "the manifest is of a version that this version of w4pack does not know",
                code="manifest-version",
                where=f"{where}: {member}",
                expected=str(known),
                found=_named(version) + _written_by(writer),
                hint="use the version of w4pack that wrote it, or a later one",
            )


def _written_by(tool: Mapping[str, Any]) -> str:
    version = tool.get("version")
    return f", written by w4pack {version[:SHOWN]}" if isinstance(version, str) else ""


# ---------------------------------------------------------------- rules


def _named(value: Any) -> str:
    """Return a JSON value as a message shows it."""
    text = json.dumps(value)
    if len(text) <= SHOWN:
        return text
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return f"{text[: SHOWN - 3]}..."


def _below(key: str, misfit: Misfit) -> Misfit:
    member, expected, found = misfit
    return (f"{key}.{member}" if member else key), expected, found


@dataclass(frozen=True, slots=True)
class _Value:
    """A value without members of its own."""

    expected: str
    fits: Callable[[Any], bool]

    def __call__(self, value: Any) -> Misfit | None:
        return None if self.fits(value) else ("", self.expected, _named(value))


@dataclass(frozen=True, slots=True)
class _List:
    """A list of values of one rule."""

    expected: str
    each: Rule

    def __call__(self, value: Any) -> Misfit | None:
        if type(value) is not list:
            return "", self.expected, _named(value)
        for number, item in enumerate(value):
            misfit = self.each(item)
            if misfit is not None:
                return _below(str(number), misfit)
        return None


@dataclass(frozen=True, slots=True)
class _OrNull:
    """A value, or null."""

    rule: Rule

    @property
    def expected(self) -> str:
        return f"{self.rule.expected}, or null"

    def __call__(self, value: Any) -> Misfit | None:
        return None if value is None else self.rule(value)


@dataclass(frozen=True, slots=True)
class _Object:
    """An object: members that it must have, and may have; ``each``: of all, whatever their names are."""

    must: Mapping[str, Rule]
    may: Mapping[str, Rule]
    each: Rule | None = None
    expected: str = "an object"
    may_be_empty: bool = True

    def __call__(self, value: Any) -> Misfit | None:
        if type(value) is not dict or (not value and not self.may_be_empty):
            return "", self.expected, _named(value)
        for key, rule in self.must.items():
            if key not in value:
                return key, rule.expected, "nothing"
        for key, rule in (*self.must.items(), *self.may.items()):
            misfit = rule(value[key]) if key in value else None
            if misfit is not None:
                return _below(key, misfit)
        return None if self.each is None else _first(value, self.each)


def _first(values: Mapping[str, Any], rule: Rule) -> Misfit | None:
    for key, value in values.items():
        misfit = rule(value)
        if misfit is not None:
            return _below(key, misfit)
    return None


def _is_shape(value: Any) -> bool:
    return type(value) is list and all(type(size) is int and size >= 0 for size in value)


TEXT = _Value("text", lambda value: type(value) is str)
WHOLE = _Value("a whole number", lambda value: type(value) is int)  # true is an int, and none here
FLAG = _Value("true or false", lambda value: type(value) is bool)
SHAPE = _Value("a list of sizes", _is_shape)
SHA256 = _Value(
    "a sha256: 64 hexadecimal digits",
    lambda value: type(value) is str and re.fullmatch("[0-9a-f]{64}", value) is not None,
)
OBJECT = _Object({}, {})
OBJECTS = _List("a list of objects", OBJECT)
TENSOR = _Object({"dtype": TEXT, "shape": SHAPE, "sha256": SHA256}, {"sample": TEXT})
SOURCE_FILE = _Object(
    {"name": TEXT, "size": WHOLE, "header": TEXT}, {"sample": _OrNull(TEXT), "sha256": _OrNull(SHA256)}
)
SOURCE = _Object(
    {}, {"origin": _OrNull(_Object({}, {}, TEXT)), "files": _List("a list of objects", SOURCE_FILE)}
)
BITS = _Object({}, {"act_bits": WHOLE, "kv_bits": WHOLE})
OPTIONS = _Object({}, {"to": TEXT, "rotate": TEXT, "quantize": _OrNull(BITS)})
QUANTIZATION = _Object(
    {}, {"online": SHA256, "calibration": _OrNull(_Object({}, {"sketch": _List("a list of text", TEXT)}))}
)
WAY_BACK = _Object(
    {
        "layers": _Object({}, {}, OBJECT),
        "dense": OBJECTS,
        "dropped": OBJECTS,
        "configs": _Object({}, {}, TEXT),
        "source_tensors": SHA256,
    },
    {},
)
FORM = _Object(
    {
        "schema": WHOLE,
        "tool": _Object({"format": WHOLE}, {"version": TEXT}),
        "target": TEXT,
        "options": OPTIONS,
        "lossless": FLAG,
        "source": SOURCE,
        "files": _Object({"config.json": SHA256}, {}, SHA256),
        "tensors": _Object({}, {}, TENSOR, "an entry for each tensor", may_be_empty=False),
        "layers": _Object({}, {}, _Object({}, {"reason": TEXT})),
    },
    {
        "plan": TEXT,
        "config": _Object({}, {}, TEXT),
        "original": _OrNull(SOURCE),
        "quantization": QUANTIZATION,
        "rotation": _Object({}, {"online": OBJECTS}),
        "unpack": WAY_BACK,
    },
)
