"""w4pack: 4-bit checkpoints in the order that tensor cores read them.

The root package holds the version and a few names that are imported on first use (PEP 562), so that
``import w4pack`` costs nothing. The jobs (``convert``, ``inspect``, ``check``, ``verify``, ``unpack``,
``push``) are functions of ``w4pack.convert``: ``w4pack.convert`` is a package and stays one, so a root
function of that name would be hidden by the first ``import w4pack.convert.errors``. ``load``, ``register``
and ``sync_cache`` run artifacts and need torch and transformers.
"""

from importlib import import_module

__version__ = "0.1.0"

_LAZY: dict[str, tuple[str, str | None]] = {  # name -> (module, attribute; None: the module itself)
    "convert": ("w4pack.convert", None),
    "load": ("w4pack.kernels.hf.load", "load"),
    "register": ("w4pack.kernels.hf.quantizer", "register"),
    "sync_cache": ("w4pack.kernels.hf.kv_adopt", "sync_cache"),
    "W4PackError": ("w4pack.convert.errors", "W4PackError"),
}
__all__ = ["W4PackError", "__version__", "convert", "load", "register", "sync_cache"]
RUNTIME = ("torch", "transformers")  # of the extra that `load`, `register` and `sync_cache` need


def __getattr__(name: str) -> object:
    """Import what ``_LAZY`` names; anything else is an AttributeError, as for any module."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _LAZY[name]
    try:
        loaded = import_module(module)
    except ModuleNotFoundError as err:
        if err.name not in RUNTIME:
            raise
        raise ImportError(f"w4pack.{name} needs {err.name}: pip install 'w4pack[gpu]'") from err
    return loaded if attribute is None else getattr(loaded, attribute)


def __dir__() -> list[str]:
    return sorted(__all__)
