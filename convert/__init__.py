"""The jobs of w4pack as functions: what each command does, without a terminal.

``convert``, ``inspect``, ``check``, ``verify``, ``unpack`` and ``push`` are imported on first use.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from w4pack.convert.api import check, convert, inspect, push, unpack, verify

__all__ = ["check", "convert", "inspect", "push", "unpack", "verify"]


def __getattr__(name: str) -> Any:
    """Import the jobs when one is first asked for (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from w4pack.convert import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted(__all__)
