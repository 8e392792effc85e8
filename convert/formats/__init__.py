"""Tensor layouts of a quantized linear: one small module each, imported when first asked for.

A layout is two things: a *grid* (which 2-D tensor holds the codes, and how K and N run over its axes) and
a handful of functions, the same in every module:

``grid(bits) -> Grid``
    where the codes lie
``unpack(block, bits, out=None) -> words``
    stored block -> canonical words (see quantlinear); a view of the block if the layout is the canonical one
``pack(words, bits, out=None) -> block``
    the inverse; bytes are deterministic
``specs(scheme) -> {suffix: (dtype, shape)}``
    every tensor of a linear of that scheme, codes included
``decode_params(tensors, scheme, zero_kind) -> GroupParams``
    the small tensors, whole
``encode_params(params, scheme) -> {suffix: array}``
    the inverse; all of ``specs`` but the codes
``limits(scheme) -> Obstacle | None``
    why this layout cannot hold the scheme
``match(tensors, values=None) -> Match | None``
    do these {suffix: (dtype, shape)} have this layout; ``values``: the tensors of ``DECIDING`` that were read
``SUFFIXES``
    every tensor a linear may have, its bias aside

The artifact stores rows sorted by group and has ``row_order(tensors, scheme)`` besides. Where K is no
multiple of the codes in a word, the fields past the last row are zero, and ``pack`` returns whole words.

No layout imports another (what two share is here, in ``tiled`` and in ``transposed``); none reads files.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from types import ModuleType
from typing import Any

from numpy.typing import NDArray

from w4pack.convert.core.scheme import ONE_GROUP, QuantScheme
from w4pack.convert.errors import SourceError

Header = tuple[str, tuple[int, ...]]  # dtype tag and shape of a tensor

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

# Order of the tests: at K = 256, g = 32 the shapes of gemv satisfy GPTQ's test too, so gemv is asked first.
DETECTION_ORDER = (
    "awq-gemv-fast",
    "awq-gemv",
    "gptq",
    "awq",
    "awq-marlin",
    "compressed-tensors",
    "marlin-legacy",
    "marlin",
)

# Layouts that are written for use elsewhere, in the order of suggestion; ``dense`` is no layout.
TARGETS = ("marlin", "gptq", "awq", "compressed-tensors", "marlin-legacy")

# Small tensors whose values, not only headers, ``match`` needs.
DECIDING: dict[str, tuple[str, ...]] = {"compressed-tensors": ("weight_shape",)}


@dataclass(frozen=True, slots=True)
class Grid:
    """The 2-D tensor that holds the codes.

    Along its axes run K and N; ``k_unit`` codes of K take ``k_elems`` elements of the K axis, ``n_unit``
    codes of N take ``n_elems`` elements of the N axis. Blocks start and end at multiples of the units (the
    last block may be short where the layout packs a ragged tail).
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
    """Why a layout cannot hold a scheme: the rule with its numbers, and the targets that can.

    ``is_shape``: the layer's shape is the obstacle, so that this layer alone can be left in 16 bit; otherwise
    (bits, zero points, order) the conversion is refused.
    """

    rule: str
    expected: str
    found: str
    targets: tuple[str, ...] = ()
    is_shape: bool = False


@dataclass(frozen=True, slots=True)
class Match:
    """What the headers of one layer say. A ``bits`` other than 4 and 8 is for the caller to refuse.

    in_features   K; rows in the file where nothing tells K apart from them
    groups        G, or 0: the file pads groups and does not say
    """

    bits: int
    in_features: int
    out_features: int
    groups: int


def get(name: str) -> ModuleType:
    """Import and return the module of layout ``name``. Raises KeyError for an unknown one."""
    return import_module(f"{__name__}.{FORMATS[name][0]}")


def recognise(
    tensors: Mapping[str, Header], values: Mapping[str, NDArray[Any]] | None = None
) -> tuple[str, Match] | None:
    """Return the layout of a layer and what its headers say; None if no layout claims it.

    Raises SourceError, naming the suffix, if the tensors resemble a layout and contradict each other.
    """
    for name in DETECTION_ORDER:
        found: Match | None = get(name).match(tensors, values)
        if found is not None:
            return name, found
    qweight, scales = tensors.get("qweight"), tensors.get("scales")
    if qweight is not None and scales is not None and qweight[0] in ("I32", "I16"):
        raise mismatch("qweight", f"a shape that goes with scales {list(scales[1])}", f"{list(qweight[1])}")
    return None


def obstacle(name: str, scheme: QuantScheme) -> Obstacle | None:
    """Return what ``limits`` of layout ``name`` says, and the targets that can hold the scheme."""
    found: Obstacle | None = get(name).limits(scheme)
    if found is None:
        return None
    able = tuple(name for name in TARGETS if get(name).limits(scheme) is None)
    return replace(found, targets=(*able, "dense"))


def mismatch(suffix: str, expected: str, found: str) -> SourceError:
    """Return the error for a tensor that contradicts its companions; the caller adds the layer."""
    return SourceError(
        f"`{suffix}` does not fit the other tensors of its layer",
        code="shape-mismatch",
        where=suffix,
        expected=expected,
        found=found,
    )


def header_of(tensors: Mapping[str, Header], suffix: str) -> Header:
    """Return the header of a tensor the layout cannot do without. Raises SourceError if it is missing."""
    header = tensors.get(suffix)
    if header is None:
        raise SourceError(
            f"`{suffix}` is missing",
            code="missing-tensor",
            where=suffix,
            expected=f"`{suffix}` beside {', '.join(f'`{name}`' for name in sorted(tensors))}",
        )
    return header


def require_shape(tensors: Mapping[str, Header], suffix: str, shape: tuple[int, ...]) -> None:
    """Raise SourceError unless the tensor is there and has ``shape``."""
    found = header_of(tensors, suffix)[1]
    if tuple(found) != shape:
        raise mismatch(suffix, f"{list(shape)}", f"{list(found)}")


def fitting(tensors: Mapping[str, NDArray[Any]], suffix: str, shape: tuple[int, ...]) -> NDArray[Any]:
    """Return the array of a small tensor. Raises SourceError unless it is there and has ``shape``."""
    array = tensors.get(suffix)
    if array is None:
        raise SourceError(f"`{suffix}` is missing", code="missing-tensor", where=suffix)
    if array.shape != shape:
        raise mismatch(suffix, f"{list(shape)}", f"{list(array.shape)}")
    return array


def vector_groups(scheme: QuantScheme) -> int:
    """Return the groups that gemv and gemv_fast store: whole words of eight, and 1, 2 or 4 words together.

    autoawq 0.2.9, modules/linear/gemv.py: calculate_zeros_width. One word for group sizes from 128, two for
    64, four for 32.
    """
    size = scheme.in_features if scheme.group_size == ONE_GROUP else scheme.group_size
    unit = 8 * (1 if size >= 128 else 2 if size >= 64 else 4)
    return -(-scheme.groups // unit) * unit


def bits_limit(name: str, scheme: QuantScheme, allowed: tuple[int, ...]) -> Obstacle | None:
    """Return the obstacle of a layout that has ``allowed`` bits only."""
    if scheme.bits in allowed:
        return None
    bits = " or ".join(str(b) for b in allowed)
    return Obstacle(f"{name} holds {bits} bit codes", f"{bits} bit", f"{scheme.bits} bit")


def order_limit(name: str, scheme: QuantScheme) -> Obstacle | None:
    """Return the obstacle of a layout that has no place for a group map."""
    if not scheme.act_order:
        return None
    return Obstacle(f"{name} carries no activation order", "rows in the order of their groups", "act-order")


def division_limit(name: str, scheme: QuantScheme) -> Obstacle | None:
    """Return the obstacle of a layout whose last group may not be short."""
    if scheme.group_size == -1 or scheme.in_features % scheme.group_size == 0:
        return None
    return Obstacle(
        f"the group size of {name} divides in_features",
        f"a multiple of {scheme.group_size}",
        f"in_features {scheme.in_features}",
        is_shape=True,
    )


def multiple_limit(name: str, axis: str, size: int, unit: int) -> Obstacle | None:
    """Return the obstacle of a layout that packs whole units along ``axis``."""
    if size % unit == 0:
        return None
    rule = f"{name} packs {axis} in units of {unit}"
    return Obstacle(rule, f"a multiple of {unit}", f"{axis} {size}", is_shape=True)


def symmetry_limit(name: str, scheme: QuantScheme) -> Obstacle | None:
    """Return the obstacle of a layout that has no zero points."""
    if scheme.sym:
        return None
    return Obstacle(f"{name} carries no zero points", "symmetric", "asymmetric")


def group_limit(name: str, scheme: QuantScheme, sizes: tuple[int, ...]) -> Obstacle | None:
    """Return the obstacle of a layout whose kernels exist for some group sizes only; -1 is one group."""
    if scheme.group_size in sizes:
        return None
    expected = ", ".join(str(size) for size in sizes)
    return Obstacle(
        f"{name} has kernels for these group sizes only", expected, f"group_size {scheme.group_size}"
    )


def first(*found: Obstacle | None) -> Obstacle | None:
    """Return the first obstacle that is one."""
    return next((obstacle for obstacle in found if obstacle is not None), None)
