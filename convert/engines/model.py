"""What rules look at: the modules of a model, folded into kinds that every rule treats alike.

A 70B model has 560 quantized linears and about ten kinds; rules run per kind, so that a table of engines and
tensor-parallel sizes costs milliseconds.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from w4pack.convert.core import families
from w4pack.convert.core.facts import LayerFacts, ModelFacts
from w4pack.convert.engines.labels import Label, Labels, read_labels

Role = Literal["column", "row", "replicated", "unknown"]

_ROLES: Mapping[str, Role] = {
    "column": "column",
    "row": "row",
    "lm_head": "column",
    "replicated": "replicated",
    "router": "replicated",
}
_FUSED_OF = {part: whole for whole, parts in families.FUSED_LEAVES.items() for part in parts}
_INDEX = re.compile(r"(?<=\.)\d+(?=\.)")
_EXPERT = re.compile(r"\.experts\.\d+\.")
_DTYPES = {"float16": "F16", "half": "F16", "bfloat16": "BF16", "float32": "F32", "float": "F32"}


@dataclass(frozen=True, slots=True)
class Kind:
    """Like modules: one of them stands for all.

    where    the name, or a pattern with ``*`` if the kind is every module of that pattern
    """

    layer: LayerFacts
    label: Label
    role: Role
    expert: bool
    lm_head: bool
    kv: bool
    names: tuple[str, ...]
    where: str

    @property
    def group(self) -> int:
        """Rows per group as the engine believes: the label if there is one, else the tensors."""
        return self.layer.group_size if self.label.group_size is None else self.label.group_size


@dataclass(frozen=True, slots=True)
class Uneven:
    """A module that engines fuse, whose parts are not alike."""

    where: str
    parts: str
    partial: bool  # some parts are not quantized at all
    expert: bool
    count: int


@dataclass(frozen=True, slots=True)
class Model:
    """A model as rules see it. ``labels`` is what the config claims, ``kinds`` what lies in the file."""

    facts: ModelFacts
    labels: Labels
    kinds: tuple[Kind, ...]
    uneven: tuple[Uneven, ...]
    dense_linears: tuple[str, ...]

    @property
    def quant(self) -> Mapping[str, Any]:
        """The quantization settings; empty if there are none."""
        return self.facts.quant_config or {}

    def number(self, *keys: str) -> int | None:
        """Return the first of ``keys`` that the config (or its text part) holds as a positive integer."""
        parts = (self.facts.config, self.facts.config.get("text_config"))
        for config in (part for part in parts if isinstance(part, Mapping)):
            for key in keys:
                value = config.get(key)
                if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                    return value
        return None

    @property
    def architectures(self) -> tuple[str, ...]:
        """Names of the model classes."""
        names = self.facts.config.get("architectures")
        return tuple(x for x in names if isinstance(x, str)) if isinstance(names, (list, tuple)) else ()

    @property
    def kv_heads(self) -> int | None:
        """Key/value heads; None if the config does not say."""
        return self.number("num_key_value_heads", "num_attention_heads", "n_head")

    @property
    def dtype(self) -> str | None:
        """Tag of the dtype the config names, None if it names none that we know."""
        for key in ("dtype", "torch_dtype"):
            value = self.facts.config.get(key)
            if isinstance(value, str):
                return _DTYPES.get(value.removeprefix("torch."))
        return None

    def ways(self, kind: Kind, tp: int) -> int:
        """Into how many parts ``tp`` ranks cut the module; key and value are repeated past their heads."""
        if kind.role == "replicated":
            return 1
        heads = self.kv_heads
        return min(tp, heads) if kind.kv and heads else tp

    def per_rank(self, kind: Kind, tp: int) -> tuple[float, float]:
        """(K_r, N_r): the shape on one rank, fractional where the cut does not come out even."""
        k, n = kind.layer.in_features, kind.layer.out_features
        ways = self.ways(kind, tp)
        return (k / ways, n) if kind.role == "row" else (k, n / ways)


def role_of(name: str) -> Role:
    """Return how tensor parallelism cuts a module, by its name."""
    return _ROLES.get(families.role(name), "unknown")


def pattern_of(name: str) -> str:
    """Replace layer and expert indexes by ``*``."""
    return _INDEX.sub("*", name)


def is_expert(name: str) -> bool:
    """Whether a module is one routed expert's."""
    return _EXPERT.search(name) is not None


def fused_name(name: str) -> str:
    """Return the name under which engines build the module: ``...q_proj`` -> ``...qkv_proj``."""
    head, dot, last = name.rpartition(".")
    return head + dot + _FUSED_OF.get(last, last)


def survey(facts: ModelFacts, *, fused: bool) -> Model:
    """Fold a model into kinds. ``fused``: the engine reads ``dynamic`` rules, under the names it builds."""
    labels = read_labels(facts.quant_config, built_name if fused else None)
    dense = tuple(d.name.removesuffix(".weight") for d in facts.dense if _is_linear_weight(d.name, d.shape))
    return Model(
        facts=facts,
        labels=labels,
        kinds=tuple(_kinds(facts.layers, labels)),
        uneven=tuple(_uneven(facts.layers, labels, dense)),
        dense_linears=dense,
    )


def _is_linear_weight(name: str, shape: tuple[int, ...]) -> bool:
    if len(shape) != 2 or not name.endswith(".weight"):
        return False
    return role_of(name.removesuffix(".weight")) in ("row", "column")


def _kinds(layers: Iterable[LayerFacts], labels: Labels) -> Iterator[Kind]:
    members: dict[tuple[object, ...], list[LayerFacts]] = defaultdict(list)
    totals: dict[str, int] = defaultdict(int)
    for layer in layers:
        pattern = pattern_of(layer.name)
        totals[pattern] += 1
        members[(pattern, labels.of(layer.name), _traits(layer))].append(layer)
    for key, group in members.items():
        pattern, label = str(key[0]), labels.of(group[0].name)
        whole = len(group) > 1 and len(group) == totals[pattern]
        if whole:
            yield _kind(group, label, pattern)
        else:
            for layer in group:
                yield _kind([layer], label, layer.name)


def _traits(layer: LayerFacts) -> tuple[object, ...]:
    return (
        layer.layout,
        layer.bits,
        layer.group_size,
        layer.sym,
        layer.act_order,
        layer.in_features,
        layer.out_features,
        layer.scale_dtype,
        layer.zero_kind,
        layer.ambiguous_zeros > 0,
    )


def _kind(group: list[LayerFacts], label: Label, where: str) -> Kind:
    layer = group[0]
    return Kind(
        layer=layer,
        label=label,
        role=role_of(layer.name),
        expert=is_expert(layer.name),
        lm_head=families.is_lm_head(layer.name),
        kv=layer.name.rpartition(".")[2] in families.KV_LEAVES,
        names=tuple(x.name for x in group),
        where=where,
    )


def _fused_set(name: str) -> str | None:
    """Return the fused module a part belongs to: attention, MLP, or all experts of a layer."""
    found = _EXPERT.search(name)
    if found is not None:
        return name[: found.start()] + ".experts"
    fused = fused_name(name)
    return fused if fused != name else None


def built_name(name: str) -> str:
    """Return the module an engine builds for a checkpoint module: fused, or all experts of a layer."""
    return _fused_set(name) or name


def _uneven(layers: Iterable[LayerFacts], labels: Labels, dense: Iterable[str]) -> Iterator[Uneven]:
    schemes: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for layer in layers:
        whole = _fused_set(layer.name)
        if whole is not None:
            schemes[whole][_scheme_text(layer, labels)].append(layer.name)
    for name in dense:
        whole = _fused_set(name)
        if whole in schemes:
            schemes[whole]["16 bit"].append(name)
    alike: dict[tuple[str, str], list[str]] = defaultdict(list)
    for whole, parts in schemes.items():
        if len(parts) > 1:
            alike[(pattern_of(whole + "."), _parts_text(parts))].append(whole)
    for (pattern, text), wholes in alike.items():
        where = wholes[0] if len(wholes) == 1 else pattern.rstrip(".")
        yield Uneven(where, text, "16 bit" in text, wholes[0].endswith(".experts"), len(wholes))


def _scheme_text(layer: LayerFacts, labels: Labels) -> str:
    sym = labels.of(layer.name).sym
    sym = layer.sym if sym is None else sym
    group = "per channel" if layer.group_size == -1 else f"g{layer.group_size}"
    return f"{layer.bits} bit {group} {'sym' if sym else 'asym'}"


def _parts_text(parts: Mapping[str, list[str]]) -> str:
    shown = []
    for scheme, names in parts.items():
        short = list(dict.fromkeys(n.rpartition(".")[2] for n in names))
        shown.append(f"{'/'.join(short)} {scheme}")
    return ", ".join(shown)
