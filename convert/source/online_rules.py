"""What of ``online`` records a model has no place for, and what of them no kernel runs."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from w4pack.convert.core.families import expert_index
from w4pack.convert.core.scheme import WIDE
from w4pack.convert.dialects.online import (
    HEAD_SIZES,
    MOST_K,
    MOST_ORDER,
    UNIT,
    Online,
    Settings,
    misfit,
)
from w4pack.convert.errors import Refused, W4PackError
from w4pack.convert.formats import marlin
from w4pack.convert.rotate import orders
from w4pack.convert.source.online_places import GUIDE_DTYPE, Linear, Place, transform_of

RUN_ALL_THE_SAME = ("head-size",)  # codes of what runs with a cache in 16 bit: a conversion only warns


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
    """Yield what no kernel runs at these bits: head sizes of the cache, weights, widths, experts."""
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
        odd = at.linears[name].odd if settings.act_bits != WIDE and name in at.linears else ""
        if odd:
            yield Refused(
                "4-bit and 8-bit activations are multiplied with symmetric weights in order only",
                code="act-bits",
                where=name,
                expected="symmetric, without act-order",
                found=odd,
                hint="--act-bits 16",
            )
    inputs = tuple(_inputs(records, settings, at))
    yield from _odd_widths(inputs)
    yield from _plain_experts(inputs)


@dataclass(frozen=True, slots=True)
class _Input:
    """What happens to the input of a linear: transformed, quantized; ``linear`` None: many in one tensor."""

    name: str
    site: str
    linear: Linear | None
    turned: bool
    coded: bool

    @property
    def way(self) -> str:
        """What runs instead."""
        again = "made of the 16-bit model with --rotate offline and --act-bits 16 it needs none"
        return again if self.turned else "--act-bits 16"


def _inputs(records: Online, settings: Settings, at: Place) -> Iterator[_Input]:
    """Yield the linears whose input is not taken as it is."""
    for name, site in at.sites.items():
        linear = at.linears.get(name)
        turned = records.transform(*transform_of(site, linear.width if linear else 0)) is not None
        coded = settings.act_bits != WIDE and site in records.acts
        if turned or coded:
            yield _Input(name, site, linear, turned, coded)


def _odd_widths(inputs: Iterable[_Input]) -> Iterator[W4PackError]:
    """Yield each width that no kernel reads, by the first linear that has it.

    Transforms and quantizers read units of values. A transform has a largest order, and a product of codes a
    largest number of rows, padding included, that its sums hold.
    """
    seen: set[tuple[str, int]] = set()
    for one in inputs:
        if one.linear is None or (one.site, one.linear.width) in seen:
            continue
        width, most = one.linear.width, _most(one, one.linear)
        if width % UNIT == 0 and width <= most:
            continue
        seen.add((one.site, width))
        yield Refused(
            "no kernel transforms or quantizes rows of this width",
            code="online-width",
            where=one.name,
            expected=f"at most {most} input features"
            if width > most
            else f"a multiple of {UNIT} input features",
            found=str(width),
            hint=one.way,
        )


def _most(one: _Input, linear: Linear) -> int:
    """Return how many features a linear may read."""
    most = [MOST_ORDER] if one.turned and one.site != "attn_out" else []  # across heads it is their number
    return min(
        [*most, *([MOST_K - marlin.UNIT] if one.coded and linear.packed else [])], default=linear.width
    )


def _plain_experts(inputs: Iterable[_Input]) -> Iterator[W4PackError]:
    """Yield experts in 16 bit, the first of each site: what is in front of experts is for packed ones."""
    seen: set[str] = set()
    for one in inputs:
        expert = one.linear is None or expert_index(one.name) is not None
        if not expert or (one.linear is not None and one.linear.packed) or one.site in seen:
            continue
        seen.add(one.site)
        yield Refused(
            "experts in 16 bit are not run behind transforms or quantizers",
            code="online-experts",
            where=one.name,
            expected="packed experts",
            found="16 bit",
            hint=one.way,
        )


def _either(sizes: set[int]) -> str:
    return " or ".join(map(str, sorted(sizes))) or "none"
