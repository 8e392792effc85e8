"""Group maps: which group of scales a row of K belongs to, and the row order that sorts them.

``group`` (K,) int32 is the map of the neutral form; ``perm`` lists source rows in sorted order, so that
packed row r is source row ``perm[r]``, of group ``r // group_size`` when every group has its full size.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from w4pack.convert.core.scheme import ONE_GROUP, QuantScheme
from w4pack.convert.errors import SourceError


def natural_group(rows: int, group_size: int) -> NDArray[np.int32]:
    """Return the map of rows in natural order: k // group_size, all 0 for one group."""
    if group_size == ONE_GROUP:
        return np.zeros(rows, np.int32)
    group: NDArray[np.int32] = np.arange(rows, dtype=np.int32) // np.int32(group_size)
    return group


def natural_map(scheme: QuantScheme) -> NDArray[np.int32]:
    """Return the map of a scheme without act-order."""
    return natural_group(scheme.in_features, scheme.group_size)


def read_map(stored: NDArray[Any], scheme: QuantScheme, suffix: str) -> NDArray[np.int32]:
    """Check the stored group map of a layer; see ``checked_map``."""
    return checked_map(stored, scheme.in_features, scheme.groups, suffix)


def checked_map(stored: NDArray[Any], rows: int, groups: int, where: str) -> NDArray[np.int32]:
    """Check a stored group map; negative entries count from the last group.

    Raises SourceError, naming ``where`` and the first bad row, if the length or a value is out of range.
    """
    if stored.shape != (rows,):
        raise SourceError(
            "a group map does not have one entry for each row",
            code="g-idx-length",
            where=where,
            expected=f"[{rows}]",
            found=f"{list(stored.shape)}",
        )
    bad = np.flatnonzero((stored >= groups) | (stored < -groups))
    if bad.size:
        raise SourceError(
            "a group map names a group that does not exist",
            code="g-idx-range",
            where=where,
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
    """Check the stored row order of a layer; see ``checked_perm``."""
    return checked_perm(stored, scheme.in_features, suffix)


def checked_perm(stored: NDArray[Any], rows: int, where: str) -> NDArray[np.int64]:
    """Check a stored row order. Raises SourceError unless it is a permutation of the rows."""
    perm = stored.astype(np.int64)
    if perm.shape != (rows,) or not np.array_equal(np.sort(perm), np.arange(rows)):
        raise SourceError(
            "a stored row order is not a permutation of the rows",
            code="act-perm",
            where=where,
            expected=f"each of 0 to {rows - 1} once",
            found=f"shape {list(perm.shape)}",
        )
    return perm
