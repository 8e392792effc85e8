"""compressed-tensors blocks, format ``pack-quantized``.

A module takes the first group whose targets name it: exact names before patterns (``re:``, anchored at the
start only) before class names; ``ignore`` takes it out again. Of the classes only ``Linear`` means
anything to us, who see names alone.
"""

from collections.abc import Callable, Mapping
from typing import Any

from w4pack.convert.core import families, patterns
from w4pack.convert.core.scheme import ONE_GROUP, QuantScheme
from w4pack.convert.dialects import Claims, ModuleClaim, TargetModel, reading
from w4pack.convert.dialects.rules import products

METHODS = ("compressed-tensors", "compressed_tensors")

FORMAT = "pack-quantized"
PASSED_FORMATS = ("pack-quantized", "mixed-precision", "dense", "fakequant")
KNOWN_KEYS = frozenset((
    "format", "config_groups", "ignore", "kv_cache_scheme", "global_compression_ratio",
    "quantization_status", "version", "transform_config", "sparsity_config", "moe_sparsity_config",
    "run_compressed", "dequantize",
))  # fmt: skip
GROUP_KEYS = frozenset({"targets", "weights", "input_activations", "output_activations", "format"})
ORDERS = ("group", "dynamic")
RUN_TIME_FREE = "weight_"  # a transform at such a location is folded into the weights already


def claims(config: Mapping[str, Any]) -> Claims:
    """Parse a compressed-tensors block (also one found under ``compression_config``). Never raises."""
    groups = reading.table(config, "config_groups")
    finder, unread = _finder(config, groups)
    refusals = _refusals(config, groups)
    return Claims(
        method="compressed-tensors",
        label=reading.text(config, "format"),
        for_module=finder,
        lm_head=finder("lm_head") is not None,
        refusals=refusals,
        dropped=_dropped(config, refusals) + unread,
        carried={
            key: config[key]
            for key in ("kv_cache_scheme", "moe_sparsity_config")
            if reading.is_set(config.get(key))
        },
        unsupported=_unsupported(config, groups),
    )


def _group_claim(group: Mapping[str, Any]) -> ModuleClaim:
    weights = reading.table(group, "weights")
    channel = reading.text(weights, "strategy") == "channel"
    order = weights.get("actorder")
    return ModuleClaim(
        bits=reading.integer(weights, "num_bits"),
        group_size=ONE_GROUP if channel else reading.group_size(weights, "group_size"),
        sym=reading.boolean(weights, "symmetric"),
        desc_act=order is True or (isinstance(order, str) and order.lower() in ORDERS),
    )


def _finder(
    config: Mapping[str, Any], groups: Mapping[str, Any]
) -> tuple[Callable[[str], ModuleClaim | None], reading.Pairs]:
    """Return the look-up of modules, and a note for every pattern that cannot be read."""
    exact: dict[str, ModuleClaim] = {}
    matchers: list[tuple[patterns.Matcher, ModuleClaim]] = []
    by_class: ModuleClaim | None = None
    unread: list[tuple[str, str]] = []
    for key in groups:
        group = reading.table(groups, key)
        if not isinstance(group.get("weights"), Mapping):
            continue
        claim = _group_claim(group)
        for target in reading.strings(group.get("targets")):
            if target.startswith("re:"):
                match = patterns.matcher(target[3:])
                if match is None:
                    unread.append(
                        (f"config_groups.{key}.targets", f"unreadable pattern {reading.shown(target)}")
                    )
                else:
                    matchers.append((match, claim))
            elif target == "Linear":
                by_class = by_class or claim
            else:
                exact.setdefault(target, claim)
    ignored, more = _ignored(config)

    def for_module(name: str) -> ModuleClaim | None:
        if families.is_router(name) or ignored(name):
            return None
        if name in exact:
            return exact[name]
        return next((claim for match, claim in matchers if match(name)), by_class)

    return for_module, (*unread, *more)


def _ignored(config: Mapping[str, Any]) -> tuple[patterns.Matcher, reading.Pairs]:
    exact = set()
    matchers = []
    unread = []
    for entry in reading.strings(config.get("ignore")):
        if not entry.startswith("re:"):
            exact.add(entry)
        elif (match := patterns.matcher(entry[3:])) is not None:
            matchers.append(match)
        else:
            unread.append(("ignore", f"unreadable pattern {reading.shown(entry)}"))
    return (lambda name: name in exact or any(match(name) for match in matchers)), tuple(unread)


def _refusals(config: Mapping[str, Any], groups: Mapping[str, Any]) -> reading.Pairs:
    found = reading.forward_keys(config, KNOWN_KEYS)
    for key in groups:
        found += reading.forward_keys(reading.table(groups, key), GROUP_KEYS, f"config_groups.{key}.")
    online = run_time_locations(config)
    if online:
        found += (("transform_config", ", ".join(online)),)
    return found


def run_time_locations(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return ``name at location`` of every transform that happens at run time.

    A transform whose locations cannot be read counts as one: it may change the forward pass.
    """
    transforms = config.get("transform_config")
    if not reading.is_set(transforms):
        return ()
    schemes = reading.table(reading.table(config, "transform_config"), "config_groups")
    if not schemes:
        return (f"unknown form {reading.shown(transforms)}",)
    found = []
    for name in schemes:
        places = reading.table(schemes, name).get("apply")
        entries = places if isinstance(places, list) and places else [None]
        for entry in entries:
            location = reading.text(entry, "location") if isinstance(entry, Mapping) else None
            if location is None or not location.startswith(RUN_TIME_FREE):
                found.append(f"{name} at {location or 'an unknown location'}")
    return tuple(found)


def _dropped(config: Mapping[str, Any], refusals: reading.Pairs) -> reading.Pairs:
    found = reading.unknown_keys(config, KNOWN_KEYS, refusals)
    refused = {key for key, _ in refusals}
    if reading.is_set(config.get("transform_config")) and "transform_config" not in refused:
        found += (("transform_config", "already folded into the weights"),)
    return found


def _unsupported(config: Mapping[str, Any], groups: Mapping[str, Any]) -> str | None:
    """Return why nothing of the checkpoint is read: another format, type, strategy or number of bits."""
    for where, block in (
        ("format", config),
        *((f"config_groups.{key}.format", reading.table(groups, key)) for key in groups),
    ):
        label = reading.text(block, "format")
        if label is not None and label not in PASSED_FORMATS:
            return f"compressed-tensors {where} `{label}` (known: {FORMAT})"
    reasons = [_group_reason(key, reading.table(reading.table(groups, key), "weights")) for key in groups]
    known = [reason for reason in reasons if reason is not None]
    return known[0] if known and len(known) == len(reasons) else None


def _group_reason(key: str, weights: Mapping[str, Any]) -> str | None:
    kind = reading.text(weights, "type")
    if kind is not None and kind != "int":
        return f"compressed-tensors weights of type `{kind}` in {key} (known: int)"
    strategy = reading.text(weights, "strategy")
    if strategy is not None and strategy not in ("group", "channel"):
        return f"compressed-tensors strategy `{strategy}` in {key} (known: group, channel)"
    return reading.odd_bits(reading.integer(weights, "num_bits"))


# ---- writing -------------------------------------------------------------------------------------

MANY = 4  # from so many regular names on, one pattern stands for them
# ... but only where engines keep the checkpoint's names. Elsewhere (vision towers, nested language models)
# they translate exact names to their own and leave patterns alone, so a pattern is the last resort.
KEPT_NAMES = "model.layers."
MANY_ELSEWHERE = 512


def write(model: TargetModel) -> dict[str, Any]:
    """Return the block for a compressed-tensors target."""
    sets: dict[tuple[int, int, bool], list[str]] = {}
    for name in sorted(model.layers, key=families.natural_key):
        scheme = model.layers[name]
        sets.setdefault((scheme.bits, scheme.group_size, scheme.sym), []).append(name)
    groups = {
        f"group_{number}": _group(model.layers[names[0]], _targets(names, alone=len(sets) == 1))
        for number, names in enumerate(sets.values())
    }
    block: dict[str, Any] = {
        "quant_method": "compressed-tensors",
        "format": FORMAT,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": compact(_left_dense(model)),
        "kv_cache_scheme": model.carried.get("kv_cache_scheme"),
        "global_compression_ratio": None,
    }
    if model.carried.get("moe_sparsity_config"):
        block["moe_sparsity_config"] = model.carried["moe_sparsity_config"]
    return block


def _left_dense(model: TargetModel) -> tuple[str, ...]:
    """Return the linears that stay dense. A tied head is one: it has no tensor, but is a Linear."""
    if any(families.is_lm_head(name) for name in (*model.layers, *model.dense_linears)):
        return model.dense_linears
    return (*model.dense_linears, "lm_head")


def _group(scheme: QuantScheme, targets: list[str]) -> dict[str, Any]:
    channel = scheme.group_size == ONE_GROUP
    return {
        "targets": targets,
        "format": FORMAT,
        "weights": {
            "num_bits": scheme.bits,
            "type": "int",
            "symmetric": scheme.sym,
            "strategy": "channel" if channel else "group",
            "group_size": None if channel else scheme.group_size,
            "dynamic": False,
        },
        "input_activations": None,
        "output_activations": None,
    }


def _targets(names: list[str], *, alone: bool) -> list[str]:
    """Name the class for a lone scheme; several go by name, since a class would match fused modules first."""
    if not alone:
        return compact(names)
    return ["Linear", *(name for name in names if families.is_lm_head(name))]


def compact(names: tuple[str, ...] | list[str]) -> list[str]:
    """Return exact names, or one anchored ``re:`` pattern for each regular part of at least MANY of them."""
    out: list[str] = []
    for pattern, members in products(names):
        many = MANY if members[0].startswith(KEPT_NAMES) else MANY_ELSEWHERE
        out += members if len(members) < many else [f"re:{pattern}"]
    return out
