"""What vLLM does with an artifact once w4pack is installed beside it: the rules of our plugin.

``w4pack check --engine vllm`` and the plugin itself, when it starts, ask this one table. Shapes are cut along
whole tiles and groups, as in our own runtime; only what this engine does differently has a test of its own.
"""

from collections.abc import Iterator

from w4pack.convert.core.families import HALVED_LEAVES, split_name
from w4pack.convert.engines import checks, w4pack
from w4pack.convert.engines.checks import Hit, key
from w4pack.convert.engines.model import Kind, Model
from w4pack.convert.engines.table import Finding, Rule

TESTED = ("0.31.0", "0.32.0")  # the releases that `make test-vllm` runs; the first is the oldest that will do


def releases() -> str:
    """Return the releases of vLLM that the plugin supports, in words."""
    return " and ".join(version.rpartition(".")[0] for version in TESTED)


def _installed(model: Model, tp: int) -> Iterator[Finding]:
    yield Finding(key(model, "quant_method"), f"w4pack installed beside vLLM {releases()}", "an artifact")


def _online(model: Model, tp: int) -> Iterator[Finding]:
    records = model.quant.get("online")
    if records:
        yield Finding(key(model, "online"), "no records", checks.short(records))
    else:  # that were there, by the manifest or by what else the files hold
        yield from w4pack.online(model, tp)


def _n_tile(model: Model, kind: Kind, tp: int) -> Hit:
    """Column-parallel modules whose share is not whole tiles: of each part, where the file holds several."""
    sections = _sections(model, kind, tp)
    if tp == 1 or not sections:
        return w4pack.n_tile(model, kind, tp)
    for columns, ways in sections:
        if columns % ways or columns // ways % w4pack.TILE:
            found = f"{columns}/{ways} = {checks.count(columns / ways)}"
            return f"N per rank a multiple of {w4pack.TILE} in each part", found
    return None


def _sections(model: Model, kind: Kind, tp: int) -> list[tuple[int, int]]:
    """Return (columns, ranks that share them) of the parts that a module of the file holds side by side."""
    leaf, columns = split_name(kind.layer.name)[1], kind.layer.out_features
    if leaf in HALVED_LEAVES:
        return [(columns // 2, tp)] * 2
    heads, kv = model.number("num_attention_heads"), model.kv_heads
    if leaf != "qkv_proj" or not heads or not kv:
        return []
    size = columns // (heads + 2 * kv)
    return [(heads * size, tp), (kv * size, min(tp, kv))]


def _head_tile(model: Model, kind: Kind, tp: int) -> Hit:
    """The engine pads the vocabulary to whole tiles and gives each rank an equal share of that."""
    if not kind.lm_head or tp == 1:
        return None
    padded = -(-kind.layer.out_features // w4pack.TILE) * w4pack.TILE
    if padded % (tp * w4pack.TILE) == 0:
        return None
    return f"a padded vocabulary of a multiple of {tp} * {w4pack.TILE}", str(padded)


def _packed_experts(model: Model, tp: int) -> Iterator[Finding]:
    found = [kind for kind in model.kinds if kind.expert]
    if found:
        total = sum(len(kind.names) for kind in found)
        yield Finding(found[0].where, "adapters on other layers only", "packed experts", total)


LOWER = "vllm serve with a lower --tensor-parallel-size"

RULES = (
    Rule(
        "vllm.plugin", "note", "quant_method", "with w4pack installed beside it, vLLM runs the artifact; "
        "without, it refuses the method by name", "pip install w4pack", whole=_installed, run=True,
    ),
    Rule(
        "vllm.plugin-layout", "refuses", "tensor layout", "the plugin reads the artifact only",
        "convert --to marlin", whole=w4pack.layout,
    ),
    Rule(
        "vllm.plugin-online", "refuses", "online", "work between the layers is not in the plugin",
        "w4pack generate runs it, in transformers", whole=_online, run=True,
    ),
    Rule(
        "vllm.plugin-group", "refuses", "group size", "no kernel",
        "convert --to marlin splits multiples of 32", test=w4pack.group,
    ),
    Rule(
        "vllm.plugin-heads", "refuses", "attention heads", "heads cannot be split unevenly", LOWER,
        whole=checks.heads,
    ),
    Rule(
        "vllm.plugin-n-tile", "refuses", "N per rank", "a tile is 64 columns",
        f"{LOWER}, or convert with --pad-for-tp; of experts: --enable-expert-parallel",
        test=_n_tile, run=True,
    ),
    Rule(
        "vllm.plugin-head-tile", "refuses", "vocabulary per rank", "a packed head is cut along its tiles",
        f"{LOWER}, or leave lm_head in 16 bit", test=_head_tile,
    ),
    Rule(
        "vllm.plugin-k-tile", "refuses", "K per rank, group size", "ranks hold whole tiles of 64 rows and "
        "whole groups", f"{LOWER}, or convert with --pad-for-tp; of experts: --enable-expert-parallel",
        test=w4pack.k_tile, run=True,
    ),
    Rule(
        "vllm.plugin-k-order", "refuses", "act_perm of row-parallel modules",
        "a rank would need inputs of the others", "--fold-act-order for down_proj, --regroup; of experts: "
        "--enable-expert-parallel", test=w4pack.k_order, run=True,
    ),
    Rule(
        "vllm.plugin-expert-names", "refuses", "names of experts", "the class maps other names",
        "convert: writes the names the class maps", whole=checks.expert_names,
    ),
    Rule(
        "vllm.plugin-experts", "note", "schemes of experts", "experts of a layer are stacked scheme by "
        "scheme: one product for each", "convert the same scheme for all experts",
        whole=checks.mixed_experts, run=True,
    ),
    Rule(
        "vllm.plugin-partial-experts", "slow", "experts left in 16 bit", "each of them is run on all tokens "
        "of a step", "--ignore all experts of that layer", whole=checks.partial_experts, run=True,
    ),
    Rule(
        "vllm.plugin-lora-experts", "note", "experts", "--enable-lora is refused unless "
        "--lora-target-modules leaves experts out: the engine adds their adapters inside its own kernels",
        "--lora-target-modules with the other layers", whole=_packed_experts, run=True,
    ),
)  # fmt: skip
