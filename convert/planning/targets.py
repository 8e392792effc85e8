"""What each target can hold: one row per ``--to`` value. A new target is a row here, a layout, a dialect."""

from collections.abc import Iterable
from dataclasses import dataclass

from w4pack.convert.core.scheme import ONE_GROUP

KERNEL_GROUPS = (ONE_GROUP, 32, 64, 128)
SPLITS = (128, 64, 32)  # group sizes that groups are split to, largest first


@dataclass(frozen=True, slots=True)
class Target:
    """Rules of one target.

    layout        tensor layout (a key of FORMATS), None for dense
    dialect       config dialect, None for dense
    groups        group sizes it takes; None: any that divides in_features
    ragged        a short last group may stay
    order         rows may stay out of natural order (``act_perm``)
    extra_bias    a bias that the architecture does not have can be kept and is applied
    uniform_sym   symmetry must be the same for: ``fused`` sets, or the whole ``model``
    head          a quantized lm_head can be expressed
    explicit_zero zero points are always written, the midpoint for symmetric layers
    one_scheme    every layer must have the same bits and group size
    scale_dtypes  what scales may be stored as; other dtypes are converted where exact
    note          a line for the plan, or None
    """

    name: str
    layout: str | None
    dialect: str | None
    groups: tuple[int, ...] | None = None
    ragged: bool = False
    order: bool = False
    extra_bias: bool = False
    uniform_sym: str = "fused"
    head: bool = True
    explicit_zero: bool = False
    one_scheme: bool = False
    scale_dtypes: tuple[str, ...] = ("F16", "BF16")
    note: str | None = None


TARGETS: dict[str, Target] = {
    t.name: t
    for t in (
        Target("marlin", "marlin", "w4pack", KERNEL_GROUPS, ragged=True, order=True, extra_bias=True),
        Target(
            "marlin-legacy",
            "marlin-legacy",
            "gptq",
            (ONE_GROUP, 128),
            head=False,
            one_scheme=True,
            scale_dtypes=("F16",),
            note="current engines no longer load `B` / `s` tensors; "
            "auto-gptq 0.6 to 0.7.1 and older vLLM releases do",
        ),
        Target("gptq", "gptq", "gptq", uniform_sym="model"),
        Target("awq", "awq", "awq", head=False, explicit_zero=True, one_scheme=True),
        Target("compressed-tensors", "compressed-tensors", "compressed-tensors"),
        Target("dense", None, None, scale_dtypes=("F16", "BF16", "F32")),
    )
}


def fitting_group(target: Target, group_size: int, in_features: int) -> int | None:
    """Return the largest group size the target takes that keeps every weight, or None.

    The source's own size wins where it fits; otherwise groups are split: each scale row is repeated.
    """
    whole = group_size == ONE_GROUP or target.ragged or in_features % group_size == 0
    if whole and (target.groups is None or group_size in target.groups) and group_size <= SPLITS[0]:
        return group_size
    for size in SPLITS:
        splits = group_size > 0 and group_size % size == 0 and (target.ragged or in_features % size == 0)
        if splits and (target.groups is None or size in target.groups):
            return size
    return group_size if whole and target.groups is None else None


def common_group(schemes: Iterable[tuple[int, int]]) -> int | None:
    """Return the largest group size that all (in_features, group_size) pairs can be split to, or None."""
    pairs = set(schemes)
    sizes = {size for _, size in pairs}
    if len(sizes) == 1:
        return sizes.pop()
    candidates = sorted({size for size in sizes if size != ONE_GROUP} | set(SPLITS), reverse=True)
    return next((c for c in candidates if all(splits_to(rows, size, c) for rows, size in pairs)), None)


def splits_to(in_features: int, group_size: int, wanted: int) -> bool:
    """Tell whether groups can be split to ``wanted`` rows without loss."""
    if wanted == ONE_GROUP:
        return group_size == ONE_GROUP
    whole = in_features if group_size == ONE_GROUP else group_size
    return whole % wanted == 0 and in_features % wanted == 0
