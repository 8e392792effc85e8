"""Measures what runs online, on calibration text: clip ratios of the quantizers, and guides of keys.

Guides come first, layer by layer, from what the 16-bit model's attention does with some windows. Each trial
then quantizes one site of all layers, or keys or values, with one ratio, and nothing else. All trials go
through the 16-bit model side by side, one layer in memory; what counts is how far the predictions at the end
are from those without a quantizer.

It is the first work of a run: a plan has ratios that nobody has measured, and the rest of the run has these
(``settled``).
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from w4pack.convert.core.facts import Warning_
from w4pack.convert.dialects.online import ActQuant, KVQuant
from w4pack.convert.errors import name_some
from w4pack.convert.events import Reporter
from w4pack.convert.files.provider import Added
from w4pack.convert.modeljobs.online import Runtime, runtime_of
from w4pack.convert.modeljobs.prepared import Prepared
from w4pack.convert.modeljobs.progress import Layers
from w4pack.convert.planning.online import with_ratios
from w4pack.convert.planning.plan import Plan
from w4pack.convert.planning.quantizing import linears_of
from w4pack.convert.quantize.clips import KEYS, KV_DEFAULTS, VALUES, Clips, Costs, Trial, trials
from w4pack.convert.quantize.evaluation import divergence
from w4pack.convert.quantize.guides import Sums, watched
from w4pack.convert.quantize.skeleton import Skeleton, build
from w4pack.convert.quantize.stream import Stream, batches_of
from w4pack.convert.quantize.whole import compute_dtype
from w4pack.convert.rotate.transform import rotate

TOKENS = 512  # of the first window, which is measured with
WATCHED = 8  # windows of so many tokens, from which guides are made


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """What was found. guides: name -> float32 (2, kv heads, head size), on the CPU, in the layers' order."""

    clips: Clips
    guides: Mapping[str, torch.Tensor]

    @property
    def warnings(self) -> tuple[Warning_, ...]:
        """Warn of guides that are 0: the attention of their layers was not seen."""
        blind = [name for name, guide in self.guides.items() if not guide.any()]
        if not blind:
            return ()
        expected = "attention that transformers calls by name"
        found = "nothing was seen: the guide is 0, and keys are quantized as without one"
        return (Warning_("guide-empty", name_some(blind), expected, found),)


def settled(prepared: Prepared, measured: Measured) -> Prepared:
    """Return what is quantized with the ratios and guides that were found."""
    clips = measured.clips
    online = with_ratios(prepared.model.online, clips.acts, clips.keys, clips.values)
    provider = Added(prepared.provider, prepared.guides, measured.guides)
    return replace(prepared, model=replace(prepared.model, online=online), provider=provider)


def settled_plan(plan: Plan, prepared: Prepared) -> Plan:
    """Return the plan as the output says it: with the ratios of ``prepared``, and not that they come later.

    Its digest is no job's: the job is that of the plan without them.
    """
    record = {name: value for name, value in (plan.quantization or {}).items() if name != "clips"}
    block = {**(plan.quant_config or {}), "online": [dict(one) for one in prepared.model.online]}
    return replace(plan, quant_config=block, quantization=record)


def measure(prepared: Prepared, reporter: Reporter, check: Callable[[], None]) -> Measured:
    """Return the ratios that change the predictions least, and each layer's guide of keys.

    check  called before each run of a layer: may raise to end the work

    Memory: one decoder layer, embeddings and head, and about 70 times the hidden states of ``TOKENS`` tokens.
    """
    model, device = prepared.model, prepared.device
    config = {**model.config, **model.config_changes}
    transforms = [] if prepared.rotation is None else list(prepared.rotation.online)
    infos = {name: info for name, info in model.infos.items() if name not in prepared.guides}
    runtime = runtime_of(config, infos, transforms, linears_of(infos))
    first = next(iter(runtime.sites))
    skeleton = build(config, prepared.provider, device, compute_dtype(device, prepared.provider, first))
    skeleton.fill_outside(head=True)
    _, *heads = next(iter(prepared.guides.values())).shape
    race = _Race(runtime, skeleton, prepared.windows, heads, check)
    layers = Layers(len(skeleton.layers), reporter, device)
    with torch.no_grad():
        for index, layer in enumerate(skeleton.layers):
            skeleton.fill(layer, skeleton.prefix(index))
            race.advance(layer, index)
            skeleton.empty(layer)
            layers.tell(index + 1, "measured for clip ratios and guides of keys")
        clips = race.costs().clips(runtime.sites)
    return Measured(clips, dict(zip(prepared.guides, race.guides.values(), strict=True)))


class _Race:
    """The model without a quantizer, the windows that guides are made from, and every trial, side by side."""

    def __init__(
        self,
        runtime: Runtime,
        skeleton: Skeleton,
        windows: torch.Tensor,
        heads: Sequence[int],
        check: Callable[[], None],
    ) -> None:
        """``heads``: number and size of the heads of keys."""
        self.skeleton, self.heads = skeleton, heads
        self.guides: dict[int, torch.Tensor] = {}  # filled on the way
        self.runtime = replace(runtime, guides=self.guides)
        self.exact = Stream(skeleton, [windows[:1, :TOKENS]], check=check)
        self.watching = Stream(skeleton, batches_of(windows[:WATCHED, :TOKENS], 1), check=check)
        self.exact.begin()
        self.watching.begin()
        self.streams = {trial: self._as_exact() for trial in trials(runtime.sites)}

    def _as_exact(self) -> Stream:
        exact = self.exact
        return Stream(
            self.skeleton, exact.tokens, list(exact.hidden), exact.calls, exact.as_tuple, exact.check
        )

    def advance(self, layer: nn.Module, index: int) -> None:
        """Send all through a layer, which has its weights."""
        with self.runtime.around(self.skeleton, layer, index, quantized=False):
            self.exact.advance(layer, index)
            self.guides[index] = self._guide(layer, index)
        for trial, stream in self.streams.items():
            with _alone(self.runtime, trial, self.skeleton, layer, index):
                stream.advance(layer, index)

    def _guide(self, layer: nn.Module, index: int) -> torch.Tensor:
        kv_heads, size = self.heads
        sums = Sums.empty(kv_heads, size, self.skeleton.device)
        with watched(layer, sums):
            self.watching.advance(layer, index)
        turn = self.runtime.turn_of_keys
        return sums.guide(None if turn is None else partial(rotate, rotation=turn))

    def costs(self) -> Costs:
        """Return what each trial costs: nats a token, on the exact model's predictions."""
        wanted = self.exact.logits(0)
        return Costs({t: float(divergence(wanted, s.logits(0)).mean()) for t, s in self.streams.items()})


def _alone(
    runtime: Runtime, trial: Trial, skeleton: Skeleton, layer: nn.Module, index: int
) -> AbstractContextManager[None]:
    """Let a layer run with one quantizer, and with all transforms."""
    if trial.what in (KEYS, VALUES):
        tables = {KEYS: dict(KV_DEFAULTS), VALUES: dict(KV_DEFAULTS)}  # the other half as it is most often
        tables[trial.what][trial.bits] = trial.ratio
        kv = KVQuant((trial.bits, trial.bits), tables[KEYS], tables[VALUES], 1)
        alone = replace(runtime, online=replace(runtime.online, kv=kv), act_bits=16, kv_bits=trial.bits)
    else:
        acts = {trial.what: ActQuant(trial.what, trial.bits, {trial.bits: trial.ratio})}
        alone = replace(runtime, online=replace(runtime.online, acts=acts), act_bits=trial.bits, kv_bits=16)
    return alone.around(skeleton, layer, index)
