"""Finds the clip ratios of a model's quantizers on calibration text.

Each trial quantizes one site of all layers, or keys or values, with one ratio, and nothing else. All trials
go through the 16-bit model side by side, one layer in memory; what counts is how far the predictions at the
end are from those without a quantizer.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from w4pack.convert.dialects.online import ActQuant, KVQuant
from w4pack.convert.files.provider import Provider
from w4pack.convert.modeljobs.online import Runtime
from w4pack.convert.quantize.clips import KEYS, KV_DEFAULTS, VALUES, Clips, Costs, Trial, trials
from w4pack.convert.quantize.evaluation import divergence
from w4pack.convert.quantize.skeleton import Skeleton, build
from w4pack.convert.quantize.stream import Stream
from w4pack.convert.quantize.whole import compute_dtype

TOKENS = 512  # of the first window, which is measured with


def find_clips(
    config: Mapping[str, Any],
    provider: Provider,
    runtime: Runtime,
    windows: torch.Tensor,
    device: torch.device,
) -> Clips:
    """Return the ratios that change the predictions least. Of ``runtime`` the transforms and sites count.

    Memory: one decoder layer, embeddings and head, and about 60 times the hidden states of ``TOKENS`` tokens.
    """
    first = next(iter(runtime.sites))
    skeleton = build(config, provider, device, compute_dtype(device, provider, first))
    skeleton.fill_outside(head=True)
    exact = Stream(skeleton, [windows[:1, :TOKENS]])
    exact.begin()
    streams = {
        trial: Stream(skeleton, exact.tokens, list(exact.hidden), exact.calls, exact.as_tuple)
        for trial in trials(runtime.sites)
    }
    with torch.no_grad():
        for index, layer in enumerate(skeleton.layers):
            skeleton.fill(layer, skeleton.prefix(index))
            with runtime.around(skeleton, layer, index, quantized=False):
                exact.advance(layer, index)
            for trial, stream in streams.items():
                with _alone(runtime, trial, skeleton, layer, index):
                    stream.advance(layer, index)
            skeleton.empty(layer)
        wanted = exact.logits(0)
        costs = Costs({t: float(divergence(wanted, s.logits(0)).mean()) for t, s in streams.items()})
    return costs.clips(runtime.sites)


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
