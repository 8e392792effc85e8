"""Plain dataclasses to JSON and back, for the plan and the manifest: closed types, nothing is guessed."""

import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
NAMES = {
    dict: "an object",
    list: "a list",
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}  # of JSON, for messages


def to_plain(value: Any) -> Any:
    """Turn nested dataclasses, tuples and mappings into JSON values, in order: equal values, equal text."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    return value


class Misfit(ValueError):
    """A value that is not what a dataclass says: where in it, what was expected, what was found."""

    def __init__(self, where: str, expected: str, found: str) -> None:
        super().__init__(f"{where}: expected {expected}, found {found}")
        self.where, self.expected, self.found = where, expected, found


def from_plain(kind: type[T], value: Any, where: str | None = None) -> T:
    """Rebuild a dataclass from ``to_plain``'s result. Raises Misfit where fields or types differ.

    where  what messages call the value; default: the dataclass's name
    """
    result: T = _build(kind, value, kind.__name__ if where is None else where)
    return result


def _build(kind: Any, value: Any, where: str) -> Any:
    origin = get_origin(kind)
    if is_dataclass(kind):
        return _dataclass(kind, value, where)
    if origin in (types.UnionType, Union):
        return _union(kind, value, where)
    if origin is tuple:
        inner = get_args(kind)[0]
        items = _expect(value, list, where)
        return tuple(_build(inner, item, f"{where}.{number}") for number, item in enumerate(items))
    if origin is Literal:
        if value not in get_args(kind):
            raise Misfit(where, f"one of {', '.join(map(str, get_args(kind)))}", _named(value))
        return value
    if kind is Any:
        return value
    if origin is not None and issubclass(origin, Mapping):
        inner = get_args(kind)[1]
        return {
            key: _build(inner, item, f"{where}.{key}") for key, item in _expect(value, dict, where).items()
        }
    return _expect(value, kind, where)


def _expect(value: Any, kind: type, where: str) -> Any:
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise Misfit(where, NAMES.get(kind, kind.__name__), _named(value))
    return value


def _named(value: Any) -> str:
    return f"{value!r:.80}" if isinstance(value, str) else NAMES.get(type(value), type(value).__name__)


def _union(kind: Any, value: Any, where: str) -> Any:
    if value is None:
        return None
    return _build(next(arg for arg in get_args(kind) if arg is not type(None)), value, where)


def _dataclass(kind: Any, value: Any, where: str) -> Any:
    known = get_type_hints(kind)
    given = _expect(value, dict, where)
    names = [f.name for f in fields(kind)]
    if set(given) != set(names):
        raise Misfit(where, f"the members {', '.join(names)}", ", ".join(sorted(given)) or "none")
    return kind(**{name: _build(known[name], given[name], f"{where}.{name}") for name in names})
