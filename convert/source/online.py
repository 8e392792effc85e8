"""Whether a model has a place for all that its ``online`` records say: loader, `eval` and `check` ask here.

Names and widths are enough: nothing but headers is read, and the beginning of the manifest.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from w4pack.convert.core.facts import DenseFacts, ModelFacts, Warning_
from w4pack.convert.core.scheme import WIDE
from w4pack.convert.dialects.online import (
    CHANGED,
    HEAD_SIZES,
    UNIT,
    Online,
    Settings,
    misfit,
    parse,
)
from w4pack.convert.dialects.recorded import changed
from w4pack.convert.errors import Refused, W4PackError
from w4pack.convert.files.described import manifest_head
from w4pack.convert.files.tensorfile import TensorInfo
from w4pack.convert.rotate import orders
from w4pack.convert.rotate.accounting import Layer, layers_of
from w4pack.convert.rotate.architecture import Architecture, find
from w4pack.convert.source.detect import Source


@dataclass(frozen=True, slots=True)
class Linear:
    """What records touch of a linear.

    width  features that it reads
    odd    what no integer product takes, ``act-order`` or ``zero points``; "" for neither, and in 16 bit
    """

    width: int
    odd: str = ""

    @staticmethod
    def packed(width: int, *, sym: bool, act_order: bool) -> "Linear":
        """Return a packed linear."""
        return Linear(width, "act-order" if act_order else "" if sym else "zero points")


@dataclass(frozen=True, slots=True)
class Place:
    """A model by the description of its class: its decoder layers, by names of the file.

    guides  name of each layer's guide of keys -> (dtype, shape); None where there is none
    """

    architecture: Architecture
    layers: tuple[Layer, ...]
    linears: Mapping[str, Linear]
    heads: int
    kv_heads: int
    guides: Mapping[str, tuple[str, tuple[int, ...]] | None]

    @property
    def sites(self) -> dict[str, str]:
        """Linear -> site of its input."""
        return sites_of(self.layers)

    @property
    def head_sizes(self) -> set[int]:
        """Lengths of the value heads, from what reads them: no key of a config says it for every model."""
        return {width // self.heads for width in self.widths("attn_out")}

    def widths(self, *sites: str) -> set[int]:
        """Return how many features the linears of some sites read."""
        found = [name for name, site in self.sites.items() if site in sites]
        return {self.linears[name].width for name in found if name in self.linears}


def sites_of(layers: Iterable[Layer]) -> dict[str, str]:
    """Return linear -> site of its input, for every linear of the decoder layers."""
    found: dict[str, str] = {}
    for layer in layers:
        found.update(dict.fromkeys(layer.attention.readers, "attn_in"))
        found.update(dict.fromkeys(layer.attention.writers, "attn_out"))
        found.update(dict.fromkeys(layer.mlp.readers, "mlp_in"))
        found.update(dict.fromkeys(layer.mlp.writers, "mlp_mid"))
    return found


def refuse_architecture(architecture: Architecture) -> None:
    """Raise Refused for a class that no runtime of ``online`` records runs."""
    reason = "LayerNorm, which subtracts a mean" if architecture.norm == "layer" else ""
    if architecture.latents:
        reason = "attention through latent vectors"
    if reason:
        raise Refused(
            "the runtime of 4-bit activations does not run this architecture",
            code="online-architecture",
            where="config.json: architectures",
            expected="RMSNorm, and keys and values in heads of their own",
            found=f"{architecture.classes[0]}: {reason}",
            hint="`--rotate offline` and weights in 4 bit alone run",
        )


TRANSFORM_OF = {
    "attn_in": "residual_read",
    "mlp_in": "residual_read",
    "attn_out": "attn_out",
    "mlp_mid": "mlp_mid",
}
GUIDE, GUIDE_DTYPE = "k_guide", "F32"


def guide_of(layer: Layer) -> str:
    """Return the name of the guide of a layer's keys: a tensor of its attention."""
    return f"{layer.attention.writers[0].rpartition('.')[0]}.{GUIDE}"


def place(
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo | DenseFacts | None],
    linears: Mapping[str, Linear],
) -> Place:
    """Find the places of a model that records speak of.

    tensors  all tensors of the files by name; a packed linear counts by its ``weight``
    linears  by name, packed or not

    Raises Refused for a class without description or runtime, SourceError for modules that are missing.
    """
    try:
        architecture = find(config)
        layers = layers_of(architecture, config, tensors)
    except W4PackError as err:  # it had its place when the records were made
        for problem in (err, *err.problems):
            problem.hint = CHANGED
        raise
    refuse_architecture(architecture)
    heads = config.get("num_attention_heads")
    if type(heads) is not int or heads < 1:
        raise misfit("attn_out", "a number of heads in config.json: num_attention_heads", heads)
    kv_heads = config.get("num_key_value_heads") or heads
    found = {guide_of(layer): tensors.get(guide_of(layer)) for layer in layers}
    guides = {name: None if info is None else (info.dtype, tuple(info.shape)) for name, info in found.items()}
    return Place(architecture, layers, linears, heads, kv_heads, guides)


def misfits(records: Online, at: Place) -> Iterator[W4PackError]:
    """Yield what a model has no place for, whatever bits are chosen: it would run as another model."""
    wanted = {
        "residual_read": at.widths("attn_in", "mlp_in"),
        "qk": at.head_sizes,
        "attn_out": {at.heads},
        "mlp_mid": at.widths("mlp_mid"),
    }
    for record in records.hadamard:
        sizes = wanted[record.site]
        if record.order not in sizes or (record.site == "qk" and len(sizes) > 1):
            yield misfit(record.site, _either(sizes), record.order)
        for order, construction in record.factors:
            if not orders.exists(order, construction):
                yield misfit(
                    record.site, f"a construction of order {order}", f"{construction} of order {order}"
                )
    if records.kv is not None and {records.kv.group} != at.head_sizes:
        yield misfit("kv_quant", f"head size {_either(at.head_sizes)}", records.kv.group)
    if records.kv is not None and records.kv.guide:
        shape = (2, at.kv_heads, records.kv.group)
        for name, found in at.guides.items():
            if found is None or found[1] != shape:
                other = "no such tensor" if found is None else list(found[1])
                yield misfit(f"kv_quant, {name}", f"{name} {list(shape)}", other)
            elif found[0] != GUIDE_DTYPE:
                yield misfit(f"kv_quant, {name}", f"{name} {GUIDE_DTYPE}", found[0])
    else:
        stray = [name for name, found in at.guides.items() if found is not None]
        if stray:
            yield misfit("kv_quant", f"guide: true, as there is {stray[0]}", "no guide")


def without_kernel(records: Online, settings: Settings, at: Place) -> Iterator[W4PackError]:
    """Yield what no kernel runs at these bits: head sizes of the cache, weights of products, widths."""
    for size in sorted(at.head_sizes if settings.kv_bits != WIDE else ()):
        if size not in HEAD_SIZES:
            yield Refused(
                "no quantized cache for this head size",
                code="head-size",
                where="config.json: head_dim",
                expected=", ".join(map(str, HEAD_SIZES)),
                found=str(size),
                hint="--kv-bits 16",
            )
    for name in at.sites:
        odd = at.linears[name].odd if settings.act_bits != WIDE else ""
        if odd:
            yield Refused(
                "4-bit and 8-bit activations are multiplied with symmetric weights in order only",
                code="act-bits",
                where=name,
                expected="symmetric, without act-order",
                found=odd,
                hint="--act-bits 16",
            )
    yield from _odd_widths(records, settings, at)


def _odd_widths(records: Online, settings: Settings, at: Place) -> Iterator[W4PackError]:
    """Yield each width that the kernels in front of linears do not read, by the first linear that has it."""
    seen: set[tuple[str, int]] = set()
    for name, site in at.sites.items():
        if name not in at.linears:  # experts in one tensor, which no kernel reads
            continue
        width = at.linears[name].width
        turned = records.transform(*transform_of(site, width)) is not None
        coded = settings.act_bits != WIDE and site in records.acts
        if width % UNIT == 0 or not (turned or coded) or (site, width) in seen:
            continue
        seen.add((site, width))
        again = "convert the 16-bit model again with --rotate offline and --act-bits 16"
        yield Refused(
            "no kernel transforms or quantizes rows of this width",
            code="online-width",
            where=name,
            expected=f"a multiple of {UNIT} input features",
            found=str(width),
            hint=again if turned else "--act-bits 16",
        )


def transform_of(site: str, width: int) -> tuple[str, int | None]:
    """Return (site, order) of the transform in front of a linear that reads ``width`` features of a site.

    The order is None across heads: it is their number.
    """
    return TRANSFORM_OF[site], None if site == "attn_out" else width


def _either(sizes: set[int]) -> str:
    return " or ".join(map(str, sorted(sizes))) or "none"


def problems_of(source: Source) -> tuple[W4PackError, ...]:
    """Return what stops w4pack's loader from running the records of an artifact as they were calibrated."""
    tensors = dict(source.checkpoint.tensors)
    found = _problems(records_of(source), source.config, tensors, _linears(source))
    return found or tuple(unlike_written(source))


def unlike_written(source: Source) -> Iterator[W4PackError]:
    """Yield what says that an artifact's records are not those that were written: its manifest, or guides.

    Its block may be gone too. Nothing of a block that is not known: that is a problem of the source.
    """
    if source.claims is not None and source.claims.refusals:
        return
    records, label = records_of(source), source.checkpoint.label
    problems = tuple(changed(records, manifest_head(source.checkpoint.store), label))
    yield from problems
    if problems or records or not any(layer.layout == "marlin" for layer in source.layers):
        return
    stray = next((name for name in source.checkpoint.tensors if name.endswith(f".{GUIDE}")), None)
    if stray is not None:
        yield misfit("kv_quant", f"a record, as there is {stray}", "none")


def planned_problems(facts: ModelFacts) -> tuple[W4PackError, ...]:
    """Return the same of an artifact that is only planned."""
    records = parse((facts.quant_config or {}).get("online", []))
    linears = plain(facts.dense)
    for layer in facts.layers:
        act_order = layer.act_order == "groups"
        linears[layer.name] = Linear.packed(layer.in_features, sym=layer.sym, act_order=act_order)
    tensors: dict[str, TensorInfo | DenseFacts | None] = {t.name: t for t in facts.dense}
    tensors |= {f"{layer.name}.weight": None for layer in facts.layers}
    return _problems(records, facts.config, tensors, linears)


def misplaced(source: Source) -> tuple[W4PackError, ...]:
    """Return what would let the records of an artifact compute another model, whatever bits are chosen."""
    records = records_of(source)
    if not records:
        return ()
    try:
        return tuple(misfits(records, place(source.config, source.checkpoint.tensors, _linears(source))))
    except W4PackError as err:
        return err.problems or (err,)


def _problems(
    records: Online,
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo | DenseFacts | None],
    linears: Mapping[str, Linear],
) -> tuple[W4PackError, ...]:
    if not records:
        return ()
    try:
        settings = records.settings()
        at = place(config, tensors, linears)
    except W4PackError as err:
        return err.problems or (err,)
    return (*misfits(records, at), *without_kernel(records, settings, at))


def shown(problems: Iterable[W4PackError]) -> tuple[Warning_, ...]:
    """Return problems as facts of a model (``ModelFacts.unfit``)."""
    return tuple(
        Warning_(p.code, p.where or "", p.expected or p.what, p.found or "", p.hint) for p in problems
    )


def records_of(source: Source) -> Online:
    """Return the records of an artifact; none for another checkpoint, and none where some are not known."""
    own = source.claims is not None and source.claims.method == "w4pack"
    if not own or (source.claims is not None and source.claims.refusals):
        return Online()
    return parse((source.quant_config or {}).get("online", []))


def _linears(source: Source) -> dict[str, Linear]:
    found = plain(source.dense)
    for layer in source.layers:  # by tensors, as the loader sees it: whatever values are in them
        sym, act_order = "weight_zero_point" not in layer.tensors, "act_perm" in layer.tensors
        found[layer.name] = Linear.packed(layer.scheme.in_features, sym=sym, act_order=act_order)
    return found


def plain(tensors: Iterable[TensorInfo | DenseFacts]) -> dict[str, Linear]:
    """Return the linears in 16 bit among some tensors."""
    weights = [t for t in tensors if t.name.endswith(".weight") and len(t.shape) == 2]
    return {t.name.removesuffix(".weight"): Linear(t.shape[1]) for t in weights}
