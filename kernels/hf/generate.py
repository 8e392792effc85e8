"""``w4pack generate``: text from an artifact, streamed to stdout; figures and notes go to stderr.

Imports nothing heavy when loaded, so that a missing extra is said in words.
"""

import sys
from collections.abc import Sequence
from traceback import walk_tb
from typing import TYPE_CHECKING, Any

from w4pack.convert.console import Given, print_json, question_reporter
from w4pack.convert.errors import UsageError, W4PackError, require_extra, require_installed
from w4pack.convert.events import SCHEMA, Told
from w4pack.kernels.hf import before
from w4pack.kernels.hf.speaker import Speaker, open_speaker

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from w4pack.kernels.hf.streams import Stream


STOP, LENGTH, CONTEXT = "stop", "length", "context"  # why an answer ended
# What a setting of a wrong type or size ends in. No RuntimeError: where memory ends, that is one too.
OF_SETTINGS = (
    ValueError, TypeError, ImportError, LookupError, AttributeError, ArithmeticError, NotImplementedError,
)  # fmt: skip
A_MODULE_RUNS = "torch.nn.modules.module"  # calls every module
NEEDS = ("running a model", ("torch", "transformers"), "gpu")  # what, packages, the extra that brings them


def run_generate(given: Given) -> None:
    """Answer every prompt.

    Raises:
        UsageError: an extra, a device or a chat template that is missing; options that exclude each other.
        SourceError: no tokenizer, or an artifact that is broken.
    """
    require_installed(*NEEDS)
    idle = before.check_options(given)
    tell = Told(question_reporter(given))
    folder = before.folder_of(given, tell)
    before.check(folder, given)
    prompts = [_prompt(text) for text in given["prompts"]]
    require_extra(*NEEDS)
    for warning in idle:
        tell.event("warning", **warning)
    speaker = open_speaker(folder, given, tell)
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


# ---- one prompt ------------------------------------------------------------------------------------


def _answer(speaker: Speaker, prompt: str) -> None:
    from w4pack.kernels.hf.streams import Stream

    given = speaker.given
    tell = Told(question_reporter(given), speaker.warnings)
    ids = _tokens(speaker, prompt)
    stream = Stream(speaker.tokenizer, None if given["as_json"] else sys.stdout)
    try:
        _run(speaker, ids, stream)
    finally:
        stream.line_end()
    reason = _finish_reason(speaker, ids.shape[1], stream)
    if reason == LENGTH:
        tell.event("note", text=f"the answer is cut at --max-new-tokens {given['max_new_tokens']}")
    elif reason == CONTEXT:
        tell.event("warning", **_full(speaker))
    if given["as_json"]:
        print_json(_record(speaker, prompt, ids, stream, reason) | {"warnings": tell.warnings})
    tell.event("note", text=_figures(speaker, stream))


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
            hint=f"shorten it: prompt and answer together have {most} tokens",
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
    first = next(iter(_ends(model)), None)
    stream.begin()
    try:
        model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=_most_new(speaker, ids.shape[1]),
            pad_token_id=speaker.tokenizer.pad_token_id if first is None else first,
            logits_processor=LogitsProcessorList([FiniteScores(model)]),
            streamer=stream,
            tokenizer=speaker.tokenizer,  # for `stop_strings`
            **sampling,
            **one,
        )
    except OF_SETTINGS as error:
        if not _of_transformers(error):
            raise  # no setting: those are taken by transformers' own code
        raise UsageError(
            "transformers cannot generate with the model's settings",
            where="generation_config.json",
            found=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}",
            hint="change the setting it names, or remove the file",
        ) from error


def _of_transformers(error: Exception) -> bool:
    """Tell whether an error comes out of transformers' own code, with none of ours below it and no module."""
    _, *below = (frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__))
    packages = {name.partition(".")[0] for name in below}
    return "transformers" in packages and "w4pack" not in packages and A_MODULE_RUNS not in below


def _ends(model: "PreTrainedModel") -> list[int]:
    """Return the tokens that end an answer."""
    found = model.generation_config.eos_token_id
    return list(found) if isinstance(found, list) else [] if found is None else [found]


def _finish_reason(speaker: Speaker, prompt_tokens: int, stream: "Stream") -> str:
    """Return why the answer ended: by itself, at the length asked for, or where the context is full."""
    if stream.last in _ends(speaker.model) or stream.count < _most_new(speaker, prompt_tokens):
        return STOP
    return LENGTH if stream.count >= speaker.given["max_new_tokens"] else CONTEXT


def _full(speaker: Speaker) -> dict[str, str]:
    """Return the warning that an answer ended where the context does."""
    most = _context(speaker)
    return {
        "code": "context-full",
        "where": "config.json: max_position_embeddings",
        "expected": "room for the whole answer",
        "found": f"{most} tokens, prompt and answer together",
        "text": f"the answer is cut: the model's context of {most} tokens is full",
    }


def _record(speaker: Speaker, prompt: str, ids: "Tensor", stream: "Stream", reason: str) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "prompt": prompt,
        "text": stream.text,
        "prompt_tokens": ids.shape[1],
        "new_tokens": stream.count,
        "finish": STOP if reason == STOP else LENGTH,
        "finish_reason": reason,
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
