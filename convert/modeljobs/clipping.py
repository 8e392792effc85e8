"""Finds the clip ratios of a model's quantizers, and the guides of its keys, on calibration text.

Guides come first, layer by layer, from what the 16-bit model's attention does with some windows. Each trial
then quantizes one site of all layers, or keys or values, with one ratio, and nothing else. All trials go
through the 16-bit model side by side, one layer in memory; what counts is how far the predictions at the end
are from those without a quantizer.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from w4pack.convert.dialects.online import ActQuant, KVQuant
from w4pack.convert.files.provider import Provider
from w4pack.convert.modeljobs.online import Runtime
from w4pack.convert.quantize.clips import KEYS, KV_DEFAULTS, VALUES, Clips, Costs, Trial, trials
from w4pack.convert.quantize.evaluation import divergence
from w4pack.convert.quantize.guides import Sums, watched
from w4pack.convert.quantize.skeleton import Skeleton, build
from w4pack.convert.quantize.stream import Stream, batches_of
from w4pack.convert.quantize.whole import compute_dtype
from w4pack.convert.rotate.transform import rotate

TOKENS = 512  # of the first window, which is measured with
WATCHED = 8  # windows of so many tokens, from which guides are made


def find_clips(
    config: Mapping[str, Any],
    provider: Provider,
    runtime: Runtime,
    windows: torch.Tensor,
    device: torch.device,
    heads: Sequence[int],
) -> tuple[Clips, list[torch.Tensor]]:
    """Return the ratios that change the predictions least, and each layer's guide of keys.

    runtime  of which the transforms and sites count
    heads    number and size of the heads of keys

    Memory: one decoder layer, embeddings and head, and about 70 times the hidden states of ``TOKENS`` tokens.
    """
    kv_heads, size = heads
    first = next(iter(runtime.sites))
    skeleton = build(config, provider, device, compute_dtype(device, provider, first))
    skeleton.fill_outside(head=True)
    exact = Stream(skeleton, [windows[:1, :TOKENS]])
    watching = Stream(skeleton, batches_of(windows[:WATCHED, :TOKENS], 1))
    exact.begin()
    watching.begin()
    guides: dict[int, torch.Tensor] = {}  # filled on the way
    runtime = replace(runtime, guides=guides)
    streams = {
        trial: Stream(skeleton, exact.tokens, list(exact.hidden), exact.calls, exact.as_tuple)
        for trial in trials(runtime.sites)
    }
    with torch.no_grad():
        for index, layer in enumerate(skeleton.layers):
            skeleton.fill(layer, skeleton.prefix(index))
            with runtime.around(skeleton, layer, index, quantized=False):
                exact.advance(layer, index)
                sums = Sums.empty(kv_heads, size, device)
                guides[index] = _guide(runtime, watching, layer, index, sums)
            for trial, stream in streams.items():
                with _alone(runtime, trial, skeleton, layer, index):
                    stream.advance(layer, index)
            skeleton.empty(layer)
        wanted = exact.logits(0)
        costs = Costs({t: float(divergence(wanted, s.logits(0)).mean()) for t, s in streams.items()})
    return costs.clips(runtime.sites), list(guides.values())


def _guide(runtime: Runtime, watching: Stream, layer: nn.Module, index: int, sums: Sums) -> torch.Tensor:
    """Send the watched windows through a layer, and return its guide. ``sums``: over nothing yet."""
    with watched(layer, sums):
        watching.advance(layer, index)
    turn = runtime.turn_of_keys
    return sums.guide(None if turn is None else partial(rotate, rotation=turn))


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
