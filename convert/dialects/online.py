"""The artifact's ``online`` records: what runs between the linears. ``online_reading`` reads them.

    hadamard   site residual_read | qk | attn_out | mlp_mid; order; factors; block; signs null
    act_quant  site attn_in | attn_out | mlp_in | mlp_mid; bits of the calibration; clip {"4": c, "8": c};
               symmetric true
    kv_quant   bits {"k": b, "v": b} of the calibration; clip {"k": {"4": c, "8": c}, "v": {...}};
               group: the head size; guide true, if each layer has a tensor ``k_guide``, else left out

One record for each site; ``mlp_mid`` transforms may be several, of different orders, one for each width of an
MLP. The bits under which a clip stands are those that may be chosen at run time, and 16 always: transforms
run whatever is chosen. A record that is not known to the last key changes the numbers, so it is refused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from w4pack.convert.core.scheme import RUN_BITS, WIDE
from w4pack.convert.errors import Refused, UsageError

HADAMARD_SITES = ("residual_read", "qk", "attn_out", "mlp_mid")
ACT_SITES = ("attn_in", "attn_out", "mlp_in", "mlp_mid")
HEAD_SIZES = (64, 80, 96, 128, 256)  # of the quantized cache's kernels
UNIT = 8  # values that the kernels of transforms and quantizers read at once: widths are multiples of it
MOST_K = (
    1 << 17
)  # rows of a weight, padding included, from which int32 sums of codes overflow: 2**31 / 128**2
MOST_ORDER = 1 << 20  # of a transform: far above any width of a model; a file must not ask for more
CHANGED = "the artifact was changed, or is another model's: make it again from its source"  # a hint
Factors = tuple[tuple[int, str], ...]
Clips = Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Hadamard:
    """A transform without signs: ``order / block`` copies of one Hadamard matrix, over sqrt(block).

    factors  (order, construction) of each Kronecker factor of a block, the last runs fastest
    """

    site: str
    order: int
    factors: Factors
    block: int


@dataclass(frozen=True, slots=True)
class ActQuant:
    """Activations of one site, symmetric, a scale for each token.

    bits  the calibration ran with
    clip  bits -> clip ratio
    """

    site: str
    bits: int
    clip: Clips


@dataclass(frozen=True, slots=True)
class KVQuant:
    """Keys and values of the cache, asymmetric, a scale for each token and head.

    bits  (keys, values) the calibration ran with
    clip  bits -> clip ratio, of keys and of values
    group values that share a scale: the head size
    guide whether each layer has a guide of its keys (``quantize.activations``)
    """

    bits: tuple[int, int]
    clip_k: Clips
    clip_v: Clips
    group: int
    guide: bool = False


@dataclass(frozen=True, slots=True)
class Online:
    """All records of an artifact.

    hadamard  in the order of the file
    acts      site -> quantizer
    kv        of the cache, or None
    """

    hadamard: tuple[Hadamard, ...] = ()
    acts: Mapping[str, ActQuant] = field(default_factory=dict)
    kv: KVQuant | None = None

    def __bool__(self) -> bool:
        """Tell whether anything runs online."""
        return bool(self.hadamard or self.acts or self.kv)

    def transform(self, site: str, order: int | None = None) -> Hadamard | None:
        """Return the transform of a site, and of that order where it is given; None: there is none."""
        found = [h for h in self.hadamard if h.site == site and order in (None, h.order)]
        return found[0] if found else None

    @property
    def act_bits(self) -> tuple[int, ...]:
        """What ``act_bits`` may be."""
        return _common([quant.clip for quant in self.acts.values()])

    @property
    def kv_bits(self) -> tuple[int, ...]:
        """What ``kv_bits`` may be."""
        return _common([] if self.kv is None else [self.kv.clip_k, self.kv.clip_v])

    def settings(self, act_bits: int | None = None, kv_bits: int | None = None) -> "Settings":
        """Return what to run: as asked, or as in the calibration.

        Raises:
            UsageError: bits that the records do not have.
        """
        own_act = max((quant.bits for quant in self.acts.values()), default=WIDE)
        own_kv = WIDE if self.kv is None else max(self.kv.bits)
        return Settings(
            _chosen("act_bits", act_bits, own_act, self.act_bits),
            _chosen("kv_bits", kv_bits, own_kv, self.kv_bits),
        )


@dataclass(frozen=True, slots=True)
class Settings:
    """Bits of activations and of the cache at run time; 16: not quantized."""

    act_bits: int
    kv_bits: int


def _common(clips: Sequence[Clips]) -> tuple[int, ...]:
    return tuple(b for b in RUN_BITS if b == WIDE or (clips and all(b in clip for clip in clips)))


def misfit(site: str, expected: object, found: object) -> Refused:
    """Return the refusal of a record that the model has no place for."""
    return Refused(
        "an online record does not fit the model",
        code="artifact-online",
        where=f"quantization_config.online: {site}",
        expected=str(expected),
        found=str(found),
        hint=CHANGED,
    )


def _chosen(name: str, asked: int | None, own: int, allowed: tuple[int, ...]) -> int:
    found = own if asked is None else asked
    if type(found) is not int or found not in allowed:
        raise UsageError(
            f"the artifact does not run with this `{name}`",
            code="online-bits",
            where=name,
            expected=" or ".join(map(str, allowed)),
            found=str(found),
            hint=_way_to(name, found, own),
        )
    return found


def _way_to(name: str, asked: object, own: int) -> str:
    """Return what runs instead, and how an artifact for the asked bits is made."""
    way = f"without `{name}` it runs with {own} bit"
    if type(asked) is not int or asked not in RUN_BITS:
        return way
    made = f"w4pack convert SRC OUT --quantize gptq --{name.replace('_', '-')} {asked}"
    return f"{way}; `{made}`, of the 16-bit model, makes one that can"
