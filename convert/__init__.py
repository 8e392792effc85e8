"""The jobs of w4pack as functions: what each command does, without a terminal.

``convert``, ``inspect``, ``check``, ``verify``, ``unpack``, ``push``, ``evaluate``: imported on first use.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from w4pack.convert.api import convert, push, unpack, verify
    from w4pack.convert.measure import evaluate
    from w4pack.convert.questions import check, inspect

__all__ = ["check", "convert", "evaluate", "inspect", "push", "unpack", "verify"]


def __getattr__(name: str) -> Any:
    """Import the jobs when one is first asked for (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    from w4pack.convert.parameters import in_python

    module = {"check": "questions", "inspect": "questions", "evaluate": "measure"}.get(name, "api")
    return in_python(getattr(import_module(f"{__name__}.{module}"), name))


def __dir__() -> list[str]:
    return sorted(__all__)
