"""Reading foreign config blocks: every accessor returns None for a value of another type, and none raises.

Also the one rule about keys that change the forward pass, which all foreign dialects share.
"""

import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any

# A key we do not know, with a value, whose name holds one of these speaks of something done at run time.
FORWARD_WORDS = ("rot", "hadamard", "transform", "activation", "smooth", "lora", "adapter")
FORWARD_KEYS = (
    "rotation",
    "rotation_config",
    "spinquant_config",
    "input_activations",
    "output_activations",
    "activation",
    "adapter",
    "super_bits",
)
BASE_KEYS = ("quant_method", "method")
READ_BITS = (4, 8)
OTHER_BITS = (1, 2, 3, 5, 6, 7)
SHOWN_VALUE = 120  # characters of a value in a message

Pairs = tuple[tuple[str, str], ...]


def integer(config: Mapping[str, Any], *keys: str) -> int | None:
    """Return the first of ``keys`` that holds an integer (a bool is none)."""
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if isinstance(value, float) and value.is_integer():
            return int(value)
    return None


def boolean(config: Mapping[str, Any], *keys: str) -> bool | None:
    """Return the first of ``keys`` that holds a bool."""
    return next((config[key] for key in keys if isinstance(config.get(key), bool)), None)


def text(config: Mapping[str, Any], *keys: str) -> str | None:
    """Return the first of ``keys`` that holds a non-empty string."""
    return next((config[key] for key in keys if isinstance(config.get(key), str) and config[key]), None)


def table(config: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    """Return the first of ``keys`` that holds an object with string keys; ``{}`` if none does."""
    for key in keys:
        value = config.get(key)
        if isinstance(value, Mapping):
            return {name: item for name, item in value.items() if isinstance(name, str)}
    return {}


def strings(value: Any) -> tuple[str, ...]:
    """Return the strings of a list, flattened one level; a string with commas counts as a list."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if not isinstance(value, (list, tuple)):
        return ()
    found: list[str] = []
    for item in value:
        if isinstance(item, str) and item:
            found.append(item)
        elif isinstance(item, (list, tuple)):
            found += [inner for inner in item if isinstance(inner, str) and inner]
    return tuple(found)


def group_size(config: Mapping[str, Any], *keys: str) -> int | None:
    """Return the group size: -1 or positive; anything else counts as absent."""
    value = integer(config, *keys)
    return value if value is not None and (value == -1 or value > 0) else None


def is_set(value: Any) -> bool:
    """Return False for the ways a setting is written as not there: null, false, 0, and empty values."""
    return value is not None and value is not False and value not in ("", 0) and value != {} and value != []


def shown(value: Any) -> str:
    """Return a value as compact JSON, cut for a message."""
    try:
        out = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        out = type(value).__name__
    return out if len(out) <= SHOWN_VALUE else out[: SHOWN_VALUE - 3] + "..."


def forward_keys(config: Mapping[str, Any], known: Collection[str], where: str = "") -> Pairs:
    """Return the settings that change the forward pass; ``known`` names are judged elsewhere."""
    found = []
    for key, value in config.items():
        if not isinstance(key, str) or not is_set(value):
            continue
        named = key in FORWARD_KEYS
        unknown = key not in known and any(word in key.lower() for word in FORWARD_WORDS)
        if named or unknown:
            found.append((where + key, shown(value)))
    bits = integer(config, "act_bits")
    if bits is not None and bits < 16:
        found.append((f"{where}act_bits", str(bits)))
    sparsity = table(config, "sparsity_config")
    if is_set(sparsity.get("targets")):
        found.append((f"{where}sparsity_config.targets", shown(sparsity["targets"])))
    return tuple(found)


def unknown_keys(config: Mapping[str, Any], known: Iterable[str], refused: Pairs = ()) -> Pairs:
    """Return settings that mean nothing to us, each of which gets a line in the plan."""
    skip = {*known, *BASE_KEYS, *FORWARD_KEYS, *(key for key, _ in refused)}
    return tuple(
        (key, shown(value))
        for key, value in config.items()
        if isinstance(key, str) and key not in skip and is_set(value)
    )


def odd_bits(bits: int | None) -> str | None:
    """Return why a whole checkpoint of ``bits`` is not read, or None."""
    return f"{bits} bit weights (4 and 8 bit are read)" if bits in OTHER_BITS else None
