"""What a checkpoint is: tensors first, config second, and every place where the two disagree.

Headers say which layout a linear has, its bits, its shape and its number of groups. Small *deciding tensors*
(``g_idx``, zero points) say whether it is symmetric and whether its rows are in order. The config is compared
with what was found; where it is contradicted, the tensors win and a warning says so.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from w4pack.convert import dialects, formats
from w4pack.convert.core.facts import DenseFacts, LayerFacts, ModelFacts, Warning_
from w4pack.convert.core.families import natural_key
from w4pack.convert.core.order import checked_perm, natural_group
from w4pack.convert.core.scheme import ONE_GROUP, QuantScheme
from w4pack.convert.dialects import Claims, ModuleClaim
from w4pack.convert.dialects import gptq as gptq_dialect
from w4pack.convert.dialects import w4pack as w4pack_dialect
from w4pack.convert.dialects.others import other_method
from w4pack.convert.errors import Refused, SourceError, W4PackError
from w4pack.convert.files.checkpoint import Checkpoint
from w4pack.convert.files.tensorfile import TensorInfo
from w4pack.convert.source import foreign, orders, zeros
from w4pack.convert.source.orders import Order

CODE_SUFFIXES = ("qweight", "B", "weight_packed")
COMPANION_SUFFIXES = (
    "qzeros",
    "g_idx",
    "weight_g_idx",
    "weight_zero_point",
    "weight_shape",
)  # never without codes
ORDER_SUFFIXES = ("g_idx", "weight_g_idx")
ZERO_SUFFIXES = {"gptq": "qzeros", "compressed-tensors": "weight_zero_point", "marlin": "weight_zero_point"}
PLAIN_ZERO_SUFFIX = "qzeros"
# Layouts that files of a method may have, and the one that an AWQ version names.
LABELLED = {
    "gptq": ("gptq", "marlin-legacy"),
    "awq": ("awq", "awq-gemv", "awq-gemv-fast", "awq-marlin"),
    "auto-round": ("gptq", "awq", "compressed-tensors"),
    "compressed-tensors": ("compressed-tensors",),
    "w4pack": ("marlin",),
}
AWQ_LABELS = {"gemm": "awq", "gemv": "awq-gemv", "gemv_fast": "awq-gemv-fast", "llm_awq": "awq-gemv-fast"}
NO_CLAIM = ModuleClaim()
Evidence = Literal["all", "sample"]
SAMPLE_ROWS = 1  # rows of a zero tensor that a sampled reading looks at


@dataclass(frozen=True, slots=True)
class DetectOptions:
    """What the user decided about the source.

    evidence      ``all``: every deciding tensor is read whole; ``sample``: every g_idx, a row of the zeros
    zero_reading  ``word`` or ``nibble``, where a v1 file is ambiguous
    source_format ``gptq`` or ``gptq_v2``, where no label says it
    ignore_keys   config keys whose effect on the forward pass the user takes upon himself
    """

    evidence: Evidence = "all"
    zero_reading: str | None = None
    source_format: str | None = None
    ignore_keys: tuple[str, ...] = ()


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


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint, understood. ``problems`` stop a conversion; `inspect` prints them."""

    checkpoint: Checkpoint
    claims: Claims | None
    quant_config: Mapping[str, Any] | None
    quant_file: str | None
    layers: tuple[SourceLayer, ...]
    dense: tuple[TensorInfo, ...]
    warnings: tuple[Warning_, ...]
    problems: tuple[W4PackError, ...]
    options: DetectOptions

    @property
    def config(self) -> Mapping[str, Any]:
        """The parsed config.json, or an empty mapping."""
        return self.checkpoint.config


class _Notes:
    """Collects disagreements and merges those of one kind: one line, a count and one example."""

    def __init__(self) -> None:
        self._found: dict[str, list[tuple[str, str, str]]] = defaultdict(list)

    def warn(self, code: str, where: str, expected: str, found: str) -> None:
        self._found[code].append((where, expected, found))

    def merged(self) -> tuple[Warning_, ...]:
        lines = []
        for code, items in self._found.items():
            where, expected, found = items[0]
            if len(items) > 1:
                where = f"{where} and {len(items) - 1} more"
            lines.append(Warning_(code, where, expected, found))
        return tuple(lines)


@dataclass(slots=True)
class _Reading:
    """State of one detection: what is known about the config, and what was found on the way."""

    checkpoint: Checkpoint
    options: DetectOptions
    claims: Claims | None
    quant_config: Mapping[str, Any] | None
    notes: _Notes = field(default_factory=_Notes)
    problems: list[W4PackError] = field(default_factory=list)

    def claim(self, name: str) -> ModuleClaim:
        if self.claims is None:
            return NO_CLAIM
        return self.claims.for_module(name) or NO_CLAIM


def quant_settings(checkpoint: Checkpoint, notes: _Notes) -> tuple[Mapping[str, Any] | None, str | None]:
    """Return the quantization settings an engine reads first, and the file they stand in."""
    found: list[tuple[str, Mapping[str, Any]]] = []
    config = checkpoint.config
    for key in ("quantization_config", "compression_config"):
        if isinstance(config.get(key), Mapping) and config[key]:
            found.append(("config.json", config[key]))
    found += [(name, settings) for name, settings in checkpoint.quant_files.items() if settings]
    from_header = gptq_dialect.from_metadata(checkpoint.metadata) if not found else None
    if from_header is not None:
        found.append(("the safetensors metadata", from_header))
    if not found:
        return None, None
    first_file, first = found[0]
    for other_file, other in found[1:]:
        for key in (
            "bits",
            "group_size",
            "sym",
            "desc_act",
            "checkpoint_format",
            "format",
            "zero_point",
            "version",
        ):
            if key in first and key in other and first[key] != other[key]:
                notes.warn(
                    "config-files-differ",
                    f"{first_file} and {other_file}: {key}",
                    repr(first[key]),
                    repr(other[key]),
                )
    return first, first_file


def group_tensors(tensors: Mapping[str, TensorInfo]) -> dict[str, dict[str, TensorInfo]]:
    """Group tensors by the module they belong to: module name -> local suffix -> header."""
    modules: dict[str, dict[str, TensorInfo]] = defaultdict(dict)
    for name, info in tensors.items():
        prefix, _, suffix = name.rpartition(".")
        modules[prefix][suffix] = info
    return modules


def _is_quantized(local: Mapping[str, TensorInfo]) -> bool:
    """Tell whether a module has tensors of a quantized linear, be it only some of them."""
    if any(suffix in local for suffix in (*CODE_SUFFIXES, *COMPANION_SUFFIXES)):
        return True
    return "weight" in local and local["weight"].dtype == "I32" and "weight_scale" in local


def _match(name: str, local: Mapping[str, TensorInfo], read: "_Reading") -> tuple[str, formats.Match]:
    """Name the layout of a module from dtypes, shapes and the few values that decide. Raises SourceError or Refused."""
    shapes = {suffix: (info.dtype, info.shape) for suffix, info in local.items()}
    wanted = {suffix for suffixes in formats.DECIDING.values() for suffix in suffixes}
    values = {suffix: read.checkpoint.read(info.name) for suffix, info in local.items() if suffix in wanted}
    try:
        found = formats.recognise(shapes, values)
    except SourceError as err:
        err.where = f"{name}.{err.where}" if err.where else name
        raise
    if found is None:
        raise foreign.codes_missing(name, shapes) or foreign.unreadable(name, shapes)
    layout, match = found
    if match.bits not in (4, 8):
        raise Refused(
            f"a layer has {match.bits} bit codes; w4pack handles 4 and 8",
            code="bits",
            where=name,
            expected="4 or 8 bit",
            found=f"{match.bits} bit",
        )
    if layout == "marlin":
        match = _without_padding(name, match, local, read)
    return layout, match


def _without_padding(
    name: str, match: formats.Match, local: Mapping[str, TensorInfo], read: "_Reading"
) -> formats.Match:
    """Replace an artifact's stored sizes by the real ones, which its config lists for padded layers."""
    sizes = w4pack_dialect.sizes(read.quant_config).get(name) if read.quant_config else None
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


def _group_size(
    match: formats.Match, claim: ModuleClaim, group: NDArray[np.int32] | None, name: str, read: _Reading
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
    """Return the group size of a layout that pads its groups and so does not tell their number: the config's."""
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
    name: str, local: Mapping[str, TensorInfo], match: formats.Match, read: _Reading
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


def group_of_act_perm(perm: NDArray[Any], in_features: int, group_size: int, where: str) -> NDArray[np.int32]:
    """Rebuild the group map of an artifact's layer: packed row r holds source row ``perm[r]`` of group r // g."""
    group = np.empty(in_features, np.int32)
    group[checked_perm(perm, in_features, where)] = natural_group(in_features, group_size)
    return group


def _zero_tensor(layout: str, local: Mapping[str, TensorInfo]) -> TensorInfo | None:
    return local.get(ZERO_SUFFIXES.get(layout, PLAIN_ZERO_SUFFIX))


def _read_zeros(
    name: str, layout: str, local: Mapping[str, TensorInfo], scheme: QuantScheme, read: _Reading
) -> zeros.ZeroReading:
    info = _zero_tensor(layout, local)
    if info is None:
        return zeros.ZeroReading("none", sym=True)
    claim = read.claim(name)
    ck, warn = read.checkpoint, read.notes.warn
    if layout == "gptq":
        raw = (
            ck.rect(info.name, slice(0, SAMPLE_ROWS), slice(None))
            if read.options.evidence == "sample"
            else ck.read(info.name)
        )
        label = read.claims.zero_kind if read.claims else None
        if read.options.source_format:
            label = "v2" if read.options.source_format == "gptq_v2" else "v1"
        return zeros.read_gptq(
            raw, scheme.bits, claim, read.claims, label, read.options.zero_reading, info.name, warn
        )
    if read.options.evidence == "sample" and layout not in ("awq-gemv-fast", "awq-gemv", "marlin"):
        raw = ck.rect(info.name, slice(0, SAMPLE_ROWS), slice(None)).view(np.uint32)
        return zeros.ZeroReading("plain", sym=bool((raw == zeros.V2_MIDPOINT[scheme.bits]).all()))
    grid = formats.get(layout).grid(scheme.bits)
    tensors = {s: ck.read(t.name) for s, t in local.items() if s not in (grid.suffix, "bias")}
    asym = replace(scheme, sym=False, act_order=False)
    return zeros.read_plain(formats.get(layout), tensors, asym, claim, info.name, warn)


def _trim_tail(
    match: formats.Match, layout: str, local: Mapping[str, TensorInfo], read: _Reading
) -> formats.Match:
    """Drop rows that only fill the last word of a GPTQ layer whose ``g_idx`` is shorter. They must be zero codes."""
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


def _read_layer(name: str, local: Mapping[str, TensorInfo], read: _Reading) -> SourceLayer:
    layout, match = _match(name, local, read)
    stray = foreign.foreign_companions(layout, local)
    if stray:
        raise Refused(
            "a quantized layer has a tensor that w4pack does not know",
            code="unknown-companion",
            where=stray[0].name,
            found=f"{stray[0].dtype} {list(stray[0].shape)}",
            expected="only the tensors of its layout",
        )
    match = _trim_tail(match, layout, local, read)
    claim = read.claim(name)
    _compare_bits(name, match, claim, read)
    _compare_label(name, layout, read)
    group = _read_order(name, local, match, read)
    size = _group_size(match, claim, group, name, read)
    if "act_perm" in local:
        perm = read.checkpoint.read(local["act_perm"].name)
        group = group_of_act_perm(perm, match.in_features, size, local["act_perm"].name)
    order = orders.classify(group, size, match.groups)
    scales = next(t for s, t in local.items() if s in ("scales", "s", "weight_scale"))
    scheme = QuantScheme(
        match.bits, size, False, order.is_real, match.in_features, match.out_features, scales.dtype
    )
    reading = _read_zeros(name, layout, local, scheme, read)
    _compare_order(name, order, claim, local, layout, read)
    if claim.sym is False and reading.sym:
        read.notes.warn(
            "sym-flag", name, "asymmetric, by the config", "every zero point at the midpoint; symmetric"
        )
    tensors = {s: t for s, t in local.items() if s != "bias"}
    return SourceLayer(
        name, layout, replace(scheme, sym=reading.sym), reading, order, tensors, local.get("bias")
    )


def _compare_bits(name: str, match: formats.Match, claim: ModuleClaim, read: _Reading) -> None:
    if claim.bits is not None and claim.bits != match.bits:
        read.notes.warn("bits", name, f"{claim.bits} bit, by the config", f"{match.bits} bit, by the tensors")
    if read.claims is not None and read.claims.for_module(name) is None:
        read.notes.warn("skipped-but-quantized", name, "not quantized, by the config", "quantized tensors")


def _compare_label(name: str, layout: str, read: _Reading) -> None:
    """Compare the layout with what the config calls it. Old files have no label; a missing one is no contradiction."""
    if read.claims is None:
        return
    wanted = LABELLED.get(read.claims.method, ())
    label = (read.claims.label or "").lower().replace("-", "_")
    exact = AWQ_LABELS.get(label) if read.claims.method == "awq" else None
    if (wanted and layout not in wanted) or (exact is not None and layout != exact):
        said = f"{read.claims.method} {read.claims.label or ''}".strip()
        read.notes.warn("layout-label", name, f"{said}, by the config", f"{layout}, by the tensors")


def _compare_order(
    name: str, order: Order, claim: ModuleClaim, local: Mapping[str, TensorInfo], layout: str, read: _Reading
) -> None:
    """Compare the map with ``desc_act``; refuse a map that is announced and missing."""
    has_map = any(s in local for s in ORDER_SUFFIXES) or "act_perm" in local
    if (
        claim.desc_act
        and not has_map
        and layout == "gptq"
        and claim.group_size != ONE_GROUP
        and (read.claims is None or read.claims.writes_g_idx)
    ):
        if read.claims is not None and -(-order_rows(local) // max(claim.group_size or 1, 1)) == 1:
            return
        raise SourceError(
            "the order of the input rows is missing",
            code="g-idx-missing",
            where=f"{name}.g_idx",
            expected="a `g_idx` tensor, as `desc_act` is true",
            found="none",
        )
    if claim.desc_act and has_map and not order.is_real and layout != "marlin":
        read.notes.warn(
            "order-flag",
            name,
            "act-order, as `desc_act` is true",
            "rows in natural order; the label is dropped",
        )
    if claim.desc_act is False and order.is_real:
        read.notes.warn(
            "order-flag-false",
            name,
            "natural order, as `desc_act` is false",
            "a real permutation in g_idx; kept. vLLM and SGLang drop it without a word",
        )


def order_rows(local: Mapping[str, TensorInfo]) -> int:
    """Rows of K that a GPTQ ``qweight`` can hold at 4 bit."""
    return local["qweight"].shape[0] * 8 if "qweight" in local else 0


def _config_problems(
    claims: Claims | None, options: DetectOptions, quant_file: str | None
) -> Iterable[W4PackError]:
    if claims is None:
        return
    if claims.unsupported:
        yield Refused(claims.unsupported, code="method-unknown", where=quant_file)
    for key, value in claims.refusals:
        if key in options.ignore_keys or key.rpartition(".")[2] in options.ignore_keys:
            continue
        yield Refused(
            f"the config says `{key}`, which changes what the model computes",
            code="forward-changing",
            where=f"{quant_file}: {key}",
            expected="absent or empty",
            found=value,
            hint=f"`--ignore-key {key}` converts the stored weights as they are; the result is another model unless the key has no effect",
        )


def _unknown_method(quant_config: Mapping[str, Any], quant_file: str | None) -> W4PackError:
    return Refused(
        "the checkpoint is quantized with a method that w4pack does not read",
        code="method-unknown",
        where=f"{quant_file}: quant_method",
        expected=", ".join(dialects.DIALECTS),
        found=f"{quant_config.get('quant_method')} ({other_method(quant_config) or 'no method'})",
    )


def read_source(checkpoint: Checkpoint, options: DetectOptions) -> Source:
    """Understand a checkpoint. Problems are collected, not raised, except for files that cannot be read at all."""
    notes = _Notes()
    quant_config, quant_file = quant_settings(checkpoint, notes)
    dialect = dialects.find_dialect(quant_config) if quant_config else None
    claims = dialect.claims(quant_config, checkpoint.config) if dialect and quant_config else None
    read = _Reading(checkpoint, options, claims, quant_config, notes)
    read.problems.extend(_config_problems(claims, options, quant_file))
    if quant_config and dialect is None:
        read.problems.append(_unknown_method(quant_config, quant_file))
    layers: list[SourceLayer] = []
    taken: set[str] = set()
    for name, local in sorted(
        group_tensors(checkpoint.tensors).items(), key=lambda item: natural_key(item[0])
    ):
        try:
            if _is_quantized(local):
                layers.append(_read_layer(name, local, read))
                taken.update(info.name for info in local.values())
            else:
                problem = foreign.foreign_weight(name, local)
                if problem is not None:
                    read.problems.append(problem)
        except W4PackError as err:
            read.problems.append(err)
    if layers and quant_config is None:
        notes.warn(
            "no-config",
            "config.json",
            "a quantization config",
            "none; bits, groups and zero points are read from the tensors",
        )
    dense = tuple(
        info
        for name, info in sorted(checkpoint.tensors.items(), key=lambda i: natural_key(i[0]))
        if name not in taken
    )
    for key, value in claims.dropped if claims else ():
        notes.warn(
            "config-key",
            f"{quant_file}: {key}",
            "a key w4pack knows",
            f"{value}; it has no effect on the weights and is not carried over",
        )
    warnings = (*checkpoint.notices, *notes.merged())
    return Source(
        checkpoint,
        claims,
        quant_config,
        quant_file,
        tuple(layers),
        dense,
        warnings,
        tuple(read.problems),
        options,
    )


def _stored_size(layer: SourceLayer) -> tuple[int, int]:
    """Return the rows and columns that a layer's codes tensor has room for: more than the real ones if it is padded."""
    grid = layer.module.grid(layer.scheme.bits)
    shape = layer.tensors[grid.suffix].shape
    k, n = (shape[0], shape[1]) if grid.k_axis == 0 else (shape[1], shape[0])
    return k // grid.k_elems * grid.k_unit, n // grid.n_elems * grid.n_unit


def layer_facts(layer: SourceLayer) -> LayerFacts:
    """Describe one source layer."""
    scheme, stored = layer.scheme, _stored_size(layer)
    return LayerFacts(
        name=layer.name,
        layout=layer.layout,
        bits=scheme.bits,
        group_size=scheme.group_size,
        sym=scheme.sym,
        act_order="groups" if layer.order.kind == "uneven" else layer.order.kind,
        in_features=scheme.in_features,
        out_features=scheme.out_features,
        stored_in=stored[0],
        stored_out=stored[1],
        scale_dtype=scheme.scale_dtype,
        bias=layer.bias is not None,
        zero_kind=layer.zeros.kind,
        ambiguous_zeros=layer.zeros.ambiguous,
    )


def source_facts(source: Source) -> ModelFacts:
    """Describe the whole source in the form that `inspect` prints and `check` judges."""
    ck = source.checkpoint
    return ModelFacts(
        config=source.config,
        quant_config=source.quant_config,
        quant_file=source.quant_file,
        layers=tuple(layer_facts(layer) for layer in source.layers),
        dense=tuple(DenseFacts(t.name, t.dtype, t.shape) for t in source.dense),
        evidence=source.options.evidence,
        bytes_read=ck.store.bytes_read,
        total_bytes=sum(t.nbytes for t in ck.tensors.values()),
        files=tuple(ck.store.files()),
        weight_files=tuple(ck.weight_files),
        warnings=source.warnings,
    )
