"""Model families as data: what a linear is for, what is fused or folded with it, and how experts are spelled.

Everything is decided from names and from the model's config; no tensor is read. A name that fits no row is
answered with the neutral value (``other``, None, the name itself), never with an error.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from w4pack.convert.core.architectures import BIASES, EXPERT_SPELLINGS, Bias

Role = Literal["column", "row", "replicated", "router", "lm_head", "embedding", "other"]
MlpKind = Literal["mlp", "expert", "shared_expert"]
FusedKind = Literal["qkv", "gate_up", "experts"]

# Leaf names by what tensor parallelism does to them. Column: N is cut; row: K is cut.
_ROLES: dict[Role, tuple[str, ...]] = {
    "column": (
        "q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "Wqkv", "W_pack", "c_attn", "wqkv",
        "q_b_proj", "kv_b_proj", "wq", "wk", "wv", "query", "key", "value", "qkv",
        "gate_proj", "up_proj", "gate_up_proj", "w1", "w3", "fc1", "fc_in", "c_fc", "dense_h_to_4h",
        "linear_fc1", "wi", "wi_0", "wi_1",
    ),
    "row": (
        "o_proj", "out_proj", "down_proj", "w2", "wo", "fc2", "fc_out", "c_proj", "dense_4h_to_h", "dense",
        "linear_fc2",
    ),
    "replicated": ("q_a_proj", "kv_a_proj_with_mqa", "kv_a_proj", "shared_expert_gate"),
    "router": ("router", "gate", "classifier"),
    "lm_head": ("lm_head", "embed_out"),
    "embedding": (
        "embed_tokens", "wte", "wpe", "embed_in", "word_embeddings", "embed_positions", "tok_embeddings",
    ),
}  # fmt: skip
_ROLE_OF: dict[str, Role] = {leaf: role for role, leaves in _ROLES.items() for leaf in leaves}
_SHORT_ROUTERS = ("gate", "router")  # router weights kept one level deeper, e.g. ``router.layer``

KV_LEAVES = ("k_proj", "v_proj", "wk", "wv", "key", "value")

# Linears that engines build as one: the fused leaf name and its parts, in order.
FUSED_LEAVES: dict[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "w13": ("w1", "w3"),
}
_FUSED_WITH = {
    leaf: tuple((fused, parts) for fused, parts in FUSED_LEAVES.items() if leaf in parts)
    for leaf in {part for parts in FUSED_LEAVES.values() for part in parts}
}
# The second matrix of an MLP and the ones whose outputs are its inputs, channel by channel. Transposed
# linears (``c_fc`` of GPT-2) are left out on purpose: their output axis lies elsewhere.
INTERMEDIATE_LEAVES: dict[str, tuple[tuple[str, ...], ...]] = {
    "down_proj": (("gate_proj", "up_proj"), ("gate_up_proj",), ("up_proj",)),
    "w2": (("w1", "w3"),),
    "fc2": (("fc1",),),
    "fc_out": (("fc_in",),),
    "dense_4h_to_h": (("dense_h_to_4h",),),
    "linear_fc2": (("linear_fc1",),),
}
HALVED_LEAVES = ("gate_up_proj",)  # gate and up stacked along N: a permutation moves both halves

_EXPERT = re.compile(r"(?P<layer>.*\.)?experts\.(?P<index>\d+)\.(?P<leaf>[^.]+)")
_SHARED = re.compile(r"(?:^|.*\.)shared_(?:expert|experts|mlp)\.[^.]+")
_NUMBER = re.compile("([0-9]+)")
MAX_DIGITS = 18  # longer runs of digits are hostile (Python refuses to parse thousands) and count as equal


def natural_key(name: str) -> tuple[tuple[Any, ...], str]:
    """Sort key that orders numbers as numbers: layer 2 before layer 10. Only equal names have equal keys."""
    parts: list[Any] = _NUMBER.split(name)  # text and digits in turn, so only like is compared with like
    parts[1::2] = [int(digits) if len(digits) < MAX_DIGITS else 10**MAX_DIGITS for digits in parts[1::2]]
    return tuple(parts), name


def split_name(module: str) -> tuple[str, str]:
    """Return (parent with its trailing dot, leaf)."""
    parent, dot, leaf = module.rpartition(".")
    return parent + dot, leaf


def role(module: str) -> Role:
    """Return what tensor parallelism does to a linear, or that it is a router, embedding or lm_head."""
    parent, leaf = split_name(module)
    if leaf in _ROLE_OF:
        return _ROLE_OF[leaf]
    if split_name(parent.rstrip("."))[1] in _SHORT_ROUTERS:
        return "router"
    return "other"


def is_router(module: str) -> bool:
    """Return True for the linears that choose experts, and for gates of one or few outputs. Always 16 bit."""
    return role(module) == "router" or split_name(module)[1] == "shared_expert_gate"


def is_lm_head(module: str) -> bool:
    """Return True for the output projection over the vocabulary."""
    return role(module) == "lm_head"


def expert_index(module: str) -> int | None:
    """Return the number of the expert a module belongs to, or None."""
    found = _EXPERT.fullmatch(module)
    return int(found["index"]) if found else None


def mlp_kind(module: str) -> MlpKind:
    """Return which of a layer's MLPs a module belongs to."""
    if _EXPERT.fullmatch(module):
        return "expert"
    return "shared_expert" if _SHARED.fullmatch(module) else "mlp"


@dataclass(frozen=True, slots=True)
class FusedSet:
    """Linears that engines need alike: ``name`` is what they are called once fused, ``members`` the parts."""

    name: str
    kind: FusedKind
    members: tuple[str, ...]


def fused_sets(modules: Iterable[str]) -> tuple[FusedSet, ...]:
    """Group modules into q/k/v, gate/up and all experts of a layer; sets of one member are left out.

    ``experts`` sets hold every linear of every expert; gate/up of an expert is a set of its own as well.
    """
    names = sorted(set(modules), key=natural_key)
    known = set(names)
    found: list[FusedSet] = []
    experts: dict[str, list[str]] = {}
    for name in names:
        parent, leaf = split_name(name)
        for fused, parts in _FUSED_WITH.get(leaf, ()):
            members = tuple(parent + part for part in parts if parent + part in known)
            if len(members) > 1 and name == members[0]:
                kind: FusedKind = "qkv" if fused == "qkv_proj" else "gate_up"
                found.append(FusedSet(parent + fused, kind, members))
        match = _EXPERT.fullmatch(name) if "experts." in name else None
        if match:
            experts.setdefault((match["layer"] or "") + "experts", []).append(name)
    found += [FusedSet(name, "experts", tuple(group)) for name, group in experts.items()]
    return tuple(found)


@dataclass(frozen=True, slots=True)
class IntermediateSet:
    """An MLP: the output columns of ``producers`` are the input rows of ``down``, channel by channel.

    halved  the one producer holds gate and up, stacked along N
    """

    down: str
    producers: tuple[str, ...]
    kind: MlpKind
    halved: bool


def intermediate_sets(modules: Collection[str]) -> tuple[IntermediateSet, ...]:
    """Find every MLP whose producers are all among ``modules`` (dense linears belong into it too)."""
    known = set(modules)
    found = []
    for name in sorted(known, key=natural_key):
        parent, leaf = split_name(name)
        for leaves in INTERMEDIATE_LEAVES.get(leaf, ()):
            producers = tuple(parent + producer for producer in leaves)
            if all(producer in known for producer in producers):
                found.append(IntermediateSet(name, producers, mlp_kind(name), leaves[0] in HALVED_LEAVES))
                break
    return tuple(found)


# Between the two halves of an MLP: what else reads or scales its channels. Such an MLP cannot be reordered.
_BETWEEN = ("norm", "scale", "act", "lora", "rot", "ln")


def between(tensors: Iterable[str], mlp: IntermediateSet) -> tuple[str, ...]:
    """Return the tensors that stand between ``mlp``'s producers and its down: extra norms, scales, adapters.

    Empty is what allows the intermediate channels to be permuted or padded.
    """
    parent, _ = split_name(mlp.down)
    own = parent.rstrip(".").rpartition(".")[2]
    alone = bool(own) and (
        not own.isdigit() or expert_index(mlp.down) is not None
    )  # not a whole decoder layer
    members = {split_name(module)[1] for module in (mlp.down, *mlp.producers)}
    found = []
    for name in tensors:
        if not name.startswith(parent):
            continue
        first, _, rest = name[len(parent) :].partition(".")
        part = rest if first in members else (first if alone else "")
        if any(word in part for word in (("lora",) if first in members else _BETWEEN)):
            found.append(name)
    return tuple(sorted(found, key=natural_key))


# ---- experts: the names a model class maps --------------------------------------------------------

_TO_MIXTRAL = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
_TO_QWEN = {short: long for long, short in _TO_MIXTRAL.items()}
_MOE_NAME = re.compile(
    r"(?P<head>.*\.)?(?P<block>mlp|block_sparse_moe)\."
    r"(?:(?P<expert>experts\.\d+)\.(?P<leaf>[^.]+)|(?P<other>gate|router|e_score_correction_bias))"
    r"(?P<tail>\..*)?"
)


def rename_experts(architectures: Sequence[str], name: str) -> str:
    """Return ``name``, a module or a tensor, as the model class maps it, if it is of an expert or a router.

    Any other name, and every name of a class that is not in EXPERT_SPELLINGS, comes back as it is. Fused 3-D
    experts (no expert number in the name) are no linears and keep their names too.
    """
    spelling = next((EXPERT_SPELLINGS[a] for a in architectures if a in EXPERT_SPELLINGS), None)
    found = _MOE_NAME.fullmatch(name)
    if spelling is None or found is None:
        return name
    block, leaves = ("block_sparse_moe", _TO_MIXTRAL) if spelling == "mixtral" else ("mlp", _TO_QWEN)
    if found["expert"]:
        rest = f"{found['expert']}.{leaves.get(found['leaf'], found['leaf'])}"
    else:
        rest = "gate" if spelling == "mixtral" and found["other"] == "router" else found["other"]
    return f"{found['head'] or ''}{block}.{rest}{found['tail'] or ''}"


# ---- config keys ----------------------------------------------------------------------------------

TEXT_SECTIONS = (
    "text_config",
    "language_config",
    "llm_config",
)  # where multimodal configs keep the language model
MLP_SIZE_KEYS = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", "ffn_dim_multiplier")
EXPERT_SIZE_KEYS = ("moe_intermediate_size", "intermediate_size")
SHARED_COUNT_KEYS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert")
KV_HEAD_KEYS = ("num_key_value_heads", "num_kv_heads", "num_attention_heads", "n_head")


@dataclass(frozen=True, slots=True)
class SizeKey:
    """Where a config keeps an intermediate size: the module has ``times * value`` channels.

    path   keys from the top of config.json, e.g. ``("text_config", "moe_intermediate_size")``
    times  number of shared experts that are stored as one, else 1
    """

    path: tuple[str, ...]
    value: int
    times: int = 1


def intermediate_size(config: Mapping[str, Any], kind: MlpKind) -> SizeKey | None:
    """Return the key that holds the intermediate size of one kind of MLP, or None if no known key does."""
    if kind == "shared_expert":
        own = _find(config, ("shared_expert_intermediate_size",))
        if own is not None:
            return own
        base, count = _find(config, EXPERT_SIZE_KEYS), _find(config, SHARED_COUNT_KEYS)
        if base is None or count is None:
            return base
        return SizeKey(base.path, base.value, count.value)
    return _find(config, EXPERT_SIZE_KEYS if kind == "expert" else MLP_SIZE_KEYS)


def _find(config: Mapping[str, Any], keys: Sequence[str]) -> SizeKey | None:
    """Return the first of ``keys`` with a positive integer; the language model's section comes first."""
    for section in (*TEXT_SECTIONS, None):
        block = config if section is None else config.get(section)
        if not isinstance(block, Mapping):
            continue
        for key in keys:
            value = block.get(key)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return SizeKey((key,) if section is None else (section, key), value)
    return None


def architectures(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the class names of config.json, the language model's included; ``()`` if there are none."""
    blocks = [config, *(config.get(section) for section in TEXT_SECTIONS)]
    listed = [block.get("architectures") for block in blocks if isinstance(block, Mapping)]
    return tuple(
        name for names in listed if isinstance(names, list) for name in names if isinstance(name, str)
    )


def kv_heads(config: Mapping[str, Any]) -> int | None:
    """Return the number of key/value heads, or None if the config does not say."""
    found = _find(config, KV_HEAD_KEYS)
    return found.value if found else None


# ---- biases ---------------------------------------------------------------------------------------

_QKV_LEAVES = (
    "q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "Wqkv", "W_pack", "c_attn", "wqkv", "qkv",
)  # fmt: skip
_LATENT_LEAVES = ("q_a_proj", "kv_a_proj_with_mqa", "kv_a_proj")
_OUT_LEAVES = ("o_proj", "out_proj", "dense", "wo")
_ELSEWHERE = (  # parts of a model that the rows say nothing about
    "visual", "vision", "audio", "multi_modal", "mm_projector", "linear_attn", "mamba",
)  # fmt: skip


def has_bias(config: Mapping[str, Any], module: str) -> bool | None:
    """Return whether the model class gives a linear a bias; None if the class or the module is unknown."""
    row = next((BIASES[name] for name in architectures(config) if name in BIASES), None)
    slot = _bias_slot(module)
    if row is None or slot is None or any(part in module for part in _ELSEWHERE):
        return None
    rule: Bias = getattr(row, slot)
    if isinstance(rule, bool):
        return rule
    key, default = rule
    for block in (*(config.get(section) for section in TEXT_SECTIONS), config):
        if isinstance(block, Mapping) and isinstance(block.get(key), bool):
            return bool(block[key])
    return default


def _bias_slot(module: str) -> str | None:
    """Return the field of Biases that speaks of a module."""
    parent, leaf = split_name(module)
    if leaf in _QKV_LEAVES:
        return "qkv"
    if leaf in ("q_b_proj", "kv_b_proj"):
        return "up_qkv"
    if leaf in _LATENT_LEAVES:
        return "latent"
    if leaf in _OUT_LEAVES or (leaf == "c_proj" and not parent.endswith(("mlp.", "ffn."))):
        return "out"
    if is_lm_head(module):
        return "head"
    return "mlp" if role(module) in ("column", "row") else None
