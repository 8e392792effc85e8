"""The equality gate: before anything is made of a rotated model, it must compute what its source computes.

Both models run on the same tokens, one decoder layer at a time, in float32, on weights that are not rounded.
Each rotated layer is given the source's own hidden states, rotated, so that an error belongs to the layer
that makes it and is measured against what that layer adds, not against the whole stream. What runs online in
the finished model is done here in front of the linears. A mixture of experts chooses by comparing numbers: a
token whose choice hangs on the last bits may come out differently, and is counted apart.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from w4pack.convert.errors import W4PackError
from w4pack.convert.events import Reporter
from w4pack.convert.files.provider import CheckpointProvider, Provider
from w4pack.convert.files.readahead import ReadAhead
from w4pack.convert.files.tensorfile import TensorInfo
from w4pack.convert.modeljobs.overlap import overlaps
from w4pack.convert.planning.options import ConvertOptions
from w4pack.convert.planning.rotation import rotation_of
from w4pack.convert.quantize.skeleton import Skeleton, build
from w4pack.convert.quantize.stream import Stream
from w4pack.convert.rotate.plan import RotationPlan
from w4pack.convert.rotate.rotated import Rotated, turn
from w4pack.convert.rotate.steps import Turn
from w4pack.convert.rotate.transform import rotate
from w4pack.convert.source.detect import Source

SEQUENCES, LENGTH = 2, 64  # tokens of the gate
TOLERANCE = 1e-5  # of what a layer adds, or of the largest logit; float32 gives about 1e-6
ROUNDING = 16 * 2.0**-24  # of the largest value of the stream: what adding to it in float32 may lose
NEAR_TIE = 1e-5  # of the largest router output: a closer choice is a matter of rounding
TIES_ALLOWED = 0.05  # share of a layer's tokens; more than that is no chance


@dataclass(slots=True)
class GateReport:
    """What the gate found ``worst``: largest difference of the stream over its largest value, and where.

    near_ties  (token, layer) pairs that were left out because experts were chosen by a hair
    outliers   of each layer's output, largest value over root mean square: (source, rotated)
    """

    worst: float = 0.0
    where: str = ""
    logits: float = 0.0
    layers: int = 0
    tokens: int = 0
    near_ties: int = 0
    outliers: list[tuple[float, float]] = field(default_factory=list)

    def see(self, error: float, where: str) -> None:
        """Keep the largest difference."""
        if error > self.worst:
            self.worst, self.where = error, where

    def text(self) -> str:
        """Return one line for people."""
        ties = f", {self.near_ties} near ties of experts left out" if self.near_ties else ""
        return (
            f"equal to the source before rounding: {self.layers} layers, {self.tokens} tokens{ties}; largest "
            f"difference {self.worst:.1e} of the stream ({self.where}), {self.logits:.1e} of the logits"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the figures for a report."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_json(cls, value: Any) -> "GateReport":
        """Return the report of its figures. Raises ValueError for what is none."""
        kinds = {
            "worst": float,
            "where": str,
            "logits": float,
            "layers": int,
            "tokens": int,
            "near_ties": int,
        }
        try:
            found = cls(**{name: kind(value[name]) for name, kind in kinds.items()})
            found.outliers = [(float(before), float(after)) for before, after in value["outliers"]]
        except (KeyError, TypeError, OverflowError) as err:
            raise ValueError(f"no figures of a gate: {err}") from err
        if not 0 < found.layers == len(found.outliers):
            raise ValueError("no figures of a gate: of another number of layers")
        return found

    def tell(self, reporter: Reporter) -> None:
        """Tell what was found."""
        reporter.event("gate", text=self.text(), **self.to_json())


class Unrounded:
    """A provider whose tensors come in float32, not in the dtype of the file."""

    def __init__(self, provider: Provider) -> None:
        self.provider = provider

    def names(self) -> Any:
        """See ``Provider``."""
        return self.provider.names()

    def info(self, name: str) -> TensorInfo:
        """See ``Provider``."""
        return self.provider.info(name)

    def get(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """See ``Provider``."""
        return self.provider.get(name, dtype or torch.float32)


@dataclass(slots=True)
class _Pair:
    """Source and rotated model side by side."""

    plan: RotationPlan
    config: Mapping[str, Any]
    source: Provider
    rotated: Provider
    device: torch.device
    ahead: ReadAhead | None = None
    report: GateReport = field(default_factory=GateReport)

    def expect(self, skeleton: Skeleton, index: int) -> None:
        """Have a layer read once for both models, if there is a thread for it and such a layer."""
        if self.ahead is not None and index < len(skeleton.layers):
            self.ahead.expect(skeleton.names_below(index), times=2)

    def skeletons(self) -> tuple[Skeleton, Skeleton]:
        """Build both models on ``meta``."""
        changed = {**self.config, **self.plan.config_changes}
        return (
            build(self.config, Unrounded(self.source), self.device, torch.float32),
            build(changed, Unrounded(self.rotated), self.device, torch.float32),
        )

    def expected(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what the source's hidden states are in the rotated model."""
        r1 = self.plan.stream
        if r1 is None:
            return hidden
        exact = hidden.to(torch.float64)
        if r1.ones:  # a LayerNorm model: its rotated stream has no mean
            exact = exact - exact.mean(-1, keepdim=True)
        return rotate(exact, r1).to(hidden.dtype)


def run_gate(
    config: Mapping[str, Any],
    source: Provider,
    rotated: Provider,
    plan: RotationPlan,
    device: str | torch.device = "cpu",
    ahead: ReadAhead | None = None,
    check: Callable[[], None] = lambda: None,
) -> GateReport:
    """Compare a rotated model with its source, layer by layer. Returns the figures.

    ahead  what both providers read through, if a thread is to read the next layer
    check  called before each layer: may raise to end the work

    Memory: one decoder layer in float32, the embeddings or the head, and the hidden states of 128 tokens;
    with ``ahead`` two layers as the file has them. Raises W4PackError (``rotation-differs``) naming the
    first layer that computes something else.
    """
    pair = _Pair(plan, config, source, rotated, torch.device(device), ahead)
    with torch.no_grad():
        ours, theirs = pair.skeletons()
        tokens = _tokens(ours)
        left, right = Stream(ours, [tokens]), Stream(theirs, [tokens])
        for stream in (left, right):
            stream.skeleton.fill_outside(head=False)
            stream.begin()
            stream.skeleton.empty_outside()
        pair.report.tokens = tokens.numel()
        wanted = pair.expected(left.hidden[0])
        _compare(pair, "the embeddings", wanted, right.hidden[0], wanted, None)
        pair.expect(ours, 0)
        for index in range(len(ours.layers)):
            check()
            _layer(pair, left, right, index)
        _logits(pair, left, right)
    return pair.report


def check_rotation(
    source: Source, options: ConvertOptions, device: torch.device, check: Callable[[], None]
) -> GateReport:
    """Run the gate on the rotation that the options ask for. ``check``: see ``run_gate``.

    Raises W4PackError if the rotated model is another one.
    """
    plan = rotation_of(source, options)
    provider: Provider = CheckpointProvider(source.checkpoint, device)
    with ExitStack() as stack:
        ahead = None
        if overlaps(device):
            provider = ahead = stack.enter_context(closing(ReadAhead(provider)))
        return run_gate(source.config, provider, Rotated(provider, plan, device), plan, device, ahead, check)


def _tokens(skeleton: Skeleton) -> torch.Tensor:
    """Draw tokens: always the same for one vocabulary."""
    vocabulary = skeleton.model.get_input_embeddings().weight.shape[0]
    most = getattr(skeleton.model.config, "max_position_embeddings", None)
    length = min(LENGTH, most) if isinstance(most, int) and most > 0 else LENGTH
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, vocabulary, (SEQUENCES, length), generator=generator)


def _layer(pair: _Pair, left: Stream, right: Stream, index: int) -> None:
    """Run one layer of both models and compare what comes out."""
    name = left.skeleton.prefix(index).rstrip(".")
    before = pair.expected(left.hidden[0])
    with _filled(left.skeleton, index) as layer, _routers(layer) as seen:
        left.advance(layer, index)
    right.hidden[0] = before
    pair.expect(left.skeleton, index + 1)
    with _filled(right.skeleton, index) as layer, _online(pair.plan, right.skeleton, layer, index):
        right.advance(layer, index)
    _compare(pair, name, pair.expected(left.hidden[0]), right.hidden[0], before, _near_ties(seen))
    pair.report.layers += 1
    pair.report.outliers.append((_peak(left.hidden[0]), _peak(right.hidden[0])))


def _peak(hidden: torch.Tensor) -> float:
    """Return the largest value over the root mean square."""
    return float(hidden.abs().max() / hidden.double().square().mean().sqrt().clamp(min=1e-30))


@contextmanager
def _filled(skeleton: Skeleton, index: int) -> Iterator[nn.Module]:
    layer = skeleton.layers[index]
    skeleton.fill(layer, skeleton.prefix(index))
    try:
        yield layer
    finally:
        skeleton.empty(layer)


def _compare(
    pair: _Pair,
    name: str,
    wanted: torch.Tensor,
    found: torch.Tensor,
    before: torch.Tensor,
    ties: torch.Tensor | None,
) -> None:
    """Hold a layer's output against the rotated output of the source. ``before``: what both were given."""
    added = float((wanted - before).abs().max()) if before is not wanted else float(wanted.abs().max())
    largest = float(wanted.abs().max())
    allowed = TOLERANCE * added + ROUNDING * max(largest, float(before.abs().max()))
    errors = (wanted - found).abs().amax(-1).reshape(-1)
    wrong = ~(errors <= allowed)  # a NaN is wrong
    if ties is not None and ties.numel() == wrong.numel():
        excused = wrong & ties
        if int(excused.sum()) <= max(1, TIES_ALLOWED * wrong.numel()):
            pair.report.near_ties += int(excused.sum())
            wrong, errors = wrong & ~excused, errors.masked_fill(excused, 0.0)
    worst = float(errors.max())
    if bool(wrong.any()):
        raise _differs(name, worst, allowed, f"{int(wrong.sum())} of {wrong.numel()} tokens")
    pair.report.see(worst / max(largest, 1e-30), name)


def _logits(pair: _Pair, left: Stream, right: Stream) -> None:
    """Compare the logits that final norm and head make of the same hidden states."""
    made = []
    hidden = (left.hidden[0], pair.expected(left.hidden[0]))
    for stream, states in zip((left, right), hidden, strict=True):
        stream.skeleton.fill_outside(head=True)
        stream.hidden[0] = states
        made.append(stream.logits(0))
        stream.skeleton.empty_outside()
    wanted, found = made
    largest = max(float(wanted.abs().max()), 1e-30)
    error = float((wanted - found).abs().max()) / largest
    if not error <= TOLERANCE:
        raise _differs("the final norm and the head", error * largest, TOLERANCE * largest, "logits")
    pair.report.logits = error


def _differs(name: str, error: float, allowed: float, what: str) -> W4PackError:
    return W4PackError(
        "the rotated model does not compute what its source computes",
        code="rotation-differs",
        where=name,
        expected=f"differences of at most {allowed:.1e}",
        found=f"{error:.1e} in {what}",
        hint="`--rotate none` leaves the weights as they are; this is worth a report",
    )


# ---------------------------------------------------------------- experts


@contextmanager
def _routers(layer: nn.Module) -> Iterator[list[torch.Tensor]]:
    """Collect what the routers of a layer answer: (tokens, experts)."""
    seen: list[torch.Tensor] = []

    def watch(module: nn.Module, inputs: Any, output: Any) -> None:
        values = output if isinstance(output, tuple | list) else (output,)
        for value in values:
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() >= 2:
                seen.append(value.reshape(-1, value.shape[-1]).float())
                return

    names = [(path, module) for path, module in layer.named_modules() if path.endswith((".gate", ".router"))]
    handles = [module.register_forward_hook(watch) for _, module in names]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _near_ties(seen: list[torch.Tensor]) -> torch.Tensor | None:
    """Mark tokens for which two experts are as good as equal."""
    marks = None
    for scores in seen:
        if scores.shape[-1] < 2:
            continue
        ranked = scores.sort(-1).values
        close = (ranked.diff(dim=-1) <= NEAR_TIE * scores.abs().amax(-1, keepdim=True)).any(-1)
        marks = close if marks is None else marks | close
    return marks


# ---------------------------------------------------------------- online transforms


@contextmanager
def _online(plan: RotationPlan, skeleton: Skeleton, layer: nn.Module, index: int) -> Iterator[None]:
    """Do in front of each linear what a runtime does there. R3 cancels within q kᵀ and has no other half."""
    handles = []
    for path, module in layer.named_modules():
        name = skeleton.names.get(f"{skeleton.prefix(index)}{path}.weight")
        steps = [s for s in plan.steps.get(name or "", ()) if isinstance(s, Turn) and s.online]
        if steps:
            handles.append(module.register_forward_pre_hook(_turning(steps)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _turning(steps: list[Turn]) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
    def hook(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        values = inputs[0]
        flat = values.reshape(-1, values.shape[-1]).to(torch.float64)
        for step in steps:
            flat = turn(flat, step)
        return (flat.to(values.dtype).reshape(values.shape), *inputs[1:])

    return hook
