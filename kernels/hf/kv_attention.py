"""Attention over a quantized cache, through transformers' own interfaces for attention and masks.

Two things are added to a model: the attention function under the name ``ATTENTION``, and a hook in front
of its decoder that sees the cache and the attention mask of a pass before any layer does. The hook puts
quantized layers into the cache that ``generate`` or the caller made, and says which tokens count. A model
that is called without a cache has its keys and values quantized all the same.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from w4pack.convert.errors import Refused, UsageError
from w4pack.convert.quantize.skeleton import CACHE_NAMES
from w4pack.kernels.hf.kv_adopt import adopt
from w4pack.kernels.hf.kv_cache import KVLayer
from w4pack.kernels.hf.kv_guides import guides_of
from w4pack.kernels.hf.kv_pages import KVPlan
from w4pack.kernels.hf.kv_steps import Steps

ATTENTION = "w4pack_kv"
PLAN = "w4pack_kv_plan"  # attribute of attention modules
CHANGES_SCORES = ("s_aux", "sinks", "head_mask", "position_bias", "encoder_hidden_states")


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: Any,
    value: Any,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Return (attention (B, T, heads, size), None) of queries (B, heads, T, size) over a quantized cache.

    Args:
        module: the model's attention.
        query: after RoPE.
        key: the handle that the cache layer's ``update`` returned; without a cache the keys
            (B, kv heads, T, size).
        value: the same, of values.
        attention_mask: (B, T) where there is no cache; with one, the hook has read it.
        scaling: of the products; None: 1 / sqrt(size).
        dropout: none at inference.
        sliding_window: tokens that a query sees, itself included.
        softcap: of the products.
        kwargs: what else the model passes on.

    Raises:
        UsageError: a mask for single pairs of tokens; keys that were cached in 16 bit; a model without a
            quantized cache.
        Refused: something that changes scores and that no kernel computes.
    """
    _refuse_unknown(module, attention_mask, kwargs)
    layer = key if isinstance(key, KVLayer) else _alone(module, query, key, value, attention_mask)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return layer.attend(query, float(scale), sliding_window or 0, float(softcap or 0.0)), None


def _alone(
    module: nn.Module, query: torch.Tensor, key: Any, value: Any, mask: torch.Tensor | None
) -> KVLayer:
    """Return a layer that holds the tokens of this pass alone."""
    plan: KVPlan | None = getattr(module, PLAN, None)
    if plan is None:
        raise UsageError(
            f"the attention `{ATTENTION}` is that of a model with a quantized cache, which sets it itself",
            code="attention",
            where="attn_implementation",
            expected="eager, sdpa or another one for 16-bit keys and values",
            found=ATTENTION,
        )
    if not isinstance(key, torch.Tensor) or key.shape[2] != query.shape[2]:
        raise UsageError(
            "the model was given a cache with 16-bit tokens",
            code="cache",
            expected="an empty cache, or one that this model has filled",
            found=type(key).__name__ if not isinstance(key, torch.Tensor) else f"{key.shape[2]} tokens",
        )
    steps = Steps()
    steps.guides = guides_of([module])
    steps.begin(query.shape[0], query.shape[2], query.device, mask)
    layer = KVLayer(plan, steps)
    layer.update(key, value)
    return layer


def _refuse_unknown(module: nn.Module, mask: torch.Tensor | None, kwargs: Mapping[str, Any]) -> None:
    _of_tokens(mask)
    found = [name for name in CHANGES_SCORES if kwargs.get(name) is not None]
    if found:
        raise Refused(
            "the attention of this model has a part that the quantized cache's does not",
            code="attention",
            where=type(module).__name__,
            found=", ".join(found),
            hint="load with kv_bits=16",
        )


def mask(*args: Any, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor | None:
    """Return the mask of tokens as it is: causality and windows are the attention's own.

    Raises:
        UsageError: a mask that the model makes of more than these.
    """
    if kwargs.get("use_vmap"):
        raise _of_pairs("causal, with or without a window", "a mask function of the model's own")
    return attention_mask


def install(model: PreTrainedModel, decoder: nn.Module, plans: Mapping[nn.Module, KVPlan]) -> None:
    """Make a model's attention run over a quantized cache.

    Args:
        model: whole, filled.
        decoder: the module that is called with the cache, and calls the layers.
        plans: attention module -> how its keys and values are stored, in the order of the layers.
    """
    for module, plan in plans.items():
        setattr(module, PLAN, plan)
    model.set_attn_implementation(ATTENTION)
    decoder.register_forward_pre_hook(_Before(decoder, plans), with_kwargs=True)


# On import, so that a model that was pickled finds them.
AttentionInterface.register(ATTENTION, attention)
AttentionMaskInterface.register(ATTENTION, mask)


class _Before:
    """What runs before each pass of the decoder."""

    def __init__(self, decoder: nn.Module, plans: Mapping[nn.Module, KVPlan]) -> None:
        self.modules, self.plans = tuple(plans), tuple(plans.values())
        forward = inspect.unwrap(type(decoder).forward)
        self.positional = tuple(inspect.signature(forward).parameters)[1:]

    def __call__(
        self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[()], dict[str, Any]]:
        given = {**dict(zip(self.positional, args, strict=False)), **kwargs}
        _refuse_other_attention(decoder, given)
        name = next((n for n in CACHE_NAMES if n in given), CACHE_NAMES[0])
        if name not in self.positional and name not in given:
            name = next((n for n in CACHE_NAMES if n in self.positional), name)
        config: Any = decoder.config
        used = given.get("use_cache")
        if given.get(name) is None:
            _refuse_packed(given)
            if used is False or (used is None and not getattr(config, "use_cache", True)):
                return (), given
            given[name] = DynamicCache(config=config)
        steps = adopt(given[name], self.plans)
        steps.guides = guides_of(self.modules)
        tokens = given.get("input_ids")
        tokens = given["inputs_embeds"] if tokens is None else tokens
        steps.begin(tokens.shape[0], tokens.shape[1], tokens.device, _of_tokens(given.get("attention_mask")))
        return (), given


def _of_tokens(mask: Any) -> torch.Tensor | None:
    """Return the mask of tokens: models with several kinds of layers are given one for each kind."""
    found = next(iter(mask.values()), None) if isinstance(mask, Mapping) else mask
    if found is not None and found.dim() != 2:
        raise _of_pairs("(batch, tokens): which tokens count", str(tuple(found.shape)))
    return found


def _of_pairs(expected: str, found: str) -> UsageError:
    return UsageError(
        "a quantized cache takes no attention mask for single pairs of tokens",
        code="cache",
        where="attention_mask",
        expected=expected,
        found=found,
        hint="load with kv_bits=16",
    )


def refuse_other(asked: str | None, where: str) -> None:
    """Refuse an attention that somebody asked for and that cannot read the codes; None: nobody did.

    Raises:
        UsageError: any but w4pack's own.
    """
    if asked not in (None, ATTENTION):
        raise UsageError(
            "a quantized cache is read by w4pack's own attention alone",
            code="attention",
            where=where,
            expected=ATTENTION,
            found=str(asked),
            hint="load with kv_bits=16",
        )


def _refuse_other_attention(decoder: nn.Module, given: Mapping[str, Any]) -> None:
    """Refuse an attention that cannot read the codes, and being asked for weights that nothing computes."""
    config: Any = decoder.config
    refuse_other(config._attn_implementation, "set_attn_implementation")
    wanted = given.get("output_attentions")
    if wanted or (wanted is None and getattr(config, "output_attentions", False)):
        raise UsageError(
            "attention over a quantized cache has no weights to return",
            code="attention",
            where="output_attentions",
            expected="False",
            found=str(wanted or True),
            hint="load with kv_bits=16",
        )


def _refuse_packed(given: Mapping[str, Any]) -> None:
    """Refuse several sequences in one row: their positions begin again, and only those say so."""
    positions = given.get("position_ids")
    if positions is None or given.get("attention_mask") is not None or positions.shape[-1] < 2:
        return
    if not bool((positions.diff(dim=-1) == 1).all()):
        raise UsageError(
            "a quantized cache takes one sequence in a row",
            code="cache",
            where="position_ids",
            expected="positions that rise by one",
            hint="a row for each sequence, padded, with an attention mask",
        )
