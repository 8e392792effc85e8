"""Group maps: which group of scales a row of K belongs to, and the row order that sorts them.

``group`` (K,) int32 is the map of the neutral form; ``perm`` lists source rows in sorted order, so that
packed row r is source row ``perm[r]``, of group ``r // group_size`` when every group has its full size.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from w4pack.convert.core.scheme import ONE_GROUP, QuantScheme
from w4pack.convert.errors import SourceError


def natural_map(scheme: QuantScheme) -> NDArray[np.int32]:
    """Return the map without act-order: row k belongs to group k // group_size."""
    rows = np.arange(scheme.in_features, dtype=np.int32)
    return rows * 0 if scheme.group_size == ONE_GROUP else rows // np.int32(scheme.group_size)


def read_map(stored: NDArray[Any], scheme: QuantScheme, suffix: str) -> NDArray[np.int32]:
    """Check a stored group map; negative entries count from the last group.

    Raises SourceError, naming ``suffix`` and the first bad row, if the length or a value is out of range.
    """
    groups, rows = scheme.groups, scheme.in_features
    if stored.shape != (rows,):
        raise SourceError(
            f"`{suffix}` does not list one group for each row",
            code="g-idx-length",
            where=suffix,
            expected=f"{[rows]}",
            found=f"{list(stored.shape)}",
        )
    bad = np.flatnonzero((stored >= groups) | (stored < -groups))
    if bad.size:
        raise SourceError(
            f"`{suffix}` names a group that does not exist",
            code="g-idx-range",
            where=suffix,
            expected=f"groups 0 to {groups - 1}",
            found=f"{stored[bad[0]]} at row {bad[0]} ({bad.size} such rows)",
        )
    return np.where(stored < 0, stored + groups, stored).astype(np.int32)


def sorted_rows(group: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the rows sorted by group, equal groups in natural order: the stable argsort."""
    return np.argsort(group, kind="stable").astype(np.int32)


def map_of_sorted(perm: NDArray[Any], scheme: QuantScheme) -> NDArray[np.int32]:
    """Return the group map of a layer whose packed row r is source row perm[r]: group[perm[r]] = r // g."""
    group = np.empty(scheme.in_features, np.int32)
    group[perm] = natural_map(scheme)
    return group


def read_perm(stored: NDArray[Any], scheme: QuantScheme, suffix: str) -> NDArray[np.int64]:
    """Check a stored row order. Raises SourceError unless it is a permutation of the K rows."""
    rows = scheme.in_features
    perm = stored.astype(np.int64)
    if perm.shape != (rows,) or not np.array_equal(np.sort(perm), np.arange(rows)):
        raise SourceError(
            f"`{suffix}` is not a permutation of the rows",
            code="act-perm",
            where=suffix,
            expected=f"each of 0 to {rows - 1} once",
            found=f"shape {list(perm.shape)}",
        )
    return perm
