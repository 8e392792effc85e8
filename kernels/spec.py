"""What a packed linear layer is, without its numbers: sizes, scheme, the shape and dtype of each tensor."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

SUFFIXES = ("weight", "weight_scale", "weight_zero_point", "act_perm", "bias")
UNIT = 64  # K and N of a packed layer are rounded up to it
GROUP_SIZES = (-1, 32, 64, 128)  # what kernels exist for
SCALE_DTYPES = ("F16", "BF16")
BIAS_DTYPES = ("F16", "BF16", "F32")


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """What the artifact's config says of one linear layer; ``stored_*`` are the padded sizes of the file."""

    in_features: int
    out_features: int
    bits: int = 4
    group_size: int = 128
    sym: bool = True
    act_order: bool = False
    bias: bool = False
    stored_in: int | None = None
    stored_out: int | None = None

    @property
    def k(self) -> int:
        """Rows of the packed weight."""
        return self.stored_in or self.in_features

    @property
    def n(self) -> int:
        """Columns of the packed weight."""
        return self.stored_out or self.out_features

    @property
    def groups(self) -> int:
        """Rows of the scales; the last group may be short."""
        return 1 if self.group_size == -1 else -(-self.k // self.group_size)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor, by the name it has in the file after the module's."""
        shapes: dict[str, tuple[int, ...]] = {
            "weight": (self.k // 16, self.n * self.bits // 2),
            "weight_scale": (self.groups, self.n),
        }
        if not self.sym:
            shapes["weight_zero_point"] = (self.groups, self.n * self.bits // 32)
        if self.act_order:
            shapes["act_perm"] = (self.in_features,)
        if self.bias:
            shapes["bias"] = (self.out_features,)
        return shapes

    def dtypes(self) -> dict[str, tuple[str, ...]]:
        """Return the safetensors dtypes that each tensor may have."""
        allowed = {"weight_scale": SCALE_DTYPES, "bias": BIAS_DTYPES}
        return {suffix: allowed.get(suffix, ("I32",)) for suffix in self.shapes()}


def fuse(specs: Sequence[LinearSpec], *, same_order: bool = False) -> LinearSpec | None:
    """Return the spec of the layers side by side, columns of one weight; None if they do not fit.

    They fit if input, bits, groups and symmetry are the same, if all or none have a bias, and if only the
    last has padded columns: others would lie in the middle of the output. Layers with an act-order fit only
    if the caller has compared their ``act_perm`` (``same_order``).
    """
    first = specs[0]
    alike = all(
        (s.in_features, s.k, s.bits, s.group_size, s.sym, s.act_order, s.bias)
        == (first.in_features, first.k, first.bits, first.group_size, first.sym, first.act_order, first.bias)
        for s in specs
    )
    padded_inside = any(s.n != s.out_features for s in specs[:-1])
    if not alike or padded_inside or (first.act_order and not same_order):
        return None
    out, stored = sum(s.out_features for s in specs), sum(s.n for s in specs)
    return replace(first, out_features=out, stored_in=first.k, stored_out=stored)
