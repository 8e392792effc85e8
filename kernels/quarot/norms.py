"""RMS norms that their readers compute: what stands in their place holds the weight, and says the factor.

The weight is the only tensor that counts. Whatever reaches it (a cast, a move, ``load_state_dict``, a change
in place) is in the next pass, as in a norm of the model's own.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from w4pack.kernels import checks

DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # that the kernels multiply by


class _Made(NamedTuple):
    """What was made of a weight, and of which: one that is still the same is not looked at again.

    version  None: an inference tensor, which has none
    """

    weight: torch.Tensor
    version: int | None
    address: int
    gain: torch.Tensor | None

    def is_of(self, weight: torch.Tensor) -> bool:
        """Tell whether nothing has happened to the weight since. Asked in every pass: 1 us."""
        if self.weight is not weight or self.address != weight.data_ptr():
            return False
        return self.version is None or self.version == weight._version


class FusedNorm(nn.Module):
    """An RMS norm that its readers compute: hands its input on. Its weight keeps name and place.

    On a card the weight is looked at once in each of its states: ones, which a rotation leaves, are left out
    of the launch, and 1 + weight is made ahead. Two changes are not seen there. One of such a weight through
    ``weight.data``, until ``load_state_dict`` or ``to``. And that ones have become something else: by a graph
    that was captured with them, and by compiled code unless ``load_state_dict`` or ``to`` was the way.

    Args:
        weight: (K,), as in the file.
        eps: under the root.
        plus_one: the factor is 1 + weight.
    """

    def __init__(self, weight: nn.Parameter, eps: float, *, plus_one: bool) -> None:
        super().__init__()
        self.weight, self.eps, self.plus_one = weight, eps, plus_one
        self.folded = False  # on a card: all ones
        self._made: _Made | None = None
        self._own: torch.Tensor | None = None  # kept for good: graphs know its address
        self._renew()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x."""
        return x

    def gain(self) -> torch.Tensor | None:
        """Return the factor (K,), of one of ``DTYPES`` and contiguous; None: all ones.

        It is the weight itself where that is the factor. Else, on a card, it keeps its address, so that a
        graph that was captured reads what the weight has become.
        """
        weight, made = self._parameters["weight"], self._made
        assert weight is not None
        if not _on_card(weight):
            return self._factor()  # ones cost nothing there
        if torch.compiler.is_compiling():
            return None if self.folded else self._factor()
        if made is not None and made.is_of(weight):
            return made.gain
        if weight.is_cuda and torch.cuda.is_current_stream_capturing():
            return self._factor()  # whether these are ones cannot be asked
        return self._renew()

    def _factor(self) -> torch.Tensor:
        """Return the factor as the weight is now: the weight itself if it can be."""
        weight = self.weight.detach() if self.weight.requires_grad else self.weight
        if self.plus_one:
            return weight.float() + 1.0
        return (weight if weight.dtype in DTYPES else weight.float()).contiguous()

    def _renew(self) -> torch.Tensor | None:
        """Look at a weight on a card; return its gain."""
        weight = self.weight
        self._made, self.folded = None, False
        if not _on_card(weight):
            return None
        with torch.inference_mode(False), torch.no_grad():  # what is made is written to later
            found = self._factor()
            self.folded = bool((found == 1).all())
            if found.data_ptr() != weight.data_ptr() or found.data_ptr() % checks.VECTOR:
                found = self._kept(found)
        version = None if weight.is_inference() else weight._version
        self._made = _Made(weight, version, weight.data_ptr(), None if self.folded else found)
        return self._made.gain

    def _kept(self, found: torch.Tensor) -> torch.Tensor:
        """Put a gain that is not the weight where the last such one lies; return where it is."""
        own = self._own
        if own is None or (own.shape, own.device, own.dtype) != (found.shape, found.device, found.dtype):
            self._own = found.clone()
            return self._own
        return own.copy_(found)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "FusedNorm":
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._renew()
        return self

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        self._renew()


def _on_card(weight: torch.Tensor) -> bool:
    """Tell whether launches are saved where the factor is all ones, and looking at it costs a wait."""
    return weight.is_cuda
