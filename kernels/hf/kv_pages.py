"""The memory of one layer of a quantized cache: as many pages for each row, row by row.

What lies in a page is said in ``quarot.kv_layout``; which tokens lie in which page, in ``kv_steps``.
"""

from dataclasses import dataclass

import torch

from w4pack.kernels.hf.kv_steps import View
from w4pack.kernels.quarot import kv, kv_layout


@dataclass(frozen=True, slots=True)
class KVPlan:
    """How keys and values are stored.

    bits       4 or 8
    transform  key of that of keys and queries
    """

    bits: int
    clip_k: float
    clip_v: float
    transform: str


class Pages:
    """Pages of ``rows`` rows; none at first.

    codes   uint8, of keys and values: see ``kv_layout``
    params  float16, their scales and zero points
    each    pages of a row
    table   int32 (rows, each): number of each page

    Args:
        rows: B.
        heads: of keys.
        size: of a head.
        plan: how they are stored.
        device: of the memory.

    Raises:
        UsageError: no kernel for the size or the bits.
    """

    def __init__(self, rows: int, heads: int, size: int, plan: KVPlan, device: torch.device) -> None:
        self.rows, self.heads, self.size, self.plan, self.device = rows, heads, size, plan, device
        self.each = 0
        self.codes, self.params = self._empty(0)
        self.table = self._numbers()

    def _empty(self, each: int) -> tuple[torch.Tensor, torch.Tensor]:
        return kv_layout.empty(self.rows * each, self.heads, self.size, self.plan.bits, self.device)

    def _numbers(self) -> torch.Tensor:
        count = self.rows * self.each
        return torch.arange(count, dtype=torch.int32, device=self.device).view(self.rows, self.each)

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated."""
        return self.codes.nbytes + self.params.nbytes

    def grow(self, each: int) -> None:
        """Make room for ``each`` pages of a row; what there is is kept."""
        rows, old, held = self.rows, self.each, (self.codes, self.params)
        self.codes, self.params = self._empty(each)
        if old:
            for made, kept in zip((self.codes, self.params), held, strict=True):
                made.view(rows, each, -1)[:, :old] = kept.view(rows, old, -1)
        self.each = each
        self.table = self._numbers()

    def append(self, k: torch.Tensor, v: torch.Tensor, view: View, guide: torch.Tensor | None) -> None:
        """Store keys, transformed, and values (B, heads, T, size) where ``view`` says.

        ``guide``: of the keys, float32 (2, heads, size), or None.
        """
        plan = self.plan
        kv.kv_append(
            k,
            v,
            self.codes,
            self.params,
            self._table(view),
            view.start,
            plan.transform,
            plan.clip_k,
            plan.clip_v,
            plan.bits,
            guide,
        )

    def attend(self, q: torch.Tensor, view: View, scale: float, window: int, softcap: float) -> torch.Tensor:
        """Return the attention (B, T, heads, size) of the last T queries (B, heads, T, size) of ``view``."""
        y: torch.Tensor = kv.kv_attention(
            q,
            self.codes,
            self.params,
            self._table(view),
            view.ends,
            None,
            scale,
            window,
            softcap,
            self.plan.transform,
            self.plan.bits,
        )
        return y

    def _table(self, view: View) -> torch.Tensor:
        return self.table if view.table is None else view.table

    def select(self, rows: torch.Tensor) -> None:
        """Take the rows of an index, in its order; of as many rows in place, as graphs know the address."""
        codes, params = (
            whole.view(self.rows, self.each, *whole.shape[1:]).index_select(0, rows.to(self.device))
            for whole in (self.codes, self.params)
        )
        if rows.shape[0] == self.rows:
            self.codes.view_as(codes).copy_(codes)
            self.params.view_as(params).copy_(params)
            return
        self.rows = rows.shape[0]
        self.codes, self.params = codes.flatten(0, 1), params.flatten(0, 1)
        self.table = self._numbers()
