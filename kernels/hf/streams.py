"""What watches a generation: text as it comes, when it came, and whether numbers are still numbers."""

import time
from typing import Any, TextIO

import torch
from torch import nn
from transformers import LogitsProcessor, PreTrainedModel, TextStreamer
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from w4pack.convert.errors import W4PackError


class Stream(TextStreamer):
    """Writes text to a file as soon as it is certain, keeps it, counts tokens and takes times.

    first_seconds  from ``begin`` to the first new token
    rate           tokens per second after the first; None for fewer than two
    last           the last new token; None before the first
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, out: TextIO | None) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.out, self.text, self.count = out, "", 0
        self.first_seconds = 0.0
        self.last: int | None = None
        self._start = self._last = time.perf_counter()
        self._prompt_seen = False

    def begin(self) -> None:
        """Start the clock."""
        self._start = self._last = time.perf_counter()

    @property
    def rate(self) -> float | None:
        """Tokens per second after the first."""
        spent = self._last - self._start - self.first_seconds
        return (self.count - 1) / spent if self.count > 1 and spent > 0 else None

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt, then one token after the other."""
        if self._prompt_seen:
            self.count += value.numel()
            self.last = int(value.flatten()[-1])
            self._last = time.perf_counter()
            if not self.first_seconds:
                self.first_seconds = self._last - self._start
        self._prompt_seen = True
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Write what no later token can change."""
        self.text += text
        if self.out is not None:
            self.out.write(text)
            self.out.flush()

    def line_end(self) -> None:
        """End the line, after an answer or where it was cut off."""
        if self.out is not None and not self.text.endswith("\n"):
            self.out.write("\n")
            self.out.flush()


class FiniteScores(LogitsProcessor):
    """Stops a generation whose scores are no numbers any more, and names the layer where that began.

    Otherwise the first token of the vocabulary would be printed for ever.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores as they are.

        Raises:
            W4PackError: a score is NaN or +Inf.
        """
        if bool((scores.isnan() | scores.isposinf()).any()):
            dtype = str(self.model.dtype).removeprefix("torch.")
            half = self.model.dtype == torch.float16
            raise W4PackError(
                "the model's numbers leave the range of its dtype",
                code="not-finite",
                where=first_not_finite(self.model, input_ids),
                expected=f"finite {dtype} values",
                hint="in Python: w4pack.load(PATH, dtype='bfloat16')" if half else None,
            )
        return scores


def first_not_finite(model: nn.Module, input_ids: torch.Tensor) -> str | None:
    """Run a model once more and return the first module whose output is not finite."""
    found: list[str] = []

    def watch(name: str) -> Any:
        def look(module: nn.Module, inputs: object, output: object) -> None:
            tensors = output if isinstance(output, tuple) else (output,)
            for tensor in tensors:
                floats = isinstance(tensor, torch.Tensor) and tensor.is_floating_point()
                if not found and floats and not bool(tensor.isfinite().all()):
                    found.append(name)

        return module_of[name].register_forward_hook(look)

    module_of = dict(model.named_modules())
    handles = [watch(name) for name in module_of if name]
    try:
        with torch.no_grad():
            model(input_ids)
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None
