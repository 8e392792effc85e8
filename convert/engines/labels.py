"""What a quantization config tells an engine about each module, read as the engines read it.

Only the keys that engine rules compare are read here; whether a label is true is what the rules are about.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from w4pack.convert.core.families import is_lm_head
from w4pack.convert.core.patterns import Matcher, matcher, searcher

METHODS: Mapping[str, str] = {
    "gptq": "gptq",
    "gptq_marlin": "gptq",
    "auto_gptq": "gptq",
    "awq": "awq",
    "awq_marlin": "awq",
    "auto_awq": "awq",
    "compressed-tensors": "compressed-tensors",
    "auto-round": "auto-round",
    "inc": "auto-round",
    "intel/auto-round": "auto-round",
    "w4pack": "w4pack",
}


@dataclass(frozen=True, slots=True)
class Label:
    """What the config says about a module; None: nothing. ``quantized`` False: left in 16 bit."""

    bits: int | None = None
    group_size: int | None = None
    sym: bool | None = None
    desc_act: bool | None = None
    quantized: bool = True
    actorder: str | None = None


Lookup = Callable[[str], Label]
NOTHING = Label()


@dataclass(frozen=True, slots=True)
class Labels:
    """A parsed config. ``method`` is the family (``gptq`` ...) or the spelling found; "" without a config."""

    method: str
    packing: str
    lookup: Lookup
    memory: dict[str, Label] = field(default_factory=dict)

    def of(self, name: str) -> Label:
        """Return the label of module ``name``."""
        found = self.memory.get(name)
        if found is None:
            found = self.memory[name] = self.lookup(name)
        return found


def whole_number(value: object) -> int | None:
    """Return ``value`` if it is an integer and not a boolean."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def truth(value: object) -> bool | None:
    """Return ``value`` if it is a boolean."""
    return value if isinstance(value, bool) else None


def first(config: Mapping[str, Any], *keys: str) -> Any:
    """Return the value of the first of ``keys`` that is present."""
    return next((config[key] for key in keys if key in config), None)


def method_of(config: Mapping[str, Any] | None) -> str:
    """Return the family of ``quant_method``, or the spelling itself if no engine rule knows it."""
    value = first(config, "quant_method", "quant_algo") if config else None
    spelling = value.lower() if isinstance(value, str) else ""
    if config and not spelling:
        spelling = "gptq" if "desc_act" in config else "awq" if "zero_point" in config else ""
    return METHODS.get(spelling, spelling)


def read_labels(config: Mapping[str, Any] | None, built_as: Callable[[str], str] | None) -> Labels:
    """Parse ``config``. ``built_as`` maps a module to the name under which an engine looks
    up the rules of ``dynamic``; None: it does not read them."""
    if not config:
        return Labels("", "", lambda name: NOTHING)
    method = method_of(config)
    packing = (
        str(first(config, "packing_format", "backend") or "auto_round:auto_gptq")
        if method == "auto-round"
        else ""
    )
    readers: Mapping[str, Callable[[Mapping[str, Any], Callable[[str], str] | None], Lookup]] = {
        "gptq": _gptq,
        "awq": _awq,
        "compressed-tensors": _compressed_tensors,
        "auto-round": _autoround,
    }
    reader = readers.get(method)
    return Labels(method, packing, reader(config, built_as) if reader else lambda name: NOTHING)


def _gptq(config: Mapping[str, Any], built_as: Callable[[str], str] | None) -> Lookup:
    base = Label(
        bits=whole_number(config.get("bits")),
        group_size=whole_number(config.get("group_size")),
        sym=truth(config.get("sym")),
        desc_act=truth(config.get("desc_act")),
    )
    head = base if config.get("lm_head") else Label(quantized=False)
    dynamic = config.get("dynamic")
    rules = list(_dynamic(dynamic)) if isinstance(dynamic, Mapping) and built_as is not None else []

    def lookup(name: str) -> Label:
        for skip, pattern, values in rules:
            if built_as is not None and pattern(built_as(name)):
                return Label(quantized=False) if skip else _overridden(base, values)
        return head if is_lm_head(name) else base

    return lookup


def _dynamic(rules: Mapping[str, Any]) -> Iterable[tuple[bool, Matcher, Mapping[str, Any]]]:
    for key, values in rules.items():
        pattern = matcher(str(key).removeprefix("-:").removeprefix("+:"))
        if pattern is not None:
            yield str(key).startswith("-:"), pattern, values if isinstance(values, Mapping) else {}


def _overridden(base: Label, values: Mapping[str, Any]) -> Label:
    return Label(
        bits=whole_number(values.get("bits", base.bits)),
        group_size=whole_number(values.get("group_size", base.group_size)),
        sym=truth(values.get("sym", base.sym)),
        desc_act=truth(values.get("desc_act", base.desc_act)),
    )


def _awq(config: Mapping[str, Any], built_as: Callable[[str], str] | None) -> Lookup:
    zero_point = truth(config.get("zero_point"))
    base = Label(
        bits=whole_number(first(config, "bits", "w_bit")),
        group_size=whole_number(first(config, "group_size", "q_group_size")),
        sym=None if zero_point is None else not zero_point,
        desc_act=False,
    )
    skipped = config.get("modules_to_not_convert") or ()
    names = [s for s in skipped if isinstance(s, str)] if isinstance(skipped, (list, tuple)) else []
    head = base if config.get("lm_head") else Label(quantized=False)

    def lookup(name: str) -> Label:
        if any(part in name for part in names):
            return Label(quantized=False)
        return head if is_lm_head(name) else base

    return lookup


def targets_of(values: object) -> tuple[frozenset[str], tuple[Matcher, ...]]:
    """Split a list of names, class names and ``re:`` patterns into a set and compiled patterns."""
    words = [v for v in values if isinstance(v, str)] if isinstance(values, (list, tuple)) else []
    patterns = (matcher(v.removeprefix("re:")) for v in words if v.startswith("re:"))
    return frozenset(v for v in words if not v.startswith("re:")), tuple(p for p in patterns if p is not None)


def _compressed_tensors(config: Mapping[str, Any], built_as: Callable[[str], str] | None) -> Lookup:
    groups = config.get("config_groups")
    rows = (
        [_ct_group(g) for g in groups.values() if isinstance(g, Mapping)]
        if isinstance(groups, Mapping)
        else []
    )
    ignored, ignored_patterns = targets_of(config.get("ignore"))

    def lookup(name: str) -> Label:
        if name in ignored or any(p(name) for p in ignored_patterns):
            return Label(quantized=False)
        for names, patterns, label in rows:
            if name in names or any(p(name) for p in patterns):
                return label
        by_class = None if is_lm_head(name) else next((x for names, _, x in rows if "Linear" in names), None)
        return by_class or Label(quantized=False)

    return lookup


def _ct_group(group: Mapping[str, Any]) -> tuple[frozenset[str], tuple[Matcher, ...], Label]:
    weights = group.get("weights")
    weights = weights if isinstance(weights, Mapping) else {}
    size = whole_number(weights.get("group_size"))
    actorder = weights.get("actorder")
    label = Label(
        bits=whole_number(weights.get("num_bits")),
        group_size=-1 if weights.get("strategy") == "channel" or size is None else size,
        sym=truth(weights.get("symmetric")),
        desc_act=str(actorder).lower() in ("group", "dynamic", "true"),
        actorder=None if actorder is None else str(actorder).lower(),
    )
    names, patterns = targets_of(group.get("targets"))
    return names, patterns, label


def _autoround(config: Mapping[str, Any], built_as: Callable[[str], str] | None) -> Lookup:
    base = Label(
        bits=whole_number(config.get("bits")),
        group_size=whole_number(config.get("group_size")),
        sym=truth(config.get("sym")),
        desc_act=False,
    )
    extra = config.get("extra_config")
    special = {k: v for k, v in extra.items() if isinstance(v, Mapping)} if isinstance(extra, Mapping) else {}
    patterns = [
        (searcher(k), v) for k, v in special.items() if not k.replace(".", "").replace("_", "").isalnum()
    ]

    def lookup(name: str) -> Label:
        values = special.get(name)
        if values is None:
            values = next((v for p, v in patterns if p is not None and p(name)), None)
        if values is None:
            return Label(quantized=False) if is_lm_head(name) else base
        label = _overridden(base, values)
        return Label(quantized=False) if (label.bits or 0) >= 16 else label

    return lookup
