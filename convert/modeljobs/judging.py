"""The last question of a quantization: does the result still predict what its source does?

If not, nothing is published, and what was computed stays: the limit decides no byte, so a resumed run with
another one takes every finished layer as it is.
"""

from dataclasses import replace
from pathlib import Path

from w4pack.convert import formats
from w4pack.convert.core.scheme import ONE_GROUP, WIDE
from w4pack.convert.errors import VerifyError, W4PackError
from w4pack.convert.modeljobs.prepared import Prepared
from w4pack.convert.planning.plan import Plan
from w4pack.convert.planning.rotation import rotation_of
from w4pack.convert.planning.targets import TARGETS
from w4pack.convert.quantize.whole import Outcome

SMALL_GROUP = 32  # the smallest that targets store
ROOM = 1.1  # of the divergence that was found: the limit that a hint names


def judge(found: Outcome, limit: float, prepared: Prepared, plan: Plan, staging: Path) -> None:
    """Raise VerifyError (``quality``) for a divergence above ``limit``, nats a token.

    staging  folder with the finished layers, which stays
    """
    if found.kl <= limit:
        return
    raise VerifyError(
        "the quantized model no longer predicts what the source does; nothing is published",
        code="quality",
        where=f"the first {found.tokens} of {prepared.windows.numel()} calibration tokens",
        expected=f"a divergence of at most {limit:g} nats a token",
        found=above(found.kl, limit),
        hint=f"less is lost with {_ways(prepared, plan)}. The finished layers stay in {staging}: "
        f"the same command with `--resume --max-kl {found.kl * ROOM:.2g}` publishes them",
    )


def above(value: float, limit: float) -> str:
    """Return a number in as many significant digits, 3 or more, as show that it is above ``limit``."""
    texts = (f"{value:.{digits}g}" for digits in range(3, 18))
    return next((text for text in texts if float(text) > limit), repr(value))


def _ways(prepared: Prepared, plan: Plan) -> str:
    """Name the options that lose less, as far as the source, the target and what was given leave them."""
    options, asked = prepared.options, prepared.options.quantize
    if asked is None:
        raise ValueError("nothing is quantized")
    ways = ["a larger `--bpw`"] if asked.bpw is not None else _schemes(plan)
    ways += ["`--act-bits 16`"] if asked.act_bits != WIDE else []
    ways += ["`--kv-bits 16`"] if asked.kv_bits != WIDE else []
    ways += ["`--rotate offline`"] if options.rotate == "none" and _rotatable(prepared) else []
    ways += [] if asked.gptaq else ["`--gptaq`"]
    return " or ".join([*([", ".join(ways)] if ways else []), "more calibration text"])


def _schemes(plan: Plan) -> list[str]:
    """Name more bits and smaller groups, where the target stores the first layer so."""
    scheme, layout = plan.layers[0].scheme, formats.get(TARGETS[plan.target].layout or "")
    wider = {"`--bits 8`": replace(scheme, bits=8)} if scheme.bits < 8 else {}
    if scheme.group_size == ONE_GROUP or scheme.group_size > SMALL_GROUP:
        wider[f"`--group-size {SMALL_GROUP}`"] = replace(scheme, group_size=SMALL_GROUP)
    return [way for way, other in wider.items() if layout.limits(other) is None]


def _rotatable(prepared: Prepared) -> bool:
    """Claim: there is an offline rotation for this architecture."""
    try:
        rotation_of(prepared.source, replace(prepared.options, rotate="offline"))
    except W4PackError:
        return False
    return True
