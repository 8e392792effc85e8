"""Tokens on their way through a model, one decoder layer in memory at a time.

How a layer is called (masks, positions, rotary tables) is asked of the model itself: its forward runs once
with stand-ins for the layers, which write down what each is given. So no architecture needs code of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from w4pack.convert.errors import Refused
from w4pack.convert.quantize.experts import UNCALIBRATED
from w4pack.convert.quantize.skeleton import Skeleton, replaced


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """What a layer is given beside the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class StandIn(nn.Module):
    """In the place of a decoder layer: writes down its call, and hands on the hidden states it was told to.

    The real layer's attributes can be read through it.
    """

    def __init__(self, original: nn.Module, *, as_tuple: bool, output: torch.Tensor | None = None) -> None:
        super().__init__()
        self.__dict__["original"] = original
        self.as_tuple = as_tuple
        self.output = output
        self.call: Call | None = None
        self.given: torch.Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        """Look up what the stand-in does not have in the layer."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["original"], name)

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the hidden states, as the layer would."""
        self.call, self.given = Call(args, kwargs), hidden
        made = hidden if self.output is None else self.output
        return (made,) if self.as_tuple else made


def _go_on() -> None:
    """Nobody wants the work to end."""


@dataclass(slots=True, eq=False)
class Stream:
    """Batches of hidden states between two layers.

    tokens  (windows, length) int64, cut into batches of equal shape but for the last
    hidden  one (windows of the batch, length, width) tensor a batch
    calls   number of windows of a batch -> what each layer is called with
    check   called before each run of a layer: may raise to end the work
    """

    skeleton: Skeleton
    tokens: list[torch.Tensor]
    hidden: list[torch.Tensor] = field(default_factory=list)
    calls: dict[int, list[Call]] = field(default_factory=dict)
    as_tuple: bool = False
    check: Callable[[], None] = _go_on

    def begin(self) -> None:
        """Embed the tokens and learn how the layers are called."""
        with torch.no_grad():
            for batch in self.tokens:
                hidden, calls = self._enter(batch)
                self.hidden.append(hidden)
                self.calls.setdefault(batch.shape[0], calls)

    def _enter(self, batch: torch.Tensor) -> tuple[torch.Tensor, list[Call]]:
        for as_tuple in (self.as_tuple, not self.as_tuple):
            found = self._try(batch, as_tuple)
            if found is not None:
                self.as_tuple = as_tuple
                return found
        raise Refused(
            "the layers of this model cannot be run one by one",
            code="model-unknown",
            where=self.skeleton.path,
            expected="layers that take hidden states and return them",
            found=type(self.skeleton.model).__name__,
            hint=UNCALIBRATED,
        )

    def _try(self, batch: torch.Tensor, as_tuple: bool) -> tuple[torch.Tensor, list[Call]] | None:
        """Run the body with stand-ins. None: its layers return something else (a tensor, a tuple)."""
        stand_ins = [StandIn(layer, as_tuple=as_tuple) for layer in self.skeleton.layers]
        with replaced(self.skeleton.layers, list(stand_ins)):
            try:
                self.skeleton.model.base_model(batch.to(self.skeleton.device), use_cache=False)
            except (RuntimeError, ValueError, TypeError, AttributeError, IndexError):
                if as_tuple:
                    raise
                return None
        given = [s.given for s in stand_ins]
        first = given[0]
        if first is None or any(g is None or g.shape != first.shape for g in given):
            return None
        return first, [s.call for s in stand_ins if s.call is not None]

    def call(self, index: int, batch: torch.Tensor) -> Call:
        """Return what layer ``index`` is called with for a batch."""
        return self.calls[batch.shape[0]][index]

    def run(self, layer: nn.Module, index: int, hidden: torch.Tensor) -> torch.Tensor:
        """Return a layer's output for one batch."""
        self.check()
        call = self.call(index, hidden)
        with torch.no_grad():
            made = layer(hidden, *call.args, **call.kwargs)
        output: torch.Tensor = made[0] if isinstance(made, tuple) else made
        return output

    def advance(self, layer: nn.Module, index: int) -> None:
        """Send every batch through a layer."""
        for number, hidden in enumerate(self.hidden):
            self.hidden[number] = self.run(layer, index, hidden)

    def logits(self, number: int, row: int | None = None, length: int | None = None) -> torch.Tensor:
        """Return the logits (windows, length, vocabulary) float32 of a batch that is through all layers.

        ``row``: of one of its windows alone, (length, vocabulary); ``length``: of its first tokens.
        """
        part = slice(None) if row is None else slice(row, row + 1), slice(length)
        hidden = self.hidden[number][part]
        stand_ins: list[nn.Module] = [
            StandIn(layer, as_tuple=self.as_tuple, output=hidden) for layer in self.skeleton.layers
        ]
        with replaced(self.skeleton.layers, stand_ins), torch.no_grad():
            tokens = self.tokens[number][part].to(self.skeleton.device)
            made: torch.Tensor = self.skeleton.model(tokens, use_cache=False).logits
        return made.float() if row is None else made[0].float()


def batches_of(tokens: torch.Tensor, per_batch: int) -> list[torch.Tensor]:
    """Cut windows (W, L) into batches."""
    return list(torch.split(tokens, max(1, per_batch)))
