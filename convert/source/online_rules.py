"""What of ``online`` records a model has no place for, and what of them no kernel runs."""

from collections.abc import Iterator

from w4pack.convert.core.scheme import WIDE
from w4pack.convert.dialects.online import HEAD_SIZES, UNIT, Online, Settings, misfit
from w4pack.convert.errors import Refused, W4PackError
from w4pack.convert.rotate import orders
from w4pack.convert.source.online_places import GUIDE_DTYPE, Place, transform_of


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


def _either(sizes: set[int]) -> str:
    return " or ".join(map(str, sorted(sizes))) or "none"
