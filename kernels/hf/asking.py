"""What ``w4pack.load`` takes, as arguments of ``from_pretrained``.

transformers hands a keyword that it does not know to the model class, which raises a TypeError: nothing of it
reaches the quantizer. ``install`` wraps ``PreTrainedModel.from_pretrained``, where all of them pass: of a
call that names one of ours and loads an artifact, ours go to the config of the quantizer that is made during
the call. Every other call is handed on as it is: another model may have an argument of the same name.
Of each, the path is kept during the call: transformers shows a quantizer the files once the model is built.
"""

import os
from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from w4pack.convert.errors import UsageError
from w4pack.convert.files.checkpoint import CONFIG

METHOD = "w4pack"
SETTINGS = ("act_bits", "kv_bits", "check_hashes")  # as `w4pack.load` has them
INSTEAD = {  # of what else `w4pack.load` takes
    "device": "from_pretrained(PATH, device_map=DEVICE)",
    "threads": "w4pack.load(PATH, threads=N); transformers reads with its own",
}

_folder: ContextVar[Path | None] = ContextVar("w4pack_folder", default=None)
_asked: ContextVar[dict[str, Any] | None] = ContextVar("w4pack_asked", default=None)


def take() -> dict[str, Any]:
    """Return the settings of the ``from_pretrained`` that runs, once: for the quantizer that it makes."""
    asked = _asked.get() or {}
    _asked.set(None)  # a model that is loaded inside has its own
    return asked


def folder() -> Path | None:
    """Return the folder that the ``from_pretrained`` that runs was given; None: an artifact of the Hub."""
    return _folder.get()


def install() -> None:
    """Let ``from_pretrained`` of all model classes take the settings. May be called again."""
    function = PreTrainedModel.from_pretrained.__func__
    if not getattr(function, "takes_w4pack_settings", False):
        PreTrainedModel.from_pretrained = classmethod(_wrapped(function))


def _wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def from_pretrained(cls: type[PreTrainedModel], *args: Any, **kwargs: Any) -> Any:
        token = _folder.set(_folder_of(args, kwargs))
        try:
            return _with_settings(original, cls, args, kwargs)
        finally:
            _folder.reset(token)

    from_pretrained.takes_w4pack_settings = True  # type: ignore[attr-defined]
    return from_pretrained


def _folder_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Path | None:
    path = args[0] if args else kwargs.get("pretrained_model_name_or_path")
    if not isinstance(path, (str, os.PathLike)):
        return None
    found = Path(path, kwargs.get("subfolder") or "")
    return found if (found / CONFIG).is_file() else None


def _with_settings(
    original: Callable[..., Any], cls: type[PreTrainedModel], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if not kwargs.keys() & {*SETTINGS, *INSTEAD} or not _loads_an_artifact(args, kwargs):
        return original(cls, *args, **kwargs)
    for name, hint in INSTEAD.items():
        if name in kwargs:
            raise UsageError(
                f"from_pretrained does not take `{name}`", code="argument", where=name, hint=hint
            )
    token = _asked.set({name: kwargs.pop(name) for name in SETTINGS if name in kwargs})
    try:
        return original(cls, *args, **kwargs)
    finally:
        _asked.reset(token)


def _loads_an_artifact(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell by the config of a call, which the auto classes hand over, else by that of the path."""
    path, config = args[0] if args else kwargs.get("pretrained_model_name_or_path"), kwargs.get("config")
    if isinstance(config, PretrainedConfig):
        block = getattr(config, "quantization_config", None)
    else:
        others = {k: v for k, v in kwargs.items() if k not in ("config", "pretrained_model_name_or_path")}
        found, _ = PretrainedConfig.get_config_dict(config or path, **others)
        block = found.get("quantization_config")
    method = block.get("quant_method") if isinstance(block, dict) else getattr(block, "quant_method", None)
    return bool(method == METHOD)
