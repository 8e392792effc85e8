"""Activation order: what a ``g_idx`` tensor really says, and what can be dropped without loss.

Classes, tested in this order (the first that fits is the answer):

none      no map: the tensor is absent, or every entry is -1
trivial   ``g_idx[k] == k // group_size``, or there is only one group
block     constant on aligned blocks of 128, 64 or 32 rows: the same model with that group size and re-ordered
          scale rows
groups    a real permutation whose groups have equal sizes (the last may be short): rows can be sorted
uneven    anything else: only a dequantized model can hold it
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from w4pack.convert.core.order import checked_map, checked_perm, natural_group

ORDER_SUFFIXES = ("g_idx", "weight_g_idx")
BLOCKS = (128, 64, 32)
OrderKind = Literal["none", "trivial", "block", "groups", "uneven"]


@dataclass(frozen=True, slots=True)
class Order:
    """Class of a group map.

    block   row count of the blocks for kind ``block``, else 0
    counts  for kind ``uneven``, the different numbers of rows that groups have
    """

    kind: OrderKind
    block: int = 0
    counts: tuple[int, ...] = ()

    @property
    def is_real(self) -> bool:
        """Claim: the rows cannot be used in natural order with equal groups."""
        return self.kind in ("groups", "uneven")


NO_ORDER = Order("none")


def normalise(raw: NDArray[Any], in_features: int, groups: int, where: str) -> NDArray[np.int32] | None:
    """Check a stored ``g_idx`` and return it as int32 (K,), or None if every entry is -1: no map."""
    if raw.shape == (in_features,) and bool((raw == -1).all()):
        return None
    return checked_map(raw, in_features, groups, where)


def group_of_act_perm(perm: NDArray[Any], in_features: int, group_size: int, where: str) -> NDArray[np.int32]:
    """Rebuild the group map of an artifact's layer: packed row r is source row ``perm[r]``, group r // g."""
    group = np.empty(in_features, np.int32)
    group[checked_perm(perm, in_features, where)] = natural_group(in_features, group_size)
    return group


def classify(group: NDArray[np.int32] | None, group_size: int, groups: int) -> Order:
    """Return the class of a normalised map (see the module text)."""
    if group is None:
        return NO_ORDER
    rows = group.shape[0]
    if groups == 1 or np.array_equal(group, natural_group(rows, group_size)):
        return Order("trivial")
    for block in BLOCKS:
        if block <= group_size and rows % block == 0:
            blocks = group.reshape(-1, block)
            if bool((blocks == blocks[:, :1]).all()):
                return Order("block", block)
    counts = np.bincount(group, minlength=groups)
    last = rows - (groups - 1) * group_size
    even = bool((counts[:-1] == group_size).all()) and int(counts[-1]) == last
    return Order("groups") if even else Order("uneven", counts=tuple(int(c) for c in np.unique(counts)))
