"""Layers of a transformers cache that hold keys and values in 4 or 8 bits, in pages.

Everything that works on a cache works on them: ``update`` appends (keys are transformed first) and returns
the layer itself as handle, which the attention of ``kv_attention`` reads. No token is kept in 16 bits. A
layer with a sliding window keeps the pages that the window can reach, and room for a chunk of new tokens.
"""

from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from w4pack.convert.errors import UsageError
from w4pack.kernels.hf.kv_pages import KVPlan, Pages
from w4pack.kernels.hf.kv_steps import Step, Steps, View
from w4pack.kernels.quarot.kv_layout import PAGE, pages_of

CHUNK = 512  # tokens: with a sliding window, longer passes are appended and read in pieces


class KVLayer(CacheLayerMixin):
    """Keys and values of one layer.

    Args:
        plan: how they are stored.
        steps: of the cache, shared by its layers.
        number: of the layer.
        window: tokens that are seen, of a layer with a sliding window; 0: all.
        room: tokens that there is room for from the start; None: room grows.
        leads: whether this layer, for all, changes ``steps`` where the batch is changed.
    """

    is_compileable = False
    is_croppable = True
    store: Pages
    keys: torch.Tensor  # what transformers may look at: codes of keys and values,
    values: torch.Tensor  # and their scales and zero points

    def __init__(
        self,
        plan: KVPlan,
        steps: Steps,
        *,
        number: int = 0,
        window: int = 0,
        room: int | None = None,
        leads: bool = False,
    ) -> None:
        super().__init__()
        self.plan, self.steps, self.number, self.leads = plan, steps, number, leads
        self.window, self.room = window, room
        self.is_sliding = bool(window)
        self.count = 0  # tokens that were passed, padding included
        self._waiting: tuple[torch.Tensor, torch.Tensor] | None = None

    # ---- room

    @property
    def most_pages(self) -> int | None:
        """Pages that a row is never given more of: those of a window; None: no such bound."""
        return pages_of(self.window + PAGE - 2 + CHUNK) if self.window else None

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated."""
        return self.store.nbytes if self.is_initialized else 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Take batch, heads, head size and device from keys (B, heads, T, size); allocate what is fixed."""
        rows, heads, _, size = key_states.shape
        if value_states.shape[-1] != size:
            raise UsageError(
                "keys and values are of different sizes",
                code="cache",
                expected=f"head size {size}",
                found=str(value_states.shape[-1]),
                hint="load with kv_bits=16",
            )
        self.device = key_states.device
        self._hold(Pages(rows, heads, size, self.plan, self.device))
        self.is_initialized = True
        if self.room is not None:
            self._reserve(self.room)

    def _hold(self, store: Pages) -> None:
        self.store, self.batch_size = store, store.rows
        self.keys, self.values = store.codes, store.params

    def _reserve(self, tokens: int) -> None:
        """Have room for ``tokens`` slots of each row, or for a window's."""
        most = self.most_pages
        if self.room is not None and most is None and tokens > self.room:  # its last page may end later
            raise UsageError(
                "the static cache is full",
                code="cache",
                expected=f"at most {self.room} tokens",
                found=str(tokens),
            )
        needed = pages_of(tokens) if most is None else min(pages_of(tokens), most)
        held = self.store.each
        if needed <= held:
            return
        ahead = needed if self.room is not None or not held else max(needed, held * 5 // 4)
        self.store.grow(ahead if most is None else min(ahead, most))
        self._hold(self.store)

    # ---- a pass

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Append keys and values (B, heads, T, size); returns this layer twice, for the attention to read."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self._waiting is not None:
            self._append_waiting()
        step, tokens = self._step(key_states), key_states.shape[2]
        self._reserve(self.count + tokens)
        self.count += tokens
        k, v = step.arranged(key_states, 2), step.arranged(value_states, 2)
        if self.window and tokens > CHUNK:
            self._waiting = (k, v)
        else:
            self.store.append(k, v, self._view(step, 0, tokens), self._guide)
        return self, self

    def _step(self, keys: torch.Tensor) -> Step:
        """Return the pass that these keys belong to; of a layer that is used by itself, begin it."""
        rows, _, tokens, _ = keys.shape
        if self.count == self.steps.count:
            self.steps.begin(rows, tokens, keys.device)
        step = self.steps.step
        if step is None or step.tokens != tokens or self.count + tokens != self.steps.count:
            raise UsageError(
                "the layers of a cache were not passed the same tokens",
                code="cache",
                expected=f"{self.steps.count - self.count} tokens",
                found=str(tokens),
                hint="after an error in the middle of a pass, begin with a new cache",
            )
        return step.on(self.device)

    @property
    def _guide(self) -> torch.Tensor | None:
        return self.steps.guides[self.number] if self.steps.guides else None

    def _view(self, step: Step, first: int, tokens: int) -> View:
        return step.view(self.window, self.store.each, first, tokens)

    def _append_waiting(self) -> None:
        """Append what no attention has come for."""
        assert self._waiting is not None and self.steps.step is not None
        step, (k, v) = self.steps.step.on(self.device), self._waiting
        self._waiting = None
        for first in range(0, k.shape[2], CHUNK):
            piece = slice(first, min(first + CHUNK, k.shape[2]))
            view = self._view(step, first, piece.stop - first)
            self.store.append(k[:, :, piece], v[:, :, piece], view, self._guide)

    def attend(self, q: torch.Tensor, scale: float, window: int, softcap: float) -> torch.Tensor:
        """Return the attention (B, T, heads, size) of queries (B, heads, T, size), those of the last update.

        Args:
            q: after RoPE; the transform of keys is applied inside.
            scale: of the products.
            window: tokens that a query sees, itself included; 0: all before it.
            softcap: 0: none.
        """
        step = self.steps.step
        if step is None or step.tokens != q.shape[2] or self.count != self.steps.count:
            raise UsageError(
                "queries are not of the tokens that were cached last",
                code="cache",
                expected=f"{0 if step is None else step.tokens} tokens",
                found=str(q.shape[2]),
            )
        step = step.on(self.device)
        q = step.arranged(q, 2)
        seen = min(window or self.window, self.window or window)
        if self._waiting is None:
            y = self.store.attend(q, self._view(step, 0, q.shape[2]), scale, seen, softcap)
        else:
            y = self._pieces(q, step, scale, seen, softcap)
        return step.returned(y, 1)

    def _pieces(self, q: torch.Tensor, step: Step, scale: float, window: int, softcap: float) -> torch.Tensor:
        """Append and attend in turn, so that a window's pages hold what each piece sees."""
        assert self._waiting is not None
        (k, v), found = self._waiting, []
        self._waiting = None
        for first in range(0, q.shape[2], CHUNK):
            piece = slice(first, min(first + CHUNK, q.shape[2]))
            view = self._view(step, first, piece.stop - first)
            self.store.append(k[:, :, piece], v[:, :, piece], view, self._guide)
            found.append(self.store.attend(q[:, :, piece], view, scale, window, softcap))
        return torch.cat(found, 1)

    # ---- what transformers asks

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (length, offset) of a mask over all tokens; the attention here needs none."""
        return self.count + query_length, 0

    def get_seq_length(self) -> Any:
        """Return how many tokens were passed: on the device where room is fixed, so that graphs replay."""
        if self.room is not None and self.is_initialized and self.steps.position is not None:
            # A pass begins before its layers run; positions are asked for in between.
            return self.steps.position - (self.steps.count - self.count)
        return self.count

    def get_max_length(self) -> int:
        """Return how many tokens there is room for; -1: any number."""
        return -1 if self.room is None or self.window else self.room

    def sync(self) -> None:
        """Take over the count of ``steps``, which has been read from the device.

        Raises:
            UsageError: more tokens than there is room for.
        """
        self._reserve(self.steps.count)
        self.count = self.steps.count

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens: their number, negative."""
        tokens_to_remove = int(tokens_to_remove)  # assisted decoding hands over a tensor
        if tokens_to_remove > 0:
            raise UsageError(
                "a cache is cropped by a negative number: of tokens to take back",
                code="cache",
                expected=f"-{tokens_to_remove}",
                found=str(tokens_to_remove),
            )
        kept = max(self.count + tokens_to_remove, 0)
        most = self.most_pages
        if most is not None and self.count > most * PAGE and self.count - kept > CHUNK:
            raise UsageError(
                "the tokens before the sliding window are gone",
                code="cache",
                expected=f"at most {CHUNK} tokens to take back",
                found=str(self.count - kept),
            )
        if self.is_initialized:
            self.count, self._waiting = kept, None
            self.steps.crop(kept)

    def reset(self) -> None:
        """Forget all tokens; room is kept."""
        self.count, self._waiting = 0, None
        self.steps.reset()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Take the rows of ``beam_idx`` (B,), in place."""
        self._select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        if self.is_initialized:
            rows = torch.arange(self.batch_size, device=self.device).repeat_interleave(repeats)
            self._select(rows)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows of an index, or of a boolean mask."""
        if self.is_initialized:
            given = torch.as_tensor(indices, device=self.device)
            self._select(given.nonzero().flatten() if given.dtype == torch.bool else given)

    def _select(self, rows: torch.Tensor) -> None:
        if not self.is_initialized:
            return
        self.store.select(rows)
        self._hold(self.store)
        if self.leads:
            self.steps.select(rows)

    def offload(self) -> None:
        """Offloading is refused: the pages stay on the device.

        Raises:
            UsageError: always.
        """
        raise foreign("an offloaded cache")


def foreign(found: str) -> UsageError:
    """Return the refusal of a cache in which no layer here can stand."""
    return UsageError(
        "no quantized layers for this cache",
        code="cache",
        expected="an empty DynamicCache or StaticCache, not offloaded",
        found=found,
        hint="load with kv_bits=16, or leave the choice of a cache to the model",
    )
