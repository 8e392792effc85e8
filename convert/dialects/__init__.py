"""Config dialects: what a ``quantization_config`` claims, and how to write one.

A dialect is one small module per ``quant_method``:

``METHODS``                          spellings of ``quant_method`` it answers to
``claims(config)``                   -> Claims; parse; never raises on nonsense values it does not need
``write(model) -> dict``             the block for a target (only dialects that are targets)

``find_dialect`` chooses a module for a block; ``unknown_method`` is the refusal if there is none.

Tensors decide; claims are compared with them. Which tensor layout a file has is not decided here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

from w4pack.convert.core.scheme import QuantScheme
from w4pack.convert.errors import FROM_16_BIT, Refused, W4PackError

DIALECTS: dict[str, str] = {
    "gptq": "gptq",
    "awq": "awq",
    "compressed-tensors": "compressed_tensors",
    "auto-round": "autoround",
    "w4pack": "w4pack",
}


@dataclass(frozen=True, slots=True)
class ModuleClaim:
    """What a config says about one module; None where it says nothing."""

    bits: int | None = None
    group_size: int | None = None
    sym: bool | None = None
    desc_act: bool | None = None


@dataclass(frozen=True, slots=True)
class Claims:
    """What a config says. ``for_module(name)`` is None for a module it leaves unquantized.

    method        canonical dialect name
    label         layout label as written (``gptq_v2``, ``gemv``, ``auto_round:auto_gptq`` ...), or None
    zero_kind     ``v1`` (stored minus one) or ``v2`` (stored as is) as far as the label says, else None
    writes_g_idx  False for producers that never write one (AutoRound)
    word_zeros    True if the producer is known to subtract on whole words (gptqmodel)
    refusals      (key, value as text): settings that change the forward pass, or layouts we do not read
    dropped       (key, value as text): settings a target of another dialect loses, each a plan line
    carried       settings only this dialect can carry (kv_cache_scheme)
    unsupported   reason the whole checkpoint is another kind of quantization, or None
    """

    method: str
    label: str | None
    for_module: Callable[[str], ModuleClaim | None]
    zero_kind: str | None = None
    writes_g_idx: bool = True
    word_zeros: bool = False
    lm_head: bool | None = None
    refusals: tuple[tuple[str, str], ...] = ()
    dropped: tuple[tuple[str, str], ...] = ()
    carried: Mapping[str, Any] | None = None
    unsupported: str | None = None


@dataclass(frozen=True, slots=True)
class TargetModel:
    """What a dialect needs to write its block.

    layers         module name -> scheme, for every linear that is quantized in the output
    dense_linears  names of 2-D ``.weight`` modules that stay dense (embeddings excluded, routers and
                   lm_head included when they exist as tensors)
    stored         module name -> (stored in_features, stored out_features), only where padded (artifact)
    carried        settings taken over from a source of the same dialect
    version        of w4pack
    """

    layers: Mapping[str, QuantScheme]
    dense_linears: tuple[str, ...]
    stored: Mapping[str, tuple[int, int]]
    carried: Mapping[str, Any]
    version: str


def get(name: str) -> ModuleType:
    """Import and return the module of dialect ``name``. Raises KeyError for an unknown one."""
    return import_module(f"{__name__}.{DIALECTS[name]}")


# Keys that only one dialect writes, for blocks without a method name (old files). The first row that fits
# wins.
_TELLTALES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("w4pack", ("artifact_version",)),
    ("compressed-tensors", ("config_groups",)),
    ("auto-round", ("packing_format",)),
    ("awq", ("zero_point",)),
    ("awq", ("q_group_size",)),
    ("gptq", ("is_marlin_format",)),
    ("gptq", ("bits", "group_size")),
    ("gptq", ("wbits",)),
)


def find_dialect(config: Mapping[str, Any]) -> ModuleType | None:
    """Return the dialect module that reads a settings block, or None.

    The method name decides; a block without one is recognised by keys that only one dialect writes.
    """
    for key in ("quant_method", "method"):
        method = config.get(key)
        if isinstance(method, str) and method:
            return _by_method(method)
    if config.get("load_in_4bit") or config.get("load_in_8bit"):
        return None
    return next((get(name) for name, keys in _TELLTALES if all(key in config for key in keys)), None)


def _by_method(method: str) -> ModuleType | None:
    modules = (get(name) for name in DIALECTS)
    return next((module for module in modules if method.lower() in module.METHODS), None)


def unknown_method(config: Mapping[str, Any], where: str | None) -> W4PackError:
    """Return the refusal for a settings block that no dialect reads; it names the method and what is read."""
    found = import_module(f"{__name__}.others").other_method(config)
    return Refused(
        "no reader for this kind of quantization",
        code="method-unknown",
        where=f"{where}: quant_method" if where else "quant_method",
        expected=", ".join(DIALECTS),
        found=found or "no method name",
        hint=FROM_16_BIT,
    )
