"""Puts quantized layers into the caches of transformers, in the place of their own."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from w4pack.kernels.hf.kv_cache import KVLayer, foreign
from w4pack.kernels.hf.kv_pages import KVPlan
from w4pack.kernels.hf.kv_steps import Steps
from w4pack.kernels.quarot.kv_layout import PAGE

WINDOWED = (DynamicSlidingWindowLayer, StaticSlidingWindowLayer)
REPLACED = (DynamicLayer, StaticLayer, *WINDOWED)


def adopt(cache: Cache, plans: Sequence[KVPlan]) -> Steps:
    """Put quantized layers in the place of a cache's own, which must be empty; return what they share.

    Args:
        cache: of the model's layers.
        plans: how each layer is stored.

    Raises:
        UsageError: a cache of a kind that has no quantized layers, or one that holds 16-bit tokens.
    """
    held = next((layer.steps for layer in cache.layers if isinstance(layer, KVLayer)), None)
    if held is not None:
        return held
    replicated = cache.layer_class_to_replicate
    known = all(type(layer) in REPLACED for layer in cache.layers) and replicated in (None, DynamicLayer)
    if not known or getattr(cache, "offloading", False):
        raise foreign(f"{type(cache).__name__} of {_kinds(cache)}")
    if any(layer.is_initialized for layer in cache.layers):
        raise foreign(f"{type(cache).__name__} that was filled by another model")
    steps = Steps()
    own = enumerate(cache.layers)
    cache.layers = [_layer(layer, plans[number], steps, number) for number, layer in own]
    if replicated is not None:
        cache.layer_class_to_replicate = lambda: KVLayer(
            plans[len(cache.layers)], steps, number=len(cache.layers), leads=not cache.layers
        )
    return steps


def _layer(own: Any, plan: KVPlan, steps: Steps, number: int) -> KVLayer:
    static = isinstance(own, StaticLayer)
    window = 0
    if isinstance(own, WINDOWED):
        window = own.max_cache_len if static else own.sliding_window
    # A static window's room is that of its pages: how long the cache is to be is not known.
    room = own.max_cache_len if static else None
    layer = KVLayer(plan, steps, number=number, window=window, room=room, leads=number == 0)
    if static and window:
        layer.room = (layer.most_pages or 0) * PAGE
    return layer


def _kinds(cache: Cache) -> str:
    return ", ".join(sorted({type(layer).__name__ for layer in cache.layers})) or "other layers"


def sync_cache(cache: Cache, attention_mask: torch.Tensor | None = None) -> None:
    """Tell a cache how many tokens it holds, after replays of a CUDA graph: these pass Python by.

    Waits for the device. Passes that are run without a graph, ``crop`` and the question how long the cache is
    count on the host; call this between replays and them. Without quantized layers nothing is done.

    Args:
        cache: that the captured passes appended to.
        attention_mask: (B, tokens or more), nonzero for what counts: of all that was passed, replays
            included. Only needed where some of the replayed tokens were padding.

    Raises:
        UsageError: more tokens were passed than there is room for, so the last ones are not held; a mask that
            does not fit, or that is missing.
    """
    layers = [layer for layer in cache.layers if isinstance(layer, KVLayer) and layer.is_initialized]
    if not layers:
        return
    layers[0].steps.sync(attention_mask)
    for layer in layers:
        layer.sync()
