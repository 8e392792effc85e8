"""The names that options of the command line have in Python, for errors of the Python API.

An error names options, whoever meets it: that text is the contract. Raised by a function of this package it
also says which parameter, or which field of which value, stands for each option that it names.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import cache, wraps
from inspect import signature
from typing import Any, ParamSpec, TypeVar

from w4pack.convert.errors import W4PackError

COMMAND = re.compile(r"`w4pack [^`]*`|\bw4pack [a-z]+ .*")  # to be pasted into a terminal: stays as it is
OPTION = re.compile(r"(?<![\w-])--[a-z]+(?:-[a-z]+)*")
TOLD = ("what", "where", "expected", "found", "hint")
OPPOSITES = {"--asym": ("--sym", "=False"), "--no-gptaq": ("--gptaq", "=False")}
# Options whose parameter has another name: of the function, or a field of a value.
OTHERS = {"--quantize": "--method", "--verify": "--verify-after", "--engine": "--engines"}
P = ParamSpec("P")
R = TypeVar("R")


@cache
def in_python(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function of the Python API whose errors name its parameters beside the options."""

    @wraps(function)
    def named(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except W4PackError as err:
            err.in_python = _told(err, spellings(function))
            raise

    named.__module__ = __name__.rpartition(".")[0]  # where it is found: a reference to it can be pickled
    return named


def spellings(function: Callable[..., Any]) -> dict[str, str]:
    """Return option -> how it is written in a call of a function."""
    from w4pack.convert.jobs.running import Running
    from w4pack.convert.opening import Where
    from w4pack.convert.planning.options import ConvertOptions
    from w4pack.convert.planning.quantize_options import QuantizeOptions

    own = signature(function).parameters
    found: dict[str, str] = {}
    for name, kind in (("running", Running), ("where", Where)):
        if name in own:
            found |= {_option(f.name): f"{name}={kind.__name__}({f.name}=...)" for f in fields(kind)}
    if "options" in own:
        quantize = fields(QuantizeOptions)
        found |= {_option(f.name): f"quantize=QuantizeOptions({f.name}=...)" for f in quantize}
        found |= {_option(f.name): f"{f.name}=..." for f in fields(ConvertOptions) if f.name != "quantize"}
    return found | {_option(name): f"{name}=..." for name in own}


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _told(err: W4PackError, names: dict[str, str]) -> str | None:
    """Return what each option of an error is in Python; None where it names none."""
    found = {option: _spelling(option, names) for option in _options(err)}
    told = [f"`{option}` is `{name}`" for option, name in found.items() if name is not None]
    return ", ".join(told) or None


def _spelling(option: str, names: dict[str, str]) -> str | None:
    option, value = OPPOSITES.get(option, (option, None))
    name = names.get(OTHERS.get(option, option)) or names.get(option)
    return name if name is None or value is None else name.replace("=...", value)


def _options(err: W4PackError) -> Iterator[str]:
    for one in (err, *err.problems):
        for part in TOLD:
            yield from OPTION.findall(COMMAND.sub("", getattr(one, part) or ""))
