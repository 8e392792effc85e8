"""Tensor layouts of a quantized linear: one small module each, imported when first asked for.

A layout is two things: a *grid* (which 2-D tensor holds the codes, and how K and N run over its axes) and
a handful of functions, the same in every module:

``grid(bits) -> Grid``                              where the codes lie
``unpack(block, bits) -> words``                    stored block -> canonical words (see quantlinear)
``pack(words, bits) -> block``                      the inverse; bytes are deterministic
``specs(scheme) -> {suffix: (dtype, shape)}``       every tensor written for a linear of that scheme, codes included
``decode_params(tensors, scheme, zero_kind) -> GroupParams``   the small tensors, whole
``encode_params(params, scheme) -> {suffix: array}``           the inverse; all of ``specs`` but the codes
``obstacle(scheme) -> Obstacle | None``             why this layout cannot hold the scheme, and what could

No layout imports another; none reads files.
"""

from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

FORMATS: dict[str, tuple[str, str]] = {
    "gptq": ("gptq", "GPTQ: qweight packed along K, qzeros packed along N"),
    "awq": ("awq_gemm", "AWQ gemm: qweight and qzeros packed along N, interleaved"),
    "awq-gemv": ("awq_gemv", "AWQ gemv: packed along K, one row per output"),
    "awq-gemv-fast": ("awq_gemv_fast", "AWQ gemv_fast: int16, four outputs interleaved, float zeros"),
    "awq-marlin": ("awq_marlin", "AWQ marlin: Marlin tiles under the name qweight, symmetric"),
    "compressed-tensors": ("compressed_tensors", "compressed-tensors pack-quantized"),
    "marlin-legacy": ("marlin_legacy", "legacy Marlin: B and s, symmetric, group 128 or -1"),
    "marlin": ("marlin", "w4pack artifact: Marlin tiles, grouped scale order"),
}


@dataclass(frozen=True, slots=True)
class Grid:
    """The 2-D tensor that holds the codes.

    Along its axes run K and N; ``k_unit`` codes of K take ``k_elems`` elements of the K axis, ``n_unit`` codes
    of N take ``n_elems`` elements of the N axis. Blocks start and end at multiples of the units (the last
    block may be short where the layout packs a ragged tail).
    """

    suffix: str
    dtype: str
    k_axis: int
    k_unit: int
    k_elems: int
    n_unit: int
    n_elems: int

    def shape(self, in_features: int, out_features: int) -> tuple[int, int]:
        """Stored shape for K x N codes; a ragged tail is rounded up to a whole unit."""
        k = -(-in_features // self.k_unit) * self.k_elems
        n = -(-out_features // self.n_unit) * self.n_elems
        return (k, n) if self.k_axis == 0 else (n, k)


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why a layout cannot hold a scheme: the rule with its numbers, and the targets that can."""

    rule: str
    expected: str
    found: str
    targets: tuple[str, ...] = ()


def get(name: str) -> ModuleType:
    """Import and return the module of layout ``name``. Raises KeyError for an unknown one."""
    return import_module(f"{__name__}.{FORMATS[name][0]}")
