"""w4pack's own runtime: takes the artifact, whatever its scheme, and cuts it along whole Marlin tiles."""

from collections.abc import Iterator
from math import lcm

from w4pack.convert.engines import checks
from w4pack.convert.engines.checks import Hit
from w4pack.convert.engines.model import Kind, Model
from w4pack.convert.engines.table import Engine, Finding, Rule

VERSION = "artifact 1"

TILE = 64  # rows, and columns, of a Marlin tile
SPLIT_SITES = ("attn_out", "mlp_mid")  # in front of row-parallel linears


def layout(model: Model, tp: int) -> Iterator[Finding]:
    """Modules that are none of an artifact."""
    odd = [k for k in model.kinds if k.layer.layout != "marlin"]
    if odd:
        total = sum(len(k.names) for k in odd)
        yield Finding("quantized modules", "an artifact", f"{odd[0].layer.layout} tensors", total)
    elif model.labels.method != "w4pack":
        yield Finding("quantization_config", "an artifact", "no quantized module of an artifact")


def group(model: Model, kind: Kind, tp: int) -> Hit:
    """Group sizes without a kernel."""
    size = kind.layer.group_size
    if size in checks.MARLIN_GROUPS:
        return None
    return "group size -1, 32, 64 or 128 (multiples of 32 are split)", str(size)


def n_tile(model: Model, kind: Kind, tp: int) -> Hit:
    """Column-parallel modules whose share is not whole tiles."""
    ways = model.ways(kind, tp)
    return checks.n_split(model, kind, tp, TILE) if ways > 1 else None


def k_tile(model: Model, kind: Kind, tp: int) -> Hit:
    """Row-parallel modules whose share is not whole tiles and groups."""
    return checks.k_whole(kind, tp, rows_unit(kind))


def rows_unit(kind: Kind) -> int:
    """Rows of an artifact's module that stay together: whole tiles, and whole groups."""
    size = kind.layer.group_size
    return TILE if size <= 0 else lcm(TILE, size)


def k_order(model: Model, kind: Kind, tp: int) -> Hit:
    """Row-parallel modules with an act-order."""
    return checks.k_order(kind, tp)


def online(model: Model, tp: int) -> Iterator[Finding]:
    """Records of what runs between the linears that this model has no place or no kernel for."""
    for item in model.facts.unfit:
        cure = item.hint
        if cure and cure.startswith("--"):  # an option alone: of what runs an artifact, not of a conversion
            cure = f"w4pack generate, or w4pack.load, with {cure}"
        yield Finding(item.where, item.expected, item.found, cure=cure)


def online_split(model: Model, tp: int) -> Iterator[Finding]:
    """Transforms that mix what different ranks hold."""
    for site, order, block in _transforms(model) if tp > 1 else ():
        if site in SPLIT_SITES and (order % tp or order // tp % block):
            where, share = f"{checks.key(model, 'online')}: {site}", checks.count(order / tp)
            yield Finding(where, f"blocks within {order}/{tp} = {share}", f"blocks of {block}")


def _transforms(model: Model) -> Iterator[tuple[str, int, int]]:
    """Yield (site, order, block) of the records that are transforms; others are refused by ``online``."""
    records = model.quant.get("online")
    for record in records if isinstance(records, list) else ():
        if not isinstance(record, dict):
            continue
        site, order, block = (record.get(name) for name in ("site", "order", "block"))
        if isinstance(site, str) and isinstance(order, int) and isinstance(block, int) and block > 0:
            yield site, order, block


def online_experts(model: Model, tp: int) -> Iterator[Finding]:
    """Experts of several schemes, where something runs between their layers."""
    if model.quant.get("online"):
        yield from checks.mixed_experts(model, tp)


LOWER = "fewer ranks of the engine that serves it"

RULES = (
    Rule(
        "w4pack.layout", "refuses", "tensor layout", "the runtime reads the artifact only",
        "convert --to marlin", whole=layout,
    ),
    Rule(
        "w4pack.group", "refuses", "group size", "no kernel", "convert --to marlin splits multiples of 32",
        test=group,
    ),
    Rule(
        "w4pack.heads", "refuses", "attention heads", "heads cannot be split unevenly", LOWER,
        whole=checks.heads,
    ),
    Rule(
        "w4pack.n-tile", "refuses", "N per rank", "a tile is 64 columns",
        f"{LOWER}, or convert with --pad-for-tp", test=n_tile,
    ),
    Rule(
        "w4pack.k-tile", "refuses", "K per rank, group size", "ranks hold whole tiles of 64 rows and whole "
        "groups", f"{LOWER}, or convert with --pad-for-tp", test=k_tile,
    ),
    Rule(
        "w4pack.k-order", "refuses", "act_perm of row-parallel modules",
        "a rank would need inputs of the others", "--fold-act-order for down_proj, --regroup", test=k_order,
    ),
    Rule(
        "w4pack.online", "refuses", "online", "the loader would run another model, or has no kernel",
        "--act-bits 16 and --kv-bits 16 need no kernel; else convert the 16-bit model again", whole=online,
        run=True,
    ),
    Rule(
        "w4pack.online-split", "refuses", "online", "a rank would need values of the others",
        "convert the 16-bit model with --tp", whole=online_split,
    ),
    Rule(
        "w4pack.partial-experts", "refuses", "experts left in 16 bit", "experts of a layer are stacked",
        "--ignore all experts of that layer", whole=checks.partial_experts, run=True,
    ),
    Rule(
        "w4pack.online-experts", "refuses", "online, schemes of experts", "what runs between the layers of "
        "experts is made for one stack of them", "convert the 16-bit model with one scheme for all experts",
        whole=online_experts, run=True,
    ),
)  # fmt: skip

ENGINE = Engine("w4pack", VERSION, RULES)
