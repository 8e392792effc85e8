"""Where in a model its ``online`` records act: layers, linears and heads, by names and widths of the file."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from w4pack.convert.core.facts import DenseFacts
from w4pack.convert.dialects.online import CHANGED, misfit
from w4pack.convert.errors import Refused, W4PackError
from w4pack.convert.files.tensorfile import TensorInfo
from w4pack.convert.rotate.accounting import Layer, layers_of
from w4pack.convert.rotate.architecture import Architecture, find

TRANSFORM_OF = {
    "attn_in": "residual_read",
    "mlp_in": "residual_read",
    "attn_out": "attn_out",
    "mlp_mid": "mlp_mid",
}
GUIDE, GUIDE_DTYPE = "k_guide", "F32"


@dataclass(frozen=True, slots=True)
class Linear:
    """What records touch of a linear.

    width   features that it reads
    odd     what no integer product takes, ``act-order`` or ``zero points``; "" for neither, and in 16 bit
    packed  whether it is multiplied in codes
    """

    width: int
    odd: str = ""
    packed: bool = False

    @staticmethod
    def of_codes(width: int, *, sym: bool, act_order: bool) -> "Linear":
        """Return a packed linear."""
        return Linear(width, "act-order" if act_order else "" if sym else "zero points", packed=True)


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


def transform_of(site: str, width: int) -> tuple[str, int | None]:
    """Return (site, order) of the transform in front of a linear that reads ``width`` features of a site.

    The order is None across heads: it is their number.
    """
    return TRANSFORM_OF[site], None if site == "attn_out" else width


def plain(tensors: Iterable[TensorInfo | DenseFacts]) -> dict[str, Linear]:
    """Return the linears in 16 bit among some tensors."""
    weights = [t for t in tensors if t.name.endswith(".weight") and len(t.shape) == 2]
    return {t.name.removesuffix(".weight"): Linear(t.shape[1]) for t in weights}
