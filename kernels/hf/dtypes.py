"""The dtype of a model's activations: what is asked for, what config.json says, or an error.

The kernels compute in float16 and bfloat16. A model of float32 runs in bfloat16, which has its range, with a
warning. Any other dtype is refused, however it comes: as an argument of ``load`` or of ``from_pretrained``,
or in config.json.
"""

import warnings
from pathlib import Path

import torch
from transformers.modeling_utils import get_state_dict_dtype, load_state_dict

from w4pack.convert.errors import Refused, UsageError, W4PackError
from w4pack.convert.files.checkpoint import CONFIG
from w4pack.kernels import arguments
from w4pack.kernels.artifact import Artifact

EXPECTED = "float16 or bfloat16"


def asked(given: torch.dtype | str | None) -> torch.dtype | None:
    """Return the dtype that an argument asks for; None: the model's own.

    Raises:
        UsageError: a dtype that the kernels do not compute in, or none at all.
    """
    if given is None or (isinstance(given, str) and given == "auto"):
        return None
    wanted = getattr(torch, given, None) if isinstance(given, str) else given
    if not isinstance(wanted, torch.dtype) or wanted not in arguments.NAMES:
        raise _not_taken(given)
    return wanted


def chosen(artifact: Artifact, wanted: torch.dtype | None) -> torch.dtype:
    """Return the dtype a model computes in, with a warning where it is not quite what was meant.

    Args:
        artifact: opened.
        wanted: what was asked for; None, or the model's own: nothing was.

    Raises:
        UsageError: asked for one that the kernels do not compute in.
        Refused: the model's own is none, and nothing else was asked for.
    """
    own = own_dtype(artifact)
    if wanted is None or wanted == own:
        return _of_config(own, artifact.folder)
    if wanted not in arguments.NAMES:
        raise _not_taken(wanted)
    if wanted == torch.float16 and own in (torch.bfloat16, torch.float32):
        _warn(f"float16 ends at 65504, and the model is of {own}: outputs may overflow")
    return wanted


def narrowed(dtype: torch.dtype) -> torch.dtype:
    """Return a 16-bit dtype for a model of ``dtype``, whose it may be: ``chosen`` judges it later."""
    return dtype if dtype in arguments.NAMES else torch.bfloat16


def own_dtype(artifact: Artifact) -> object:
    """Return the model's dtype as config.json gives it, or as transformers finds it where that is silent."""
    said = artifact.config.get("dtype") or artifact.config.get("torch_dtype")
    if said is None:
        first, _ = artifact.files[min(artifact.files)]
        found: torch.dtype = get_state_dict_dtype(load_state_dict(str(first), map_location="meta"))
        return found
    return getattr(torch, said, said) if isinstance(said, str) else said


def _of_config(own: object, folder: Path) -> torch.dtype:
    if own == torch.float32:
        _warn(f"the kernels compute in 16 bit: bfloat16 instead of {own}")
        return torch.bfloat16
    if isinstance(own, torch.dtype) and own in arguments.NAMES:
        return own
    raise _not_run(own, folder)


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=4)


def _not_taken(given: object) -> UsageError:
    return UsageError(
        "the kernels do not compute in this dtype",
        code="dtype",
        expected=EXPECTED,
        found=str(given)[:80],
    )


def _not_run(own: object, folder: Path) -> W4PackError:
    return Refused(
        "the kernels do not compute in the dtype of the model",
        code="dtype",
        where=f"{folder / CONFIG}: dtype",
        expected=f"{EXPECTED}; float32 runs in bfloat16",
        found=str(own).removeprefix("torch.")[:80],
        hint="load with dtype='bfloat16', or with that of the model that was quantized",
    )
