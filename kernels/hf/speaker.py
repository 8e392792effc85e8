"""The model, tokenizer and device that ``w4pack generate`` answers with. Loading it loads nothing heavy."""

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from w4pack.convert.console import Given
from w4pack.convert.errors import UsageError
from w4pack.convert.events import Reporter, Told
from w4pack.kernels.hf import before

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Speaker:
    """A loaded model with its tokenizer, how it is asked, and what was warned of so far."""

    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    given: Given
    warnings: Sequence[Mapping[str, Any]]
    load_seconds: float


def open_speaker(folder: Path, given: Given, tell: Told) -> Speaker:
    """Load what ``before.check`` has let through, and tell what is worth knowing of it.

    Raises:
        UsageError: a device or a chat template that is missing.
        SourceError: no tokenizer, or an artifact that is broken.
    """
    from transformers.utils import logging

    from w4pack.kernels.hf.load import load

    logging.set_verbosity_error()  # its notes are for those who write programs
    tokenizer = _tokenizer(folder)
    if given["system"] is not None and not tokenizer.chat_template:
        raise before.no_template(folder)
    device = given["device"] or _default_device(tell)
    start = time.perf_counter()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", UserWarning)
        model = load(folder, device, act_bits=given["act_bits"], kv_bits=given["kv_bits"])
    for warning in told:
        tell.event("warning", **_of_loading(folder, str(warning.message)))
    return Speaker(model, tokenizer, given, tuple(tell.warnings), time.perf_counter() - start)


def _of_loading(folder: Path, text: str) -> dict[str, str | None]:
    """Return the warning that a library has given in words."""
    return {"code": "loading", "where": str(folder), "expected": None, "found": None, "text": text}


def _tokenizer(folder: Path) -> "PreTrainedTokenizerBase":
    """Return the tokenizer. Its vocabulary is there, else some classes would make an empty one."""
    from transformers import AutoTokenizer

    try:
        found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    except Exception as err:  # transformers and its tokenizers raise nearly anything
        raise before.no_tokenizer(folder, f"{type(err).__name__}: {err}") from err
    return found


def _default_device(tell: Reporter) -> str:
    """Return ``cuda`` if the kernels can run on the current card, else ``cpu``; say which, and why."""
    import torch

    from w4pack.kernels import launch

    reason = "torch sees no GPU"
    if torch.cuda.is_available():
        try:
            launch.device(torch.cuda.current_device())
        except UsageError as err:
            reason = err.what
        else:
            tell.event("note", text=f"running on {torch.cuda.get_device_name()}")
            return "cuda"
    tell.event("note", text=f"running on the CPU, slowly: {reason}")
    return "cpu"
