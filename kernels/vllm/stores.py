"""The tensors of a layer's runs as parameters of an engine's layer, and how the file's tensors get there.

One parameter for each kind of tensor, under the names of the file, because that is how engines find where a
tensor goes. A layer of one run has the file's shapes. Of several runs, whose shapes differ, the parameter is
flat and each run a view of it. Nothing is repacked: loading copies rectangles.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn

from w4pack.convert.errors import SourceError
from w4pack.kernels.vllm import lazy
from w4pack.kernels.vllm.parts import SUFFIXES, Part, Run

SCALES = {"F16": torch.float16, "BF16": torch.bfloat16}
ALIGN = 16  # bytes: the widest load of a kernel
Place = tuple[int, int, tuple[int, ...], torch.dtype]  # first byte, bytes, shape, dtype


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the tensors of each run lie in a layer's parameters.

    prefix  of the parameters' names: "" or, of experts, ``w13_`` and ``w2_``
    dtype   of activations, and of parts left in 16 bit
    kinds   of tensors that the file has for the layer; what only other ranks' experts have is empty here
    """

    prefix: str
    runs: tuple[Run, ...]
    dtype: torch.dtype
    kinds: frozenset[str] = frozenset()

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Kinds of tensors that any run has, and the others of the layer."""
        held = {suffix for run in self.runs for suffix in run.shapes()}
        return tuple(suffix for suffix in SUFFIXES if suffix in held | self.kinds)

    def places(self, suffix: str) -> list[Place | None]:
        """Return for each run where its tensor lies in the parameter; None: it has no such tensor."""
        found: list[Place | None] = []
        start = 0
        for run in self.runs:
            shape = run.shapes().get(suffix)
            if shape is None:
                found.append(None)
                continue
            dtype = self._dtype(run, suffix)
            nbytes = prod(shape) * dtype.itemsize
            found.append((start, nbytes, shape, dtype))
            start += -(-nbytes // ALIGN) * ALIGN
        return found

    def _dtype(self, run: Run, suffix: str) -> torch.dtype:
        if run.spec is None:
            return self.dtype
        return SCALES[run.scales] if suffix == "weight_scale" else torch.int32

    def parameter(self, suffix: str) -> torch.Tensor:
        """Return the tensor of a parameter: zeros, and natural orders, until it is loaded.

        An order that is not loaded (an engine's dummy weights) must not point outside.
        """
        places = [place for place in self.places(suffix) if place is not None]
        if not places:
            return torch.zeros(0, dtype=torch.int32)
        if len(self.runs) == 1:
            _, _, shape, dtype = places[0]
            tensor = torch.zeros(shape, dtype=dtype)
        else:
            dtype = places[0][3]
            tensor = torch.zeros(-(-(places[-1][0] + places[-1][1]) // dtype.itemsize), dtype=dtype)
        if suffix == "act_perm":
            for view in self.views(suffix, tensor):
                if view is not None:
                    view.copy_(torch.arange(view.shape[-1], dtype=torch.int32))
        return tensor

    def elements(self, suffix: str) -> int:
        """Return how many elements of the file the parameter holds, each of its own dtype."""
        return sum(prod(place[2]) for place in self.places(suffix) if place is not None)

    def views(self, suffix: str, parameter: torch.Tensor) -> list[torch.Tensor | None]:
        """Return the runs' tensors, as views of the parameter."""
        if len(self.runs) == 1 and suffix in self.runs[0].shapes():
            return [parameter]
        return [None if place is None else _view(parameter, place) for place in self.places(suffix)]

    def tensors(self, layer: nn.Module) -> list[dict[str, torch.Tensor]]:
        """Return for each run suffix -> tensor."""
        found: list[dict[str, torch.Tensor]] = [{} for _ in self.runs]
        for suffix in self.suffixes:
            views = self.views(suffix, getattr(layer, self.prefix + suffix))
            for tensors, view in zip(found, views, strict=True):
                if view is not None:
                    tensors[suffix] = view
        return found


def _view(parameter: torch.Tensor, place: Place) -> torch.Tensor:
    start, nbytes, shape, dtype = place
    size = parameter.element_size()
    piece = parameter[start // size : -(-(start + nbytes) // size)].view(dtype)
    return piece[: prod(shape)].view(shape)


class Store:
    """Fills the parameters of a layer; knows what has come and what has not.

    Args:
        layer: gets the parameters.
        layout: of them.
    """

    def __init__(self, layer: nn.Module, layout: Layout) -> None:
        self.layout = layout
        self._filled: set[tuple[str, str]] = set()  # (module, suffix)
        self._orders: dict[tuple[int, int], dict[str, torch.Tensor]] = {}  # run, expert -> module -> act_perm
        for suffix in layout.suffixes:
            parameter = nn.Parameter(layout.parameter(suffix), requires_grad=False)
            if len(layout.runs) > 1:  # what the engine counts when it loads again: not the gaps between runs
                parameter.weight_loader_numel = layout.elements(suffix)  # type: ignore[attr-defined]
            layer.register_parameter(layout.prefix + suffix, parameter)

    def fill(
        self,
        parameter: torch.Tensor,
        suffix: str,
        tensor: torch.Tensor,
        *,
        shard: int | None,
        expert: tuple[int, str] | None = None,
    ) -> None:
        """Copy a tensor of the file to the parts for which it is.

        Args:
            parameter: of the layer.
            suffix: kind of the tensor.
            tensor: as it lies in the file.
            shard: number of the part; None: all parts.
            expert: the rank's number of the expert, and the name of its module.

        Raises:
            SourceError: a tensor of another shape or dtype than the config says, or without a place; an
                act-order that differs from the others of its run.
        """
        found = False
        views = self.layout.views(suffix, parameter.data)
        for number, (run, view) in enumerate(zip(self.layout.runs, views, strict=True)):
            target = None if view is None else run.share(view, None if expert is None else expert[0])
            for part in run.parts:
                if target is None or shard not in (None, part.shard):
                    continue
                name = part.module if expert is None else expert[1]
                _check(f"{name}.{suffix}", part, suffix, tensor, target.dtype)
                if suffix == "act_perm" and len(run.parts) > 1:
                    self._compare((number, -1 if expert is None else expert[0]), name, tensor)
                if suffix == "act_perm" and part is not run.parts[0]:
                    lazy.seen(tensor)  # one order serves the whole run
                else:
                    _narrowed(target, run.target(suffix, part)).copy_(_narrowed(tensor, part.source(suffix)))
                self._filled.add((name, suffix))
                found = True
        if not found:
            raise SourceError(
                "a layer has no place for a tensor of the file",
                code="extra-tensor",
                where=f"{self.layout.runs[0].parts[0].module}.{suffix}",
                expected=", ".join(self.layout.suffixes),
            )

    def _compare(self, run: tuple[int, int], module: str, order: torch.Tensor) -> None:
        """Compare the act-orders of one run. Unread ones were compared before the layer was made; those of a
        checkpoint that an engine loads afterwards were not.
        """
        if isinstance(order, lazy.FileTensor):
            return
        known = self._orders.setdefault(run, {})
        if module in known:  # a new round
            known.clear()
        for other, held in known.items():
            if not torch.equal(held.cpu(), order.cpu()):
                raise SourceError(
                    "layers that run as one have different act-orders",
                    code="act-perm",
                    where=f"{other}.act_perm, {module}.act_perm",
                    expected="the same order, as in the artifact that the engine was started with",
                    hint="start the engine with this artifact",
                )
        known[module] = order

    def missing(self) -> list[str]:
        """Return the names of the tensors of the parts' own modules that have not come."""
        return [
            f"{part.module}.{suffix}"
            for run in self.layout.runs
            for part in run.parts
            for suffix in run.shapes()
            if (part.module, suffix) not in self._filled
        ]

    def came(self, module: str, suffix: str) -> bool:
        """Tell whether a tensor has come."""
        return (module, suffix) in self._filled


def _narrowed(tensor: torch.Tensor, cuts: Mapping[int, tuple[int, int]]) -> torch.Tensor:
    for dim, (start, stop) in cuts.items():
        tensor = tensor.narrow(dim, start, stop - start)
    return tensor


def _check(name: str, part: Part, suffix: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    if part.whole is None:
        return  # an ordinary weight: it is narrowed and rounded as the engine does
    shape = part.whole.shapes()[suffix]
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise SourceError(
            "a tensor of a packed layer is not what the config says",
            code="tensor-mismatch",
            where=name,
            expected=f"{_told(dtype)} {list(shape)}",
            found=f"{_told(tensor.dtype)} {list(tensor.shape)}",
        )


def _told(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
