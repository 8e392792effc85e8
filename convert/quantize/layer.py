"""One decoder layer: statistics of what each of its linears is given, and their codes, in the order of use.

Later linears see what the quantized earlier ones give them (a true sequential pass). Where all tokens are one
batch, the layer runs once and each linear is quantized at the moment in which its input arrives; else it runs
once for every stage.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from w4pack.convert.core import families
from w4pack.convert.core.scheme import QuantScheme
from w4pack.convert.quantize.hessian import Statistics
from w4pack.convert.quantize.linears import Quantized, Sample, quantize_set
from w4pack.convert.quantize.overflow import largest_finite, not_finite, size
from w4pack.convert.quantize.settings import STAGE_BYTES, Settings
from w4pack.convert.quantize.stream import Stream
from w4pack.convert.quantize.team import Team

SAMPLE = 128  # inputs that errors are measured with


class _Arrived(Exception):
    """Ends a run of a layer."""


@dataclass(slots=True, eq=False)
class InputSet:
    """Linears that read the same input: module paths below the layer."""

    members: tuple[str, ...]
    routed: bool
    quantized: bool = False
    statistics: Statistics | None = None
    inputs: list[torch.Tensor] = field(default_factory=list)
    references: list[torch.Tensor] = field(default_factory=list)

    def sample(self) -> Sample | None:
        """Return the inputs that were kept for measuring."""
        if not self.inputs:
            return None
        inputs = torch.cat(self.inputs)
        return Sample(inputs, torch.cat(self.references) if self.references else inputs)


def input_sets(paths: Sequence[str]) -> list[InputSet]:
    """Group linears by their input: q/k/v and gate/up share one, every other linear has its own."""
    taken: dict[str, tuple[str, ...]] = {}
    for fused in families.fused_sets(paths):
        if fused.kind != "experts":
            taken.update(dict.fromkeys(fused.members, fused.members))
    found: dict[tuple[str, ...], InputSet] = {}
    for path in paths:
        members = taken.get(path, (path,))
        found.setdefault(members, InputSet(members, families.expert_index(path) is not None))
    return list(found.values())


class LayerWork:
    """Quantizes one decoder layer that is in memory.

    layer    the module, its weights the source's; they are replaced by what their codes stand for
    schemes  module path below the layer -> scheme
    source   a copy of the layer that keeps the source's weights, and its stream: for GPTAQ, else None
    team     the processes that send other parts of the text through the same layer, or None
    """

    def __init__(
        self,
        layer: nn.Module,
        index: int,
        schemes: Mapping[str, QuantScheme],
        settings: Settings,
        source: tuple[nn.Module, Stream] | None = None,
        team: Team | None = None,
    ) -> None:
        self.layer = layer
        self.index = index
        self.schemes = schemes
        self.settings = settings
        self.source = source
        self.team = team
        self.sets = input_sets(list(schemes))
        self.done: dict[str, Quantized] = {}
        self.check: Callable[[], None] | None = None  # of the stream
        self.unshifted: slice | None = None  # tokens of a batch that the shift is not learnt from

    def run(self, stream: Stream) -> dict[str, Quantized]:
        """Quantize, and send the stream (and the source's) through the layer. Returns path -> codes.

        In a team: of the leader's, the others return nothing.
        """
        self.check = stream.check
        if stream.hidden and not self.settings.sinks:
            self.unshifted = slice(0, None, stream.hidden[0].shape[1])
        if self.settings.method == "rtn" or not stream.hidden:
            for one in self.sets:
                self._quantize(one)
        elif len(stream.hidden) == 1 and self.team is None:
            self._at_once(stream)
        else:
            self._in_stages(stream)
        for one in self.sets:
            if not one.quantized:
                self._quantize(one)  # an expert that no token was sent to
        return {path: self.done[path] for path in self.schemes if path in self.done}

    # ---- one batch: quantize when the input arrives ---------------------------------------------------

    def _at_once(self, stream: Stream) -> None:
        references: dict[str, torch.Tensor] = {}
        if self.source is not None:
            layer, source = self.source
            with self._noted(layer, self.sets, references):
                source.advance(layer, self.index)

        def arrived(one: InputSet, x: torch.Tensor) -> None:
            if not one.quantized:
                self._observe(one, x, references.pop(one.members[0], None), SAMPLE)
                self._quantize(one)

        with self._watched(self.layer, self.sets, arrived):
            stream.advance(self.layer, self.index)

    def _references(self, number: int, sets: Sequence[InputSet], *, last: bool) -> dict[str, torch.Tensor]:
        """Return the source model's inputs of linears that are not routed, for one batch.

        ``last``: nothing is asked of the source after this, so its tokens go on to the layer's end.
        """
        if self.source is None or not (last or any(not one.routed for one in sets)):
            return {}
        layer, stream = self.source
        seen: dict[str, torch.Tensor] = {}
        with self._noted(layer, sets, seen, stop=not last):
            if last:
                stream.hidden[number] = stream.run(layer, self.index, stream.hidden[number])
            else:
                self._until(layer, stream, number)
        return seen

    @contextmanager
    def _noted(
        self, layer: nn.Module, sets: Sequence[InputSet], seen: dict[str, torch.Tensor], *, stop: bool = False
    ) -> Iterator[None]:
        """Keep the inputs of linears that are not routed. ``stop``: the run ends with the last of them."""
        wanted = [one for one in sets if not one.routed]

        def arrived(one: InputSet, x: torch.Tensor) -> None:
            if one.members[0] not in seen:
                seen[one.members[0]] = x.clone()
            if stop and len(seen) == len(wanted):
                raise _Arrived

        with self._watched(layer, wanted, arrived):
            yield

    # ---- many batches: one run for every stage --------------------------------------------------------

    def _in_stages(self, stream: Stream) -> None:
        batches = len(stream.hidden) if self.team is None else self.team.total(len(stream.hidden))
        stages = self._stages(stream)
        for stage in stages:
            for number in range(len(stream.hidden)):
                references = self._references(number, stage, last=stage is stages[-1])
                self._collect(stream, number, stage, references, -(-SAMPLE // batches))
            for one in stage:
                self._merge(one, stream.skeleton.device)
                self._quantize(one)
        stream.advance(self.layer, self.index)
        if self.source is not None and not stages:
            self.source[1].advance(self.source[0], self.index)

    def _collect(
        self,
        stream: Stream,
        number: int,
        stage: Sequence[InputSet],
        references: Mapping[str, torch.Tensor],
        share: int,
    ) -> None:
        waiting = {one.members[0] for one in stage}

        def arrived(one: InputSet, x: torch.Tensor) -> None:
            self._observe(one, x, references.get(one.members[0]), share)
            waiting.discard(one.members[0])
            if not waiting:
                raise _Arrived

        with self._watched(self.layer, stage, arrived):
            self._until(self.layer, stream, number)

    def _stages(self, stream: Stream) -> list[list[InputSet]]:
        """Put the sets in the order of use; experts' first linears together, and so their second ones."""
        order: list[InputSet] = []
        with self._watched(self.layer, self.sets, lambda one, x: order.append(one)):
            self._until(self.layer, stream, 0)
        used = list(dict.fromkeys(id(one) for one in order))
        known = {id(one): one for one in self.sets}
        stages: dict[object, list[InputSet]] = {}
        for one in [*(known[i] for i in used), *(s for s in self.sets if id(s) not in used)]:
            key: object = one.members[0].rpartition(".")[2] if one.routed else id(one)
            stages.setdefault(key, []).append(one)
        found = [part for stage in stages.values() for part in self._bounded(stage, stream)]
        return found if self.team is None else self._agreed(found, self.team)

    def _agreed(self, stages: list[list[InputSet]], team: Team) -> list[list[InputSet]]:
        """Return the leader's stages: another process may have seen other experts first."""
        by_member = {one.members[0]: one for one in self.sets}
        names = team.told([[one.members[0] for one in stage] for stage in stages])
        return [[by_member[name] for name in stage] for stage in names]

    def _merge(self, one: InputSet, device: torch.device) -> None:
        """Add up what a team knows of an input. Nothing is left of one that nobody has seen."""
        if self.team is None:
            return
        features = self.schemes[one.members[0]].in_features
        if one.statistics is None:
            one.statistics = self._statistics(one, features, device)
        self.team.merge(one.statistics)
        empty = torch.empty(0, features, device=device)
        one.inputs = [self.team.joined(torch.cat([empty, *one.inputs]))]
        if one.statistics.shift is not None:
            one.references = [self.team.joined(torch.cat([empty, *one.references]))]
        if one.statistics.tokens == 0:
            one.statistics, one.inputs, one.references = None, [], []

    def _bounded(self, stage: list[InputSet], stream: Stream) -> Iterator[list[InputSet]]:
        """Cut a stage so that its Hessians fit the bound."""
        features = self.schemes[stage[0].members[0]].in_features
        limit = STAGE_BYTES["cpu" if stream.skeleton.device.type == "cpu" else "cuda"]
        size = max(1, limit // (4 * features * features))
        for start in range(0, len(stage), size):
            yield stage[start : start + size]

    # ---- what both have in common ---------------------------------------------------------------------

    @contextmanager
    def _watched(
        self,
        layer: nn.Module,
        sets: Sequence[InputSet],
        arrived: Callable[[InputSet, torch.Tensor], None],
    ) -> Iterator[None]:
        """Call ``arrived(set, inputs (tokens, K))`` before the first linear of each set is computed."""
        hooks = []
        for one in sets:

            def before(module: nn.Module, args: tuple[Any, ...], one: InputSet = one) -> None:
                arrived(one, args[0].reshape(-1, args[0].shape[-1]))

            hooks.append(layer.get_submodule(one.members[0]).register_forward_pre_hook(before))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _until(self, layer: nn.Module, stream: Stream, number: int) -> None:
        try:
            stream.run(layer, self.index, stream.hidden[number])
        except _Arrived:
            return

    def _observe(self, one: InputSet, x: torch.Tensor, reference: torch.Tensor | None, share: int) -> None:
        """Add a batch's inputs to the statistics, and keep a few for measuring."""
        peak = size(x)
        if not math.isfinite(peak):
            raise not_finite(one.members[0], "NaN or infinity in its input", largest_finite(x), x.dtype)
        if one.statistics is None:
            one.statistics = self._statistics(one, x.shape[1], x.device)
        one.statistics.peak = max(one.statistics.peak, peak)
        one.statistics.add(x, reference, unshifted=self.unshifted)
        step = max(1, x.shape[0] // share)
        one.inputs.append(x[::step][:share].float())
        if reference is not None:
            one.references.append(reference[::step][:share].float())

    def _statistics(self, one: InputSet, features: int, device: torch.device) -> Statistics:
        shifted = self.source is not None and not one.routed
        return Statistics(features, device, shifted=shifted, routed=one.routed)

    def _quantize(self, one: InputSet) -> None:
        """Choose the codes of a set, and put what they stand for in place of the weights."""
        if self.check is not None:
            self.check()
        if self.team is None or self.team.leads:
            weights = {path: self._linear(path).weight for path in one.members}
            schemes = {path: self.schemes[path] for path in one.members}
            made = quantize_set(weights, schemes, one.statistics, one.sample(), self.settings)
            for path, (codes, values) in made.items():
                self.done[path] = codes
                self._linear(path).weight.data.copy_(values)
        if self.team is not None:
            for path in one.members:
                self.team.share(self._linear(path).weight.data)
        one.quantized = True
        one.statistics, one.inputs, one.references = None, [], []

    def _linear(self, path: str) -> nn.Linear:
        found = self.layer.get_submodule(path)
        assert isinstance(found, nn.Linear)
        return found
