"""Finds the clip ratios of a model's quantizers: one pass of calibration text through the 16-bit model.

Of each linear's inputs a sample is quantized with every ratio, and its outputs are compared. Keys and values
are measured by what attention makes of them.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from w4pack.convert.dialects.online import KVQuant
from w4pack.convert.files.provider import Provider
from w4pack.convert.modeljobs.online import Runtime
from w4pack.convert.quantize.activations import BITS
from w4pack.convert.quantize.clips import (
    ACT_DEFAULTS,
    CACHE_RATIOS,
    KV_DEFAULTS,
    Clips,
    Errors,
    energy,
    output_errors,
)
from w4pack.convert.quantize.skeleton import Skeleton, build
from w4pack.convert.quantize.stream import Stream
from w4pack.convert.quantize.whole import compute_dtype, give_back

TOKENS = 4096  # that the ratios are measured with, in whole windows
SAMPLE = 512  # inputs of a linear that are quantized with every ratio


class _Arrived(Exception):
    """Ends a run of a layer."""


def find_clips(
    config: Mapping[str, Any],
    provider: Provider,
    runtime: Runtime,
    windows: torch.Tensor,
    device: torch.device,
) -> Clips:
    """Return the ratios with the least error. Of ``runtime`` the transforms and sites count.

    Memory: one decoder layer, the embeddings, and the hidden states of ``TOKENS`` tokens.
    """
    first = next(iter(runtime.sites))
    skeleton = build(config, provider, device, compute_dtype(device, provider, first))
    skeleton.fill_outside(head=False)
    few = windows[: max(1, TOKENS // windows.shape[1])]
    stream = Stream(skeleton, [few])
    errors = Errors()
    with torch.no_grad():
        stream.begin()
        for index, layer in enumerate(skeleton.layers):
            skeleton.fill(layer, skeleton.prefix(index))
            _Layer(runtime, skeleton, layer, index, errors).measure(stream)
            skeleton.empty(layer)
            give_back()
    acts = {site: errors.best(site, ACT_DEFAULTS) for site in dict.fromkeys(runtime.sites.values())}
    return Clips(acts, errors.best("k", KV_DEFAULTS), errors.best("v", KV_DEFAULTS))


class _Layer:
    """Measures one decoder layer that is in memory."""

    def __init__(
        self, runtime: Runtime, skeleton: Skeleton, layer: nn.Module, index: int, errors: Errors
    ) -> None:
        self.runtime, self.skeleton, self.layer, self.index = runtime, skeleton, layer, index
        self.errors = errors
        self.readers: dict[str, list[nn.Linear]] = {}
        for path, module in layer.named_modules():
            name = skeleton.names.get(f"{skeleton.prefix(index)}{path}.weight", "").removesuffix(".weight")
            if name in runtime.packed and isinstance(module, nn.Linear):
                self.readers.setdefault(runtime.sites[name], []).append(module)

    def measure(self, stream: Stream) -> None:
        """Add the layer's errors, and send the stream through it."""
        window = stream.hidden[0][:1]
        call = stream.calls[stream.tokens[0].shape[0]]
        stream.calls.setdefault(1, call if stream.tokens[0].shape[0] == 1 else _of_one(stream))
        self._cache(stream, window)
        seen: dict[int, torch.Tensor] = {}
        with self._watched(seen):
            stream.advance(self.layer, self.index)
        for site, modules in self.readers.items():
            self._site(site, [(m, seen[id(m)]) for m in modules if id(m) in seen])

    def _site(self, site: str, given: list[tuple[nn.Linear, torch.Tensor]]) -> None:
        """Add the mean error of a site's linears; those of one input are measured together."""
        together: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}
        for module, x in given:
            together.setdefault(id(x), (x, []))[1].append(module.weight.float())
        for bits in BITS:
            found = [output_errors(x, torch.cat(weights), bits) for x, weights in together.values()]
            for errors in found:
                self.errors.add(site, bits, {ratio: e / len(found) for ratio, e in errors.items()})

    @contextmanager
    def _watched(self, seen: dict[int, torch.Tensor]) -> Iterator[None]:
        """Keep a sample of what each linear is given, transformed. Linears of one input share the sample."""
        samples: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        handles = []

        def before(module: nn.Module, args: tuple[Any, ...]) -> None:
            given = args[0]
            if id(given) not in samples:
                rows = given.reshape(-1, given.shape[-1])
                samples[id(given)] = given, rows[:: max(1, rows.shape[0] // SAMPLE)][:SAMPLE].float()
            seen[id(module)] = samples[id(given)][1]

        with self.runtime.around(self.skeleton, self.layer, self.index, quantized=False):
            for module in (m for modules in self.readers.values() for m in modules):
                handles.append(module.register_forward_pre_hook(before))
            try:
                yield
            finally:
                for handle in handles:
                    handle.remove()

    def _cache(self, stream: Stream, window: torch.Tensor) -> None:
        """Add what the cache's quantizers do to the attention output of one window."""
        out = self.readers.get("attn_out")
        if not out:
            return
        exact = self._attention(stream, window, out[0], 16, 1.0, 1.0)
        for bits in BITS:
            other = KV_DEFAULTS[bits]
            for what, ratio in ((w, r) for w in ("k", "v") for r in CACHE_RATIOS[bits]):
                pair = (ratio, other) if what == "k" else (other, ratio)
                found = self._attention(stream, window, out[0], bits, *pair)
                self.errors.add(what, bits, {ratio: energy(found - exact) / energy(exact)})

    def _attention(
        self, stream: Stream, window: torch.Tensor, out: nn.Linear, bits: int, clip_k: float, clip_v: float
    ) -> torch.Tensor:
        """Return what attention gives for one window when the cache has those bits and ratios."""
        quant = KVQuant((bits, bits), {bits: clip_k}, {bits: clip_v}, 1)
        runtime = replace(
            self.runtime, online=replace(self.runtime.online, kv=quant), act_bits=16, kv_bits=bits
        )
        seen: list[torch.Tensor] = []

        def before(module: nn.Module, args: tuple[Any, ...]) -> None:
            seen.append(args[0].float())
            raise _Arrived

        with runtime.around(self.skeleton, self.layer, self.index):
            handle = out.register_forward_pre_hook(before)
            try:
                stream.run(self.layer, self.index, window)
            except _Arrived:
                pass
            finally:
                handle.remove()
        return seen[0]


def _of_one(stream: Stream) -> list[Any]:
    """Return what layers are called with for a single window."""
    single = Stream(stream.skeleton, [stream.tokens[0][:1]], as_tuple=stream.as_tuple)
    single.begin()
    return single.calls[1]
