"""What a conversion would leave: the facts of OUT, from the facts of SRC and the options.

Used to suggest only commands whose result an engine takes. It follows the lossless transformations: trivial
orders dropped, block-constant maps regrouped, large groups split, down_proj's order folded, symmetric codes
written as they are. Where a step is refused, the answer is None.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from w4pack.convert.core import families
from w4pack.convert.core.facts import DenseFacts, LayerFacts, ModelFacts
from w4pack.convert.engines import checks
from w4pack.convert.engines.model import built_name, survey

PORTABLE = ("gptq", "awq", "compressed-tensors")
_SPLIT = (128, 64, 32)
_CHANGES_FORWARD = ("rotation", "rotation_config", "spinquant_config", "online")


@dataclass(frozen=True, slots=True)
class Conversion:
    """A target and the options that change what it writes. ``pad`` 0: no padding."""

    target: str
    fold: bool = False
    widen: bool = False
    regroup: bool = False
    pad: int = 0

    def command(self) -> str:
        """Return the command that asks for it."""
        words = ["w4pack convert SRC OUT --to", self.target]
        words += ["--fold-act-order"] * self.fold + ["--widen"] * self.widen + ["--regroup"] * self.regroup
        return " ".join(words + [f"--pad-for-tp {self.pad}"] * (self.pad > 0))


def convertible(facts: ModelFacts) -> bool:
    """Whether `convert` takes the model without being told to overlook something."""
    model = survey(facts, fused=False)
    if any(model.quant.get(key) for key in _CHANGES_FORWARD) or list(checks.run_time_transforms(model)):
        return False
    sparse = model.quant.get("sparsity_config")
    if isinstance(sparse, Mapping) and sparse.get("targets"):
        return False
    return bool(facts.layers) and not any(layer.ambiguous_zeros or layer.uneven for layer in facts.layers)


def predict(facts: ModelFacts, conversion: Conversion) -> ModelFacts | None:
    """Return the facts of the output, or None if a layer cannot be carried."""
    folded = _folded(facts) if conversion.fold or conversion.target in PORTABLE else frozenset()
    asym = _asymmetric(facts)
    padded = _padded(facts, conversion.pad)
    classes = survey(facts, fused=False).architectures
    layers = []
    for layer in facts.layers:
        moved = _converted(layer, conversion, layer.name in folded, layer.name in asym)
        if moved is None:
            return None
        if layer.name in padded:
            side, size = padded[layer.name]
            moved = replace(moved, in_features=size) if side == "in" else replace(moved, out_features=size)
        layers.append(replace(moved, name=families.rename_experts(classes, layer.name)))
    return _described(facts, tuple(layers), conversion.target)


def _folded(facts: ModelFacts) -> frozenset[str]:
    """Modules whose order moves into their producers' columns."""
    sets = {mlp.down for mlp in _free_mlps(facts)}
    return frozenset(
        x.name
        for x in facts.layers
        if x.act_order == "groups"
        and x.name in sets
        and (x.group_size <= 0 or x.in_features % x.group_size == 0)
    )


def _free_mlps(facts: ModelFacts) -> list[families.IntermediateSet]:
    """MLPs whose intermediate channels nothing but gate, up and down touches."""
    names = [x.name for x in facts.layers] + [_module(d) for d in facts.dense if d.name.endswith(".weight")]
    tensors = names + [d.name for d in facts.dense]
    return [mlp for mlp in families.intermediate_sets(names) if not families.between(tensors, mlp)]


def _asymmetric(facts: ModelFacts) -> frozenset[str]:
    """Modules with zero points, and those that engines fuse with one."""
    own = {x.name for x in facts.layers if not x.sym}
    for fused in families.fused_sets(x.name for x in facts.layers):
        if own.intersection(fused.members):
            own.update(fused.members)
    return frozenset(own)


def _padded(facts: ModelFacts, ways: int) -> Mapping[str, tuple[str, int]]:
    """Module -> (side, size) of the MLPs whose intermediate size is padded."""
    if not ways:
        return {}
    layers = {x.name: x for x in facts.layers}
    sizes: dict[str, tuple[str, int]] = {}
    for mlp in (m for m in _free_mlps(facts) if m.down in layers):
        down = layers[mlp.down]
        unit = ways * (128 if down.group_size <= 0 else 128 * down.group_size // _gcd(128, down.group_size))
        size = -(-down.in_features // unit) * unit
        sizes[mlp.down] = ("in", size)
        for name in mlp.producers:
            sizes[name] = ("out", size * (2 if mlp.halved else 1))
    return sizes


def _gcd(a: int, b: int) -> int:
    while b:
        a, b = b, a % b
    return a


def _converted(layer: LayerFacts, how: Conversion, folds: bool, asym: bool) -> LayerFacts | None:
    order, group = layer.act_order, layer.group_size
    if order == "block":
        order, group = "none", 32
    if order == "groups" and (folds or how.regroup):
        order = "none"
    if order == "groups" and how.target in PORTABLE:
        return None
    bits, sym = layer.bits, not asym
    if how.widen and bits == 4 and not sym:
        bits, sym = 8, True
    kept = replace(
        layer,
        layout=how.target,
        bits=bits,
        group_size=_split(group),
        sym=sym,
        act_order="groups" if order == "groups" else "trivial" if how.target == "gptq" else "none",
        zero_kind="plain",
    )
    return kept if _holds(kept, how.target) else None


def _split(group: int) -> int:
    """Return the largest Marlin group that divides a larger group; other sizes as they are."""
    return (
        next((size for size in _SPLIT if group > size and group % size == 0), group) if group > 128 else group
    )


def _holds(layer: LayerFacts, target: str) -> bool:
    pack = 32 // layer.bits
    if target == "marlin":
        return layer.group_size in checks.MARLIN_GROUPS
    if target == "awq":
        return layer.bits == 4 and layer.out_features % pack == 0
    if target == "gptq":
        return layer.in_features % pack == 0 and layer.out_features % pack == 0
    return True


def _module(dense: DenseFacts) -> str:
    return dense.name.removesuffix(".weight")


def _described(facts: ModelFacts, layers: tuple[LayerFacts, ...], target: str) -> ModelFacts | None:
    dense = survey(facts, fused=False).dense_linears
    layers = _one_group_named(layers)
    config = _WRITERS[target](layers, dense)
    if config is None:
        return None
    return replace(
        facts,
        quant_config=config,
        quant_file="config.json",
        layers=layers,
        files=("config.json", "model.safetensors"),
        weight_files=("model.safetensors",),
        warnings=(),
    )


def _one_group_named(layers: tuple[LayerFacts, ...]) -> tuple[LayerFacts, ...]:
    """Give a module of one group the model's group size where that is its K: one scheme instead of two."""
    sizes = Counter(x.group_size for x in layers if x.group_size > 0)
    usual = sizes.most_common(1)[0][0] if sizes else 0
    return tuple(
        replace(x, group_size=usual) if x.group_size == -1 and x.in_features == usual else x for x in layers
    )


Scheme = tuple[int, int, bool]


def _schemes(layers: Iterable[LayerFacts]) -> Counter[Scheme]:
    return Counter((x.bits, x.group_size, x.sym) for x in layers)


def _gptq(layers: tuple[LayerFacts, ...], dense: tuple[str, ...]) -> dict[str, Any] | None:
    (bits, group, sym), _ = _schemes(layers).most_common(1)[0]
    rules: dict[str, Any] = {f"-:^{re.escape(built_name(name))}$": {} for name in dense}
    rules |= {f"-:^{re.escape(name)}$": {} for name in dense}
    for x in layers:
        if (x.bits, x.group_size, x.sym) != (bits, group, sym):
            values = {"bits": x.bits, "group_size": x.group_size, "sym": x.sym}
            rules |= {f"+:^{re.escape(name)}$": values for name in (x.name, built_name(x.name))}
    head = any(families.is_lm_head(x.name) for x in layers)
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "sym": sym,
        "desc_act": False,
        "lm_head": head,
    }
    config["checkpoint_format"] = "gptq" if sym else "gptq_v2"
    return config | ({"dynamic": rules} if rules else {})


def _awq(layers: tuple[LayerFacts, ...], dense: tuple[str, ...]) -> dict[str, Any] | None:
    groups = {x.group_size for x in layers}
    if len(groups) > 1:
        return None
    head = any(families.is_lm_head(x.name) for x in layers)
    base = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": groups.pop(),
        "zero_point": True,
        "version": "gemm",
    }
    return base | {"modules_to_not_convert": list(dense), "lm_head": head}


def _compressed_tensors(layers: tuple[LayerFacts, ...], dense: tuple[str, ...]) -> dict[str, Any] | None:
    members: dict[Scheme, list[str]] = {}
    for x in layers:
        members.setdefault((x.bits, x.group_size, x.sym), []).append(x.name)
    groups = {}
    for number, ((bits, group, sym), names) in enumerate(members.items()):
        weights = {
            "num_bits": bits,
            "type": "int",
            "symmetric": sym,
            "strategy": "channel" if group == -1 else "group",
        }
        weights["group_size"] = None if group == -1 else group
        groups[f"group_{number}"] = {"targets": names, "weights": weights}
    head = (
        () if any(families.is_lm_head(name) for name in (*dense, *(x.name for x in layers))) else ("lm_head",)
    )
    base = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    return base | {"ignore": [*dense, *head]}


def _artifact(layers: tuple[LayerFacts, ...], dense: tuple[str, ...]) -> dict[str, Any] | None:
    return {"quant_method": "w4pack"}


_WRITERS = {"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed_tensors, "marlin": _artifact}
