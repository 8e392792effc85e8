"""Experts of one layer that are alike, and so can be stacked: same bits, groups, symmetry, order, scales.

Most layers have one kind. A quantizer that chooses by expert, or leaves some in 16 bit, makes several: each
is stacks and products of its own, to which the others' tokens are nobody's.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from w4pack.kernels import experts as experts_of
from w4pack.kernels.spec import LinearSpec
from w4pack.kernels.vllm.parts import Order
from w4pack.kernels.vllm.source import Source

LEAVES = ("w1", "w3", "w2")  # the engine's names of gate, up and down
Names = Callable[[int, str], str]  # expert, leaf -> module of the file
Scheme = tuple[LinearSpec | tuple[int, int], str]  # of a layer; of one in 16 bit, its sizes


@dataclass(frozen=True, slots=True)
class Kind:
    """Experts of a rank that are alike.

    experts  their numbers in the model
    numbers  on this rank
    """

    experts: tuple[int, ...]
    numbers: Sequence[int]

    def order(self, source: Source, name: Names) -> Order:
        """Return what tells the act-orders of a layer of all of them, by the module of the first one."""

        def order(module: str) -> bytes | None:
            leaf = next(leaf for leaf in LEAVES if name(self.experts[0], leaf) == module)
            found = [source.order(name(expert, leaf)) for expert in self.experts]
            known = [one for one in found if one is not None]
            return b"".join(known) if len(known) == len(found) else None

        return order


def kinds(source: Source, name: Names, here: Mapping[int, int]) -> tuple[Kind, ...]:
    """Return the kinds of a rank's experts.

    Args:
        source: what the file holds.
        name: of the experts' modules.
        here: expert -> its number on the rank.

    Raises:
        Refused: a layer of an expert that is neither packed nor there in 16 bit.
    """
    found: dict[tuple[Scheme, ...], list[int]] = {}
    for expert in sorted(here, key=here.__getitem__):  # a single kind is numbered as the rank is
        scheme = tuple(_scheme(source, name(expert, leaf)) for leaf in LEAVES)
        found.setdefault(scheme, []).append(expert)
    return tuple(Kind(tuple(experts), _numbers(here[e] for e in experts)) for experts in found.values())


def _scheme(source: Source, module: str) -> Scheme:
    spec = source.specs.get(module)
    return (source.dense_shape(module), "") if spec is None else (spec, source.scales(module))


def _numbers(found: Iterable[int]) -> Sequence[int]:
    """Return numbers as a range where they are one: looking a number up then costs the same for any count."""
    numbers = tuple(found)
    whole = range(len(numbers))
    return whole if numbers == tuple(whole) else numbers


class Places:
    """Where in its stacks each kind has an expert of the model: a table, made on a device when asked for.

    It is no buffer of the layer, and not there before the engine's first run: what an engine finds in a
    layer, or is allocated while weights load, is emptied when weights are loaded again or given up.

    Args:
        found: the kinds.
        experts: in the model.
    """

    def __init__(self, found: Sequence[Kind], experts: int) -> None:
        self._rows = experts_of.places([kind.experts for kind in found], experts)
        self._tables: dict[torch.device, torch.Tensor] = {}

    def chosen(self, kind: int, experts: torch.Tensor) -> torch.Tensor:
        """Return int32 places in the stacks of a kind for experts of the model, of any shape."""
        device = experts.device
        if device not in self._tables:
            self._tables[device] = torch.tensor(self._rows, dtype=torch.int32, device=device)
        return self._tables[device][kind][experts.long()]
