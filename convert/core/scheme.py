"""The scheme of one quantized linear: what its numbers mean, without the numbers.

``in_features`` is K (the reduction), ``out_features`` is N. ``group_size`` -1 means one group over all of K.
"""

from dataclasses import dataclass

ONE_GROUP = -1
RUN_CODES = (4, 8)  # bits of activations, keys and values that are quantized at run time
WIDE = 16  # bits of what is not
RUN_BITS = (*RUN_CODES, WIDE)


@dataclass(frozen=True, slots=True)
class QuantScheme:
    """Bits, grouping, symmetry, order and shape of one quantized linear.

    bits          4 or 8
    group_size    rows of K that share a scale; -1: all of them. The last group may be short.
    sym           every zero point is 2**(bits - 1); no zero tensor is needed
    act_order     the rows are assigned to groups by a real permutation (a ``group`` map is needed)
    in_features   K
    out_features  N
    scale_dtype   safetensors tag of the scales: F16, BF16 or F32
    """

    bits: int
    group_size: int
    sym: bool
    act_order: bool
    in_features: int
    out_features: int
    scale_dtype: str

    @property
    def groups(self) -> int:
        """G = ceil(K / group_size), 1 for one group."""
        if self.group_size == ONE_GROUP:
            return 1
        return -(-self.in_features // self.group_size)

    @property
    def midpoint(self) -> int:
        """The zero point of a symmetric scheme."""
        return 1 << (self.bits - 1)

    @property
    def codes_per_word(self) -> int:
        """Codes in one 32-bit word: 8 for 4 bit, 4 for 8 bit."""
        return 32 // self.bits

    def label(self) -> str:
        """Return the short form used in plans: ``4 bit g128 sym act-order``."""
        group = "per channel" if self.group_size == ONE_GROUP else f"g{self.group_size}"
        parts = [f"{self.bits} bit", group, "sym" if self.sym else "asym"]
        if self.act_order:
            parts.append("act-order")
        return " ".join(parts)
