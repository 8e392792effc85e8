"""What an artifact's ``online`` records say, for people and for programs: `inspect` and the plan show it."""

from collections.abc import Mapping, Sequence
from typing import Any

from w4pack.convert.core.scheme import RUN_CODES
from w4pack.convert.dialects.online import Clips, Online

TRANSFORMS = {
    "residual_read": "R1 at readers",
    "qk": "R3 on q and k",
    "attn_out": "across heads",
    "mlp_mid": "R4 before down",
}


def to_json(records: Online) -> dict[str, Any]:
    """Return the object ``online`` of ``inspect --json``."""
    settings = records.settings()
    return {
        "act_bits": settings.act_bits,
        "act_bits_allowed": list(records.act_bits),
        "kv_bits": settings.kv_bits,
        "kv_bits_allowed": list(records.kv_bits),
        "transforms": [
            {
                "site": h.site,
                "order": h.order,
                "block": h.block,
                "factors": [[order, construction] for order, construction in h.factors],
            }
            for h in records.hadamard
        ],
        "activations": [
            {"site": site, "bits": quant.bits, "clip": _clip(quant.clip)}
            for site, quant in records.acts.items()
        ],
        "cache": records.kv
        and {
            "bits": dict(zip("kv", records.kv.bits, strict=True)),
            "clip": {"k": _clip(records.kv.clip_k), "v": _clip(records.kv.clip_v)},
            "group": records.kv.group,
            **({"guide": True} if records.kv.guide else {}),
        },
    }


def _clip(clip: Clips) -> dict[str, float]:
    return {str(bits): ratio for bits, ratio in sorted(clip.items())}


def lines(online: Mapping[str, Any], later: str | None = None) -> list[str]:
    """Return the human form of ``to_json``'s object: what runs, with which bits and ratios.

    later  what is said in place of ratios that are still to be found
    """
    acts, cache = (_chosen(online[f"{name}_bits"], online[f"{name}_bits_allowed"]) for name in ("act", "kv"))
    return [
        *(f"transform {TRANSFORMS[h['site']]}: {_matrix(h)}" for h in online["transforms"]),
        f"activations {acts}, cache {cache}{_guided(online['cache'])}",
        *([f"clip ratios {later}"] if later else ratios(online)),
    ]


def _guided(cache: Mapping[str, Any] | None) -> str:
    return ", keys with a guide in each layer" if cache and cache.get("guide") else ""


def _matrix(h: Mapping[str, Any]) -> str:
    """Return ``14336 = 28 paley1 x 512``, or ``28672 in blocks of 3584 = 28 paley1 x 128``."""
    factors = [f"{m}" if kind == "sylvester" else f"{m} {kind}" for m, kind in h["factors"]]
    made = "" if factors == [str(h["block"])] else f" = {' x '.join(factors)}"
    blocks = "" if h["block"] == h["order"] else f" in blocks of {h['block']}"
    return f"{h['order']}{blocks}{made}"


def _chosen(own: int, allowed: Sequence[int]) -> str:
    others = [str(bits) for bits in allowed if bits != own]
    return f"{own} bit" + (f" (or {', '.join(others)})" if others else "")


def ratios(online: Mapping[str, Any]) -> list[str]:
    """Return the clip ratios of ``to_json``'s object in words, a line for each number of bits."""
    tables = {quant["site"]: quant["clip"] for quant in online["activations"]}
    tables |= {} if online["cache"] is None else online["cache"]["clip"]
    told = {
        bits: [f"{what} {clip[bits]:g}" for what, clip in tables.items() if bits in clip]
        for bits in map(str, RUN_CODES)
    }
    return [f"clip ratios at {bits} bit: {', '.join(found)}" for bits, found in told.items() if found]
