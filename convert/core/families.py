"""Model families as data: what a linear is for, what is fused or folded with it, and how experts are spelled.

Everything is decided from names and from the model's config; no tensor is read. A name that fits no row is
answered with the neutral value (``other``, None, the name itself), never with an error.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

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
    "embedding": ("embed_tokens", "wte", "wpe", "embed_in", "word_embeddings", "embed_positions", "tok_embeddings"),
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
# The second matrix of an MLP and the ones whose outputs are its inputs, one output channel to one input channel.
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
_NUMBER = re.compile(r"(\d+)")


def natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key that orders numbers as numbers: layer 2 before layer 10."""
    parts = _NUMBER.split(name)
    return tuple((1, int(part), part) if odd % 2 else (0, 0, part) for odd, part in enumerate(parts))


def split_name(module: str) -> tuple[str, str]:
    """Return (parent with its trailing dot, leaf)."""
    parent, dot, leaf = module.rpartition(".")
    return parent + dot, leaf


def role(module: str) -> Role:
    """Return what tensor parallelism does to a linear, or that it is a router, an embedding or the lm_head."""
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
        for fused, parts in FUSED_LEAVES.items():
            members = tuple(parent + part for part in parts if parent + part in known)
            if len(members) > 1 and name == members[0]:
                kind: FusedKind = "qkv" if fused == "qkv_proj" else "gate_up"
                found.append(FusedSet(parent + fused, kind, members))
        match = _EXPERT.fullmatch(name)
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


# ---- experts: the names a model class maps -------------------------------------------------------------------

ExpertSpelling = Literal["mixtral", "qwen"]
# Read from transformers 5.24 (conversion_mapping.py): the checkpoint names that each class turns into its fused
# experts. "mixtral": block_sparse_moe.experts.E.w1|w2|w3; "qwen": mlp.experts.E.gate_proj|up_proj|down_proj.
EXPERT_SPELLINGS: dict[str, ExpertSpelling] = {
    "MixtralForCausalLM": "mixtral",
    "MiniMaxForCausalLM": "mixtral",
    "MiniMaxM2ForCausalLM": "mixtral",
    "Qwen2MoeForCausalLM": "qwen",
    "Qwen3MoeForCausalLM": "qwen",
    "DeepseekV2ForCausalLM": "qwen",
    "DeepseekV3ForCausalLM": "qwen",
    "OlmoeForCausalLM": "qwen",
    "Glm4MoeForCausalLM": "qwen",
    "Dots1ForCausalLM": "qwen",
    "Ernie4_5_MoeForCausalLM": "qwen",
    "Qwen3NextForCausalLM": "qwen",
}
_TO_MIXTRAL = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
_TO_QWEN = {short: long for long, short in _TO_MIXTRAL.items()}
_MOE_BLOCK = re.compile(r"(?P<head>.*\.)?(?:mlp|block_sparse_moe)\.(?P<rest>experts\.\d+\.[^.]+|gate)(?P<tail>\..*)?")


def rename_experts(architectures: Sequence[str], name: str) -> str:
    """Return ``name`` (module or tensor) of an expert or router as the model class maps it; others unchanged.

    Only the classes of EXPERT_SPELLINGS are known; for any other the name stays.
    """
    spelling = next((EXPERT_SPELLINGS[a] for a in architectures if a in EXPERT_SPELLINGS), None)
    found = _MOE_BLOCK.fullmatch(name)
    if spelling is None or found is None:
        return name
    container, leaves = ("block_sparse_moe", _TO_MIXTRAL) if spelling == "mixtral" else ("mlp", _TO_QWEN)
    parent, leaf = split_name(found["rest"])
    return f"{found['head'] or ''}{container}.{parent}{leaves.get(leaf, leaf)}{found['tail'] or ''}"
