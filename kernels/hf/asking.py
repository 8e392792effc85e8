"""What ``w4pack.load`` takes, as arguments of ``from_pretrained``.

transformers hands a keyword that it does not know to the model class, which raises a TypeError: nothing of it
reaches the quantizer. ``install`` wraps ``PreTrainedModel.from_pretrained``, where all of them pass: what is
ours goes to the config of the quantizer that is made during the call.
"""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

from transformers import PreTrainedModel

from w4pack.convert.errors import UsageError

SETTINGS = ("act_bits", "kv_bits", "check_hashes")  # as `w4pack.load` has them
INSTEAD = {  # of what else `w4pack.load` takes
    "device": "from_pretrained(PATH, device_map=DEVICE)",
    "threads": "w4pack.load(PATH, threads=N); transformers reads with its own",
}


@dataclass(slots=True)
class Asked:
    """Settings of one call.

    values  name -> what was given
    taken   whether the config of an artifact has taken them
    """

    values: dict[str, Any] = field(default_factory=dict)
    taken: bool = False


_asked: ContextVar[Asked | None] = ContextVar("w4pack_asked", default=None)


def take() -> dict[str, Any]:
    """Return the settings of the ``from_pretrained`` that is running, for the quantizer that it makes."""
    asked = _asked.get()
    if asked is None:
        return {}
    asked.taken = True
    return asked.values


def install() -> None:
    """Let ``from_pretrained`` of all model classes take the settings. May be called again."""
    function = PreTrainedModel.from_pretrained.__func__
    if not hasattr(function, "takes"):
        PreTrainedModel.from_pretrained = classmethod(_wrapped(function))


def _wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def from_pretrained(cls: type[PreTrainedModel], *args: Any, **kwargs: Any) -> Any:
        asked = Asked({name: kwargs.pop(name) for name in SETTINGS if name in kwargs})
        if not asked.values and not INSTEAD.keys() & kwargs.keys():
            return original(cls, *args, **kwargs)
        token = _asked.set(asked)
        try:
            found = original(cls, *args, **kwargs)
        except TypeError as err:
            ours = _instead(err) if asked.taken else None
            if ours is None:
                raise
            raise ours from err
        finally:
            _asked.reset(token)
        if asked.values and not asked.taken:
            raise _of_artifacts(next(iter(asked.values)))
        return found

    from_pretrained.takes = SETTINGS  # type: ignore[attr-defined]
    return from_pretrained


def _instead(err: TypeError) -> UsageError | None:
    """Return what a model class says of an argument of ``w4pack.load``, in our words; None: of another."""
    name = next((name for name in INSTEAD if f"'{name}'" in str(err)), None)
    if name is None:
        return None
    return UsageError(
        f"from_pretrained does not take `{name}`", code="argument", where=name, hint=INSTEAD[name]
    )


def _of_artifacts(name: str) -> UsageError:
    return UsageError(
        "only a w4pack artifact has this setting",
        code="argument",
        where=name,
        expected="config.json with quantization_config.quant_method 'w4pack'",
        found="another model",
    )
