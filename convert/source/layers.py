"""One quantized linear of a source: its layout, scheme, zero points and order, read from its tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from w4pack.convert import formats
from w4pack.convert.core.dtypes import FLOAT_TAGS
from w4pack.convert.core.order import natural_group
from w4pack.convert.core.scheme import ONE_GROUP, QuantScheme
from w4pack.convert.dialects import ModuleClaim
from w4pack.convert.dialects import w4pack as w4pack_dialect
from w4pack.convert.errors import FROM_16_BIT, Refused, SourceError
from w4pack.convert.files.tensorfile import TensorInfo
from w4pack.convert.source import foreign, orders, zeros
from w4pack.convert.source.claims_check import compare_bits, compare_label, compare_order
from w4pack.convert.source.orders import ORDER_SUFFIXES, Order, group_of_act_perm
from w4pack.convert.source.reading import Reading

ZERO_SUFFIXES = {"gptq": "qzeros", "compressed-tensors": "weight_zero_point", "marlin": "weight_zero_point"}
PLAIN_ZERO_SUFFIX = "qzeros"
SAMPLE_ROWS = 1  # rows of a zero tensor that a sampled reading looks at


@dataclass(frozen=True, slots=True)
class SourceLayer:
    """One quantized linear of the source. ``tensors`` maps local suffixes to headers, the bias excluded."""

    name: str
    layout: str
    scheme: QuantScheme
    zeros: zeros.ZeroReading
    order: Order
    tensors: Mapping[str, TensorInfo]
    bias: TensorInfo | None

    @property
    def module(self) -> ModuleType:
        """The layout module that reads this layer."""
        return formats.get(self.layout)

    def small(self) -> dict[str, TensorInfo]:
        """Every tensor but the codes."""
        codes = self.module.grid(self.scheme.bits).suffix
        return {s: t for s, t in self.tensors.items() if s != codes}


def read_layer(name: str, local: Mapping[str, TensorInfo], read: Reading) -> SourceLayer:
    """Understand one quantized module, noting where the config disagrees. Raises SourceError or Refused."""
    layout, match = _match(name, local, read)
    stray = foreign.foreign_companions(layout, local)
    if stray:
        raise Refused(
            "a quantized layer has a tensor that w4pack does not know",
            code="unknown-companion",
            where=stray[0].name,
            found=f"{stray[0].dtype} {list(stray[0].shape)}",
            expected="only the tensors of its layout",
            hint="if another tool left it over, save the checkpoint without it",
        )
    match = _trim_tail(match, layout, local, read)
    claim = read.claim(name)
    compare_bits(name, match, claim, read)
    compare_label(name, layout, read)
    group = _read_order(name, local, match, read)
    size = _group_size(match, claim, group, name, read)
    if "act_perm" in local:
        perm = read.checkpoint.read(local["act_perm"].name)
        group = group_of_act_perm(perm, match.in_features, size, local["act_perm"].name)
    order = orders.classify(group, size, match.groups)
    scales = _scales(local)
    scheme = QuantScheme(
        match.bits, size, False, order.is_real, match.in_features, match.out_features, scales.dtype
    )
    reading = _read_zeros(name, layout, local, scheme, read)
    compare_order(name, order, claim, local, layout, read)
    if claim.sym is False and reading.sym:
        read.notes.warn(
            "sym-flag", name, "asymmetric, by the config", "every zero point at the midpoint; symmetric"
        )
    tensors = {s: t for s, t in local.items() if s != "bias"}
    return SourceLayer(
        name, layout, replace(scheme, sym=reading.sym), reading, order, tensors, local.get("bias")
    )


def _scales(local: Mapping[str, TensorInfo]) -> TensorInfo:
    """Return the tensor of scales. Raises Refused if it holds no numbers that layouts have scales of."""
    scales = next(t for s, t in local.items() if s in ("scales", "s", "weight_scale"))
    if scales.dtype not in FLOAT_TAGS:
        raise Refused(
            "scales are of a dtype that no layout has",
            code="scale-dtype",
            where=scales.name,
            expected=", ".join(FLOAT_TAGS),
            found=scales.dtype,
            hint=FROM_16_BIT,
        )
    return scales


def _match(name: str, local: Mapping[str, TensorInfo], read: Reading) -> tuple[str, formats.Match]:
    """Name the layout of a module from dtypes, shapes and the few values that decide.

    Raises SourceError or Refused.
    """
    shapes = {suffix: (info.dtype, info.shape) for suffix, info in local.items()}
    wanted = {suffix for suffixes in formats.DECIDING.values() for suffix in suffixes}
    values = {suffix: read.checkpoint.read(info.name) for suffix, info in local.items() if suffix in wanted}
    try:
        found = formats.recognise(shapes, values)
    except (SourceError, Refused) as err:
        err.where = f"{name}.{err.where}" if err.where else name
        raise
    if found is None:
        raise foreign.codes_missing(name, shapes) or foreign.unreadable(name, shapes)
    layout, match = found
    match = _bits_by_config(layout, match, local, read.claim(name).bits)
    if match.bits not in (4, 8):
        raise Refused(
            f"a layer has {match.bits} bit codes; w4pack handles 4 and 8",
            code="bits",
            where=name,
            expected="4 or 8 bit",
            found=f"{match.bits} bit",
            hint=FROM_16_BIT,
        )
    if layout == "marlin":
        match = _without_padding(name, match, local, read)
    return layout, match


def _bits_by_config(
    layout: str, match: formats.Match, local: Mapping[str, TensorInfo], claimed: int | None
) -> formats.Match:
    """Let the config decide between 4 and 8 bit where the codes of so few rows take one word either way."""
    if match.bits not in (4, 8) or claimed not in (4, 8) or claimed == match.bits:
        return match
    grid = formats.get(layout).grid(claimed)
    fits = grid.shape(match.in_features, match.out_features) == local[grid.suffix].shape
    return replace(match, bits=claimed) if fits else match


def _without_padding(
    name: str, match: formats.Match, local: Mapping[str, TensorInfo], read: Reading
) -> formats.Match:
    """Replace an artifact's stored sizes by the real ones, which its config lists for padded layers."""
    sizes = w4pack_dialect.sizes_of(read.quant_config, name) if read.quant_config else None
    if sizes is None:
        return match
    rows, cols = sizes[0], sizes[1]
    stored = (-(-rows // 64) * 64, -(-cols // 64) * 64)
    if stored[1] != match.out_features or ("act_perm" not in local and stored[0] != match.in_features):
        raise SourceError(
            "the config's sizes do not fit the packed tensor",
            code="shape-mismatch",
            where=name,
            expected=f"{rows} x {cols}, stored as {stored[0]} x {stored[1]}",
            found=f"{match.in_features} x {match.out_features}",
        )
    claimed = read.claim(name).group_size
    groups = 1 if not claimed or claimed == ONE_GROUP else -(-rows // claimed)
    return formats.Match(match.bits, rows, cols, groups)


def _trim_tail(
    match: formats.Match, layout: str, local: Mapping[str, TensorInfo], read: Reading
) -> formats.Match:
    """Drop rows that only fill the last word of a GPTQ layer whose ``g_idx`` is shorter: zero codes."""
    if layout != "gptq" or "g_idx" not in local:
        return match
    rows = local["g_idx"].shape[0] if len(local["g_idx"].shape) == 1 else match.in_features
    per = 32 // match.bits
    if not 0 < match.in_features - rows < per:
        return match
    info = local["qweight"]
    last = read.checkpoint.rect(info.name, slice(info.shape[0] - 1, info.shape[0]), slice(None)).view(
        np.uint32
    )
    if bool((last >> np.uint32((rows % per) * match.bits)).any()):
        raise SourceError(
            "`qweight` holds codes past the last input row",
            code="shape-mismatch",
            where=info.name,
            expected=f"{rows} rows",
            found=f"{match.in_features} rows, the last ones not zero",
        )
    return replace(match, in_features=rows)


def _group_size(
    match: formats.Match, claim: ModuleClaim, group: NDArray[np.int32] | None, name: str, read: Reading
) -> int:
    """Find the group size that explains the number of groups; the config's if it does."""
    rows, groups = match.in_features, match.groups
    claimed = claim.group_size
    if groups == 0:
        return _padded_group_size(match, claim, name)
    fits = claimed is not None and claimed > 0 and -(-rows // claimed) == groups
    if groups == 1:
        return claimed if fits and claimed == rows and claimed is not None else ONE_GROUP
    even = rows // groups if rows % groups == 0 else None
    if fits and claimed is not None:
        natural_even = (
            even is not None and group is not None and np.array_equal(group, natural_group(rows, even))
        )
        if not natural_even or even == claimed:
            return claimed
    counted = int(np.bincount(group, minlength=groups)[0]) if group is not None and even is None else None
    size = even or counted
    if size is None or -(-rows // size) != groups:
        raise SourceError(
            "the number of groups does not fit the number of input rows",
            code="group-size",
            where=name,
            expected=f"a group size g with ceil({rows} / g) == {groups}",
            found=f"group_size {claimed} in the config",
        )
    if claimed is not None and claimed != size:
        read.notes.warn("group-size", name, f"group_size {claimed}, by the config", f"{size}, by the tensors")
    return size


def _padded_group_size(match: formats.Match, claim: ModuleClaim, name: str) -> int:
    """Return the config's group size, where a layout pads its groups and so does not tell their number."""
    claimed = claim.group_size
    if claimed is None or claimed == 0 or (claimed > 0 and match.in_features % claimed):
        raise SourceError(
            "the group size of this layout stands only in the config",
            code="group-size",
            where=name,
            expected=f"a group_size that divides {match.in_features}",
            found=str(claimed),
        )
    return ONE_GROUP if claimed == match.in_features else claimed


def _read_order(
    name: str, local: Mapping[str, TensorInfo], match: formats.Match, read: Reading
) -> NDArray[np.int32] | None:
    for suffix in ORDER_SUFFIXES:
        if suffix in local:
            info = local[suffix]
            if info.dtype not in ("I32", "I64"):
                raise SourceError(
                    "`g_idx` is not an integer tensor",
                    code="g-idx-dtype",
                    where=info.name,
                    expected="I32",
                    found=info.dtype,
                )
            return orders.normalise(
                read.checkpoint.read(info.name), match.in_features, match.groups, info.name
            )
    return None


def _zero_tensor(layout: str, local: Mapping[str, TensorInfo]) -> TensorInfo | None:
    return local.get(ZERO_SUFFIXES.get(layout, PLAIN_ZERO_SUFFIX))


def _read_zeros(
    name: str, layout: str, local: Mapping[str, TensorInfo], scheme: QuantScheme, read: Reading
) -> zeros.ZeroReading:
    info = _zero_tensor(layout, local)
    if info is None:
        return zeros.ZeroReading("none", sym=True)
    claim = read.claim(name)
    ck, warn = read.checkpoint, read.notes.warn
    if layout == "gptq":
        raw = (
            ck.rect(info.name, slice(0, SAMPLE_ROWS), slice(None))
            if read.options.evidence != "all"
            else ck.read(info.name)
        )
        label = read.claims.zero_kind if read.claims else None
        if read.options.source_format:
            label = "v2" if read.options.source_format == "gptq_v2" else "v1"
        how = zeros.GptqZeros(scheme.bits, claim, read.claims, label, read.options.zero_reading, info.name)
        try:
            return zeros.read_gptq(raw, how, warn)
        except Refused as err:
            if err.code != zeros.AMBIGUOUS:
                raise
            read.problems.append(err)  # stops a conversion; questions go on, with the count of such fields
            return zeros.read_gptq(raw, replace(how, choice="word"), warn)
    if read.options.evidence != "all" and layout not in ("awq-gemv-fast", "awq-gemv", "marlin"):
        raw = ck.rect(info.name, slice(0, SAMPLE_ROWS), slice(None)).view(np.uint32)
        return zeros.ZeroReading("plain", sym=bool((raw == zeros.V2_MIDPOINT[scheme.bits]).all()))
    grid = formats.get(layout).grid(scheme.bits)
    tensors = {s: ck.read(t.name) for s, t in local.items() if s not in (grid.suffix, "bias")}
    asym = replace(scheme, sym=False, act_order=False)
    return zeros.read_plain(formats.get(layout), tensors, asym, claim, info.name, warn)
