"""What rotation has to know of a model class, as data: who reads the residual stream, who writes it, through
which norms, and where the heads lie.

One file of ``rotate/architectures`` is one architecture: an ``ARCHITECTURE`` made of the values here. Module
names are those of checkpoints, without ``.weight`` and ``.bias``; ``*`` stands for the number of an expert.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from w4pack.convert.core import families
from w4pack.convert.errors import Refused

NormKind = Literal["rms", "rms_plus_one", "layer"]
Layout = Literal["whole", "after_q_and_k", "latent"]


@dataclass(frozen=True, slots=True)
class Block:
    """One residual block of a decoder layer.

    norm       the norm that its readers share; None: they read the stream as it is
    readers    linears whose input is the (normed) stream, routers among them
    writers    linears whose output is added to the stream
    post_norm  a norm between the writers and the addition: the stream cannot be rotated then
    """

    norm: str | None
    readers: tuple[str, ...]
    writers: tuple[str, ...]
    post_norm: str | None = None


@dataclass(frozen=True, slots=True)
class Values:
    """The rows of a linear that make the value heads.

    whole          all rows, head by head
    after_q_and_k  the last rows: query heads, key heads, value heads
    latent         in every head ``qk_nope_head_dim`` rows of keys, then the head's values
    """

    module: str = "self_attn.v_proj"
    layout: Layout = "whole"


@dataclass(frozen=True, slots=True)
class Latent:
    """A narrow vector inside attention: ``up(norm(down(x)[:size]))``; it has a rotation of its own.

    kind  kind of the rotation; ``size`` is the config key of the vector's length
    """

    kind: Literal["q_latent", "kv_latent"]
    size: str
    down: str
    norm: str
    up: str


@dataclass(frozen=True, slots=True)
class Condition:
    """The residual stream can only be rotated if the config says ``value`` under ``key`` or does not say."""

    key: str
    value: Any
    reason: str


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture. See docs/concepts/rotation.md for how to add one.

    classes     names in ``architectures`` of config.json
    attention   forms of the attention block; a layer has the first one whose modules are all there
    mlp         forms of the MLP block
    inner       modules or tensors of a layer that no rotation touches, e.g. norms of q and k
    outer       the same outside the layers
    norm        ``rms``; ``rms_plus_one``: multiplies by 1 + weight; ``layer``: subtracts the mean as well
    tied        what the class takes for ``tie_word_embeddings`` where the config does not say
    nope        linears whose heads begin with ``qk_nope_head_dim`` rows that meet in a product of q and k
    conditions  on the config, for rotating the stream
    """

    classes: tuple[str, ...]
    attention: tuple[Block, ...]
    mlp: tuple[Block, ...]
    values: Values = Values()
    layers: str = "model.layers"
    embeddings: tuple[str, ...] = ("model.embed_tokens",)
    final_norm: str = "model.norm"
    head: str = "lm_head"
    inner: tuple[str, ...] = ("self_attn.rotary_emb.inv_freq",)
    outer: tuple[str, ...] = ("model.rotary_emb.inv_freq",)
    norm: NormKind = "rms"
    tied: bool = False
    latents: tuple[Latent, ...] = ()
    nope: tuple[str, ...] = ()
    conditions: tuple[Condition, ...] = ()


ATTENTION = Block(
    "input_layernorm",
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
)
MLP = Block("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",))


@lru_cache(maxsize=1)
def known() -> Mapping[str, Architecture]:
    """Return class name -> architecture, from every file of ``rotate/architectures``."""
    folder = Path(__file__).parent / "architectures"
    found: dict[str, Architecture] = {}
    for file in sorted(folder.glob("[!_]*.py")):
        module = import_module(f"w4pack.convert.rotate.architectures.{file.stem}")
        for name in module.ARCHITECTURE.classes:
            found[name] = module.ARCHITECTURE
    return found


def find(config: Mapping[str, Any]) -> Architecture:
    """Return the architecture of a model. Raises Refused if no file describes its class."""
    names = families.architectures(config)
    for name in names:
        if name in known():
            return known()[name]
    raise Refused(
        "no description of this architecture, so nothing of it can be rotated",
        code="unknown-architecture",
        where="config.json: architectures",
        expected=", ".join(sorted(known())),
        found=", ".join(names) or "none",
        hint="`--rotate none` leaves the weights as they are; docs/concepts/rotation.md says how to describe "
        "an architecture",
    )
