"""Where the tokens of a forward pass go in a quantized cache: worked out once, used by every layer.

Padding takes no place in the cache, wherever it stands: in each row the tokens that the attention mask leaves
in are brought to the front of the pass, in their order, and follow what the row has. So rows have lengths of
their own, and left padding, right padding and holes are one case. Everything that depends on the mask stays
on the device; a pass of one token never waits for it.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from w4pack.convert.errors import UsageError
from w4pack.kernels.quarot.kv_layout import PAGE


class View(NamedTuple):
    """Slots of some tokens of a pass as one kind of layer sees them.

    start  int32 (B,), of the first token
    ends   int32 (B,), after the last
    table  int32 (B, pages) of a layer that holds a window alone, else None
    """

    start: torch.Tensor
    ends: torch.Tensor
    table: torch.Tensor | None


@dataclass
class Step:
    """One pass.

    start   int32 (B,): tokens that each row held before
    tokens  T, padding included
    order   int64 (B, T): the token at each place, those that count first; None: as they come
    places  int64 (B, T): inverts ``order``
    """

    start: torch.Tensor
    tokens: int
    order: torch.Tensor | None = None
    places: torch.Tensor | None = None
    _views: dict[tuple[int, int, int, int], View] = field(default_factory=dict)

    def on(self, device: torch.device) -> "Step":
        """Return the pass with its tensors on another device."""
        if self.start.device == device:
            return self
        moved = [None if t is None else t.to(device) for t in (self.start, self.order, self.places)]
        assert moved[0] is not None
        return Step(moved[0], self.tokens, moved[1], moved[2])

    def view(self, window: int, pages: int, first: int, tokens: int) -> View:
        """Return where tokens ``first`` to ``first + tokens`` of the pass lie.

        With a window, a layer has ``pages`` pages for each row and writes them in turn; its slots are counted
        from the oldest page that a token of this piece can see.
        """
        key = (window, pages, first, tokens)
        if key not in self._views:
            self._views[key] = self._view(*key)
        return self._views[key]

    def _view(self, window: int, pages: int, first: int, tokens: int) -> View:
        start = self.start + first
        if not window:
            return View(start, start + tokens, None)
        oldest = (start - (window - 1)).clamp_(min=0) // PAGE
        start = start - oldest * PAGE
        turn = torch.arange(pages, dtype=torch.int32, device=start.device)
        rows = torch.arange(start.shape[0], dtype=torch.int32, device=start.device) * pages
        table = rows[:, None] + (oldest[:, None] + turn) % pages
        return View(start, start + tokens, table)

    def arranged(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return x (B, ..., T at ``dim``, ...) in the order of the cache."""
        return x if self.order is None else _taken(x, self.order, dim)

    def returned(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return x (B, ..., T at ``dim``, ...) in the order of the pass; inverts ``arranged``."""
        return x if self.places is None else _taken(x, self.places, dim)


def _taken(x: torch.Tensor, index: torch.Tensor, dim: int) -> torch.Tensor:
    shape = [1] * x.dim()
    shape[0], shape[dim] = index.shape
    return x.gather(dim, index.view(shape).expand(x.shape))


class Steps:
    """What all layers of a cache have in common: tokens of each row, and the pass that is under way.

    count     tokens that were passed, padding included
    lengths   int32 (B,): tokens that count
    position  int64 (): ``count`` on the device, for a graph that is replayed
    mask      bool (B, count), or None where there was no padding
    guides    of the keys, each layer's, as the model holds them in this pass; empty: none
    """

    def __init__(self) -> None:
        self.count = 0
        self.lengths: torch.Tensor | None = None
        self.position: torch.Tensor | None = None
        self.mask: torch.Tensor | None = None
        self.step: Step | None = None
        self.guides: tuple[torch.Tensor | None, ...] = ()

    def begin(self, rows: int, tokens: int, device: torch.device, mask: torch.Tensor | None = None) -> None:
        """Begin a pass.

        Args:
            rows: B.
            tokens: T.
            device: of the tensors.
            mask: (B, count + T) or longer, nonzero for what counts; None: everything does.

        Raises:
            UsageError: another number of rows than before, or a mask of another size.
        """
        if self.lengths is None or self.position is None:
            self.lengths = torch.zeros(rows, dtype=torch.int32, device=device)
            self.position = torch.zeros((), dtype=torch.int64, device=device)
        if self.lengths.shape[0] != rows:
            raise _misfit("the cache is of another batch", str(self.lengths.shape[0]), str(rows))
        start = self.lengths.clone()
        valid = None if mask is None else self._valid(mask, rows, tokens)
        self._keep(mask, tokens)
        self.step = Step(start, tokens)
        if valid is None or (tokens > 1 and not _capturing(device) and bool(valid.all())):
            self.lengths.add_(tokens)
        else:
            self.lengths.add_(valid.sum(1, dtype=torch.int32))
            if tokens > 1:
                self.step.order = torch.argsort(~valid, dim=1, stable=True)
                self.step.places = torch.argsort(self.step.order, dim=1)
        self.count += tokens
        self.position.add_(tokens)

    def _valid(self, mask: torch.Tensor, rows: int, tokens: int) -> torch.Tensor:
        """Return bool (B, T): which tokens of the pass count."""
        assert self.position is not None
        if mask.dim() != 2 or mask.shape[0] != rows or mask.shape[1] < self.count + tokens:
            raise _misfit(
                "the attention mask is of another size",
                f"({rows}, {self.count + tokens}): what was passed before, then this pass",
                str(tuple(mask.shape)),
            )
        if mask.shape[1] == self.count + tokens:
            return mask[:, self.count :] != 0
        # Longer: of a static cache. A graph that is replayed moves on through it.
        index = self.position + torch.arange(tokens, device=mask.device)
        return mask.index_select(1, index) != 0

    def _keep(self, mask: torch.Tensor | None, tokens: int) -> None:
        """Remember what counts: cutting the cache back asks for it."""
        if mask is not None:
            self.mask = mask[:, : self.count + tokens] != 0
        elif self.mask is not None:
            self.mask = torch.cat([self.mask, self.mask.new_ones(self.mask.shape[0], tokens)], 1)

    def sync(self, mask: torch.Tensor | None = None) -> None:
        """Read from the device how many tokens were passed: replayed graphs count there alone.

        Args:
            mask: (B, tokens or more), of all that was passed; None: replayed tokens all count.

        Raises:
            UsageError: the mask is of another size or of other tokens, or one is needed.
        """
        if self.position is None or self.lengths is None:
            return
        count, before = int(self.position), self.count
        if mask is None and self.mask is not None:
            mask = torch.cat([self.mask, self.mask.new_ones(self.mask.shape[0], max(count - before, 0))], 1)
        counted = self.lengths.new_full(self.lengths.shape, count)
        if mask is not None:
            if mask.dim() != 2 or mask.shape[0] != counted.shape[0] or mask.shape[1] < count:
                expected = f"({counted.shape[0]}, {count}): all that was passed"
                raise _misfit("the attention mask is of another size", expected, str(tuple(mask.shape)))
            mask = mask[:, :count] != 0
            counted = mask.sum(1, dtype=torch.int32)
        if not torch.equal(counted, self.lengths):
            raise _misfit(
                "which of the replayed tokens count is not known",
                f"an attention mask with {self.lengths.tolist()} tokens in its rows",
                f"{counted.tolist()}",
            )
        self.count, self.mask, self.step = count, mask, None

    def crop(self, count: int) -> None:
        """Go back to ``count`` passed tokens; nothing where that is so already."""
        if self.lengths is None or self.position is None or count == self.count:
            return
        if self.mask is None:
            self.lengths.sub_(self.count - count)
        else:
            self.mask = self.mask[:, :count]
            self.lengths.copy_(self.mask.sum(1, dtype=torch.int32))
        self.position.sub_(self.count - count)
        self.count, self.step = count, None

    def select(self, rows: torch.Tensor) -> None:
        """Keep the rows of an index, in its order; rows may repeat."""
        if self.lengths is not None:
            kept = self.lengths.index_select(0, rows.to(self.lengths.device))
            if kept.shape == self.lengths.shape:
                self.lengths.copy_(kept)
            else:
                self.lengths = kept
        if self.mask is not None:
            self.mask = self.mask.index_select(0, rows.to(self.mask.device))
        self.step = None

    def reset(self) -> None:
        """Forget all tokens."""
        self.count, self.mask, self.step = 0, None, None
        if self.lengths is not None and self.position is not None:
            self.lengths.zero_()
            self.position.zero_()


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _misfit(what: str, expected: str, found: str) -> UsageError:
    return UsageError(what, code="cache", expected=expected, found=found)
