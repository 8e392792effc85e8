"""``w4pack generate``: text from an artifact, streamed to stdout; figures and notes go to stderr.

Imports nothing heavy when loaded, so that a missing extra is said in words.
"""

import math
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from w4pack.convert.console import Given, print_json, question_reporter, say, where_of
from w4pack.convert.errors import SourceError, UsageError, W4PackError
from w4pack.convert.events import SCHEMA
from w4pack.convert.hub.resolve import HubSource, parse_source, snapshot

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

    from w4pack.kernels.hf.streams import Stream


VOCABULARIES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.*",
    "*.spm",
    "spiece.model",
    "*.tiktoken",
    "tekken.json",
)


@dataclass(frozen=True, slots=True)
class Speaker:
    """A loaded model with its tokenizer, and how it is asked."""

    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    given: Given
    load_seconds: float


def run_generate(given: Given) -> None:
    """Answer every prompt.

    Raises:
        UsageError: an extra, a device or a chat template that is missing; options that exclude each other.
        SourceError: no tokenizer, or an artifact that is broken.
    """
    _require_extras()
    prompts = [_prompt(text) for text in given["prompts"]]
    if given["system"] is not None and not given["chat"]:
        raise UsageError("a system text needs the chat template", where="--system", found="--no-chat")
    if not math.isfinite(given["temperature"]):
        raise UsageError("no such temperature", where="--temperature", found=str(given["temperature"]))
    speaker = _open(given)
    for number, prompt in enumerate(prompts):
        if number and not given["as_json"]:
            print()
        _answer(speaker, prompt)


def _prompt(text: str) -> str:
    if text == "-":
        if sys.stdin is None:
            raise UsageError("no prompt: stdin is closed", code="prompt", where="-")
        try:
            text = sys.stdin.read()
        except UnicodeDecodeError as err:
            raise _no_text("stdin") from err
    try:
        text.encode()
    except UnicodeEncodeError as err:  # bytes that are no UTF-8 arrive as lone surrogates
        raise _no_text("PROMPT") from err
    return text


def _no_text(where: str) -> UsageError:
    return UsageError("a prompt is no text", code="prompt", where=where, expected="UTF-8")


def _require_extras() -> None:
    missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if missing:
        raise UsageError(
            f"running a model needs {' and '.join(missing)}",
            code="extra-missing",
            hint="pip install 'w4pack[gpu]'",
        )


def _open(given: Given) -> Speaker:
    from transformers.utils import logging

    from w4pack.kernels.hf.load import load

    logging.set_verbosity_error()  # its notes are for those who write programs
    folder = _folder(given)
    tokenizer = _tokenizer(folder)
    if given["system"] is not None and not tokenizer.chat_template:
        raise UsageError("the tokenizer has no chat template", where=str(folder), hint="leave out --system")
    device = given["device"] or _default_device(given)
    start = time.perf_counter()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", UserWarning)
        model = load(folder, device, act_bits=given["act_bits"], kv_bits=given["kv_bits"])
    for warning in told:
        _note(given, f"warning: {warning.message}")
    return Speaker(model, tokenizer, given, time.perf_counter() - start)


def _folder(given: Given) -> Path:
    where = where_of(given)
    found = parse_source(given["path"], where.revision)
    if not isinstance(found, HubSource):
        return found.path
    question_reporter(given).event("note", text=found.notice)
    return snapshot(found, cache_dir=where.cache_dir, local_files_only=where.local_files_only)


def _tokenizer(folder: Path) -> "PreTrainedTokenizerBase":
    """Return the tokenizer. Without a vocabulary some classes would make an empty one."""
    from transformers import AutoTokenizer

    if not any(file for pattern in VOCABULARIES for file in folder.glob(pattern)):
        raise _no_tokenizer(folder, None)
    try:
        found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    except Exception as err:  # transformers and its tokenizers raise nearly anything
        raise _no_tokenizer(folder, str(err)) from err
    return found


def _no_tokenizer(folder: Path, found: str | None) -> SourceError:
    return SourceError(
        "no tokenizer that transformers can load",
        code="no-tokenizer",
        where=str(folder),
        expected=", ".join(VOCABULARIES),
        found=None if found is None else found.strip().partition("\n")[0][:200],
        hint="copy the tokenizer's files from the source of the artifact",
    )


def _default_device(given: Given) -> str:
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
            _note(given, f"running on {torch.cuda.get_device_name()}")
            return "cuda"
    _note(given, f"running on the CPU, slowly: {reason}")
    return "cpu"


def _note(given: Given, text: str) -> None:
    if not given["quiet"] and not given["as_json"]:
        say(text)


# ---- one prompt ------------------------------------------------------------------------------------


def _answer(speaker: Speaker, prompt: str) -> None:
    from w4pack.kernels.hf.streams import Stream

    given = speaker.given
    ids = _tokens(speaker, prompt)
    stream = Stream(speaker.tokenizer, None if given["as_json"] else sys.stdout)
    try:
        _run(speaker, ids, stream)
    finally:
        stream.line_end()
    if given["as_json"]:
        print_json(_record(speaker, prompt, ids, stream))
    else:
        _note(given, _figures(speaker, stream))


def _tokens(speaker: Speaker, prompt: str) -> "Tensor":
    """Return the prompt's token ids (1, length), in the chat template where there is one."""
    import torch

    tokenizer, given = speaker.tokenizer, speaker.given
    if given["chat"] and tokenizer.chat_template:
        system = [] if given["system"] is None else [{"role": "system", "content": given["system"]}]
        chat = [*system, {"role": "user", "content": prompt}]
        try:
            found: Any = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)
        except Exception as err:  # a template is a program; its errors are of any class
            raise W4PackError(
                "the chat template does not take this conversation",
                code="chat-template",
                found=str(err).strip().partition("\n")[0][:200],
                hint="--no-chat sends the prompt as it is",
            ) from err
    else:
        found = tokenizer(prompt)
    ids = list(found["input_ids"])
    if not ids:
        raise UsageError("the prompt is empty", code="prompt-length", where="PROMPT", expected="some text")
    most = _context(speaker)
    if most is not None and len(ids) >= most:
        raise UsageError(
            "the prompt has no room in the model's context",
            code="prompt-length",
            expected=f"at most {most - 1} tokens",
            found=str(len(ids)),
        )
    return torch.tensor([ids], device=speaker.model.device)


def _context(speaker: Speaker) -> int | None:
    """Return how many tokens the model was made for, prompt and answer together."""
    found: int | None = getattr(speaker.model.config.get_text_config(), "max_position_embeddings", None)
    return found


def _most_new(speaker: Speaker, prompt_tokens: int) -> int:
    """Return how long an answer may get: as asked, and within the context."""
    asked: int = speaker.given["max_new_tokens"]
    context = _context(speaker)
    return asked if context is None else min(asked, context - prompt_tokens)


def _run(speaker: Speaker, ids: "Tensor", stream: "Stream") -> None:
    import torch
    from transformers import LogitsProcessorList

    from w4pack.kernels.hf.streams import FiniteScores

    given, model = speaker.given, speaker.model
    torch.manual_seed(given["seed"])
    sampling: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    # A stream is of one answer, whatever generation_config.json says.
    one = {"num_beams": 1, "num_return_sequences": 1}
    if given["temperature"] > 0:
        sampling = {
            "do_sample": True,
            "temperature": given["temperature"],
            "top_p": given["top_p"],
            "top_k": 0,
        }
    ends = model.generation_config.eos_token_id
    first = next(iter(ends), None) if isinstance(ends, list) else ends
    stream.begin()
    model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=_most_new(speaker, ids.shape[1]),
        pad_token_id=speaker.tokenizer.pad_token_id if first is None else first,
        logits_processor=LogitsProcessorList([FiniteScores(model)]),
        streamer=stream,
        **sampling,
        **one,
    )


def _record(speaker: Speaker, prompt: str, ids: "Tensor", stream: "Stream") -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "prompt": prompt,
        "text": stream.text,
        "prompt_tokens": ids.shape[1],
        "new_tokens": stream.count,
        "finish": "length" if stream.count >= _most_new(speaker, ids.shape[1]) else "stop",
        "device": str(speaker.model.device),
        "dtype": str(speaker.model.dtype).removeprefix("torch."),
        **_bits(speaker.model),
        "load_seconds": round(speaker.load_seconds, 3),
        "first_token_seconds": round(stream.first_seconds, 4),
        "tokens_per_second": None if stream.rate is None else round(stream.rate, 2),
    }


def _bits(model: "PreTrainedModel") -> dict[str, int]:
    """Return the bits that the model runs with, 16 where the artifact quantizes nothing at run time."""
    settings = getattr(model, "online_settings", None)
    return {"act_bits": settings.act_bits, "kv_bits": settings.kv_bits} if settings else {}


def _figures(speaker: Speaker, stream: "Stream") -> str:
    parts: Sequence[str] = (
        f"loaded in {speaker.load_seconds:.2f} s",
        f"first token after {stream.first_seconds:.3f} s",
        f"{stream.count} tokens" + ("" if stream.rate is None else f", {stream.rate:.1f} a second"),
    )
    return " · ".join(parts)
