"""Reading ahead in a remote checkpoint: a question asks the same of every layer.

Whoever reads one layer's ``g_idx`` reads all of them next, one small request after another. So the first read
of a tensor from its start brings the same part of every later tensor with that last name, a few at a time.
"""

from bisect import bisect_right
from collections.abc import Mapping

from w4pack.convert.files.tensorfile import Header, TensorInfo, natural_order

LONGEST = 8 << 20  # bytes; a longer read is one of a weight, and says nothing about the next
AT_ONCE = 24 << 20  # bytes that one read may bring besides its own

Range = tuple[str, int, int]  # file, offset, length


class Likeness:
    """The tensors of all shards by their last name, in the order in which layers are gone through."""

    def __init__(self, headers: Mapping[str, Header]) -> None:
        self._starts: dict[str, tuple[list[int], list[TensorInfo]]] = {}
        self._kinds: dict[str, list[TensorInfo]] = {}
        for file, header in headers.items():
            placed = sorted(header.tensors, key=lambda info: info.offset)
            self._starts[file] = ([info.offset for info in placed], placed)
            for info in placed:
                self._kinds.setdefault(_kind(info), []).append(info)
        for infos in self._kinds.values():
            infos.sort(key=lambda info: natural_order(info.name))
        self._rank = {info.name: i for infos in self._kinds.values() for i, info in enumerate(infos)}

    def after(self, file: str, offset: int, length: int, limit: int) -> list[Range]:
        """Return the read itself and its likes that come later, at most ``limit`` bytes besides the first."""
        info = self._at(file, offset)
        if info is None or not 0 < length <= min(LONGEST, info.nbytes):
            return []
        ranges = [(file, offset, length)]
        left = min(AT_ONCE, limit)
        for peer in self._kinds[_kind(info)][self._rank[info.name] + 1 :]:
            size = _same_part(info, length, peer)
            if size == 0 or size > left:
                break
            ranges.append((peer.file, peer.offset, size))
            left -= size
        return ranges

    def _at(self, file: str, offset: int) -> TensorInfo | None:
        """Return the tensor that starts at ``offset``; of several the last: the others are empty."""
        offsets, infos = self._starts.get(file, ([], []))
        at = bisect_right(offsets, offset) - 1
        return infos[at] if at >= 0 and offsets[at] == offset else None


def _kind(info: TensorInfo) -> str:
    return info.name.rpartition(".")[2]


def _same_part(info: TensorInfo, length: int, peer: TensorInfo) -> int:
    """Return how many bytes of ``peer`` match ``length`` bytes of ``info``: all, or as many rows."""
    if length == info.nbytes:
        return peer.nbytes
    row = info.nbytes // info.shape[0] if info.shape and info.shape[0] else 0
    if not row or length % row or not peer.shape or not peer.shape[0]:
        return 0
    return min(peer.nbytes, length // row * (peer.nbytes // peer.shape[0]))
