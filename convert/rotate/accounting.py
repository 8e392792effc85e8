"""Every tensor of a model gets a role, from names and shapes alone, before anything is folded.

A reader or writer of the residual stream that nobody listed would see a rotated stream without being rotated
itself: another model, without an error. So what is not accounted for is refused by name.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from w4pack.convert.core.families import natural_key
from w4pack.convert.errors import Refused, SourceError, W4PackError
from w4pack.convert.files.tensorfile import TensorInfo
from w4pack.convert.rotate.architecture import Architecture, Block

FLOATS = ("F16", "BF16", "F32", "F64")
EXPERT_COUNTS = ("num_local_experts", "n_routed_experts", "num_experts")


@dataclass(slots=True)
class Layer:
    """One decoder layer: its index, full names of the modules of its two blocks, tensors of no block."""

    index: int
    prefix: str
    attention: Block
    mlp: Block
    others: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Model:
    """A model whose every tensor has a place.

    layers   decoder layers in order
    strays   tensors that nothing accounts for
    tied     the head is the embedding table
    """

    architecture: Architecture
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    layers: tuple[Layer, ...]
    strays: tuple[str, ...]
    tied: bool

    def has(self, tensor: str) -> bool:
        """Return whether there is a tensor of this name."""
        return tensor in self.tensors

    def number(self, key: str) -> int:
        """Return a positive integer of the config. Raises SourceError if it is not one."""
        value = self.config.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        raise SourceError(
            "the config does not say a size that rotation needs",
            code="config-size",
            where=f"config.json: {key}",
            expected="a positive integer",
            found=str(value)[:80],
        )

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.number("num_attention_heads")

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads."""
        return self.number("num_key_value_heads") if self.config.get("num_key_value_heads") else self.heads


def account(
    architecture: Architecture, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]
) -> Model:
    """Give every tensor its role. Raises SourceError for what is missing or of another shape.

    Tensors that no role fits are left in ``strays``: whether they matter depends on the rotation.
    """
    _refuse_quantized(tensors)
    layers = layers_of(architecture, config, tensors)
    outside = _by_layer(architecture, tensors)[1]
    head = f"{architecture.head}.weight"
    tied = bool(config.get("tie_word_embeddings", architecture.tied))
    needed = [f"{name}.weight" for name in architecture.embeddings] + ([] if tied else [head])
    for name in needed:
        if name not in tensors:
            raise _missing(name)
    strays = _outer_strays(architecture, outside) + [n for layer in layers for n in layer.others]
    return Model(architecture, config, tensors, layers, tuple(sorted(strays, key=natural_key)), tied)


def layers_of(
    architecture: Architecture, config: Mapping[str, Any], tensors: Iterable[str]
) -> tuple[Layer, ...]:
    """Return the decoder layers, from names alone. Raises SourceError for modules that are missing."""
    by_layer, _ = _by_layer(architecture, tensors)
    return tuple(
        _layer(architecture, config, index, by_layer[index])
        for index in _complete(architecture, config, by_layer)
    )


def _by_layer(architecture: Architecture, tensors: Iterable[str]) -> tuple[dict[int, set[str]], list[str]]:
    """Split names into those of each decoder layer, prefix left out, and the others."""
    prefix = f"{architecture.layers}."
    by_layer: dict[int, set[str]] = {}
    outside = []
    for name in tensors:
        number, dot, local = name.removeprefix(prefix).partition(".")
        if name.startswith(prefix) and dot and number.isdecimal() and number == str(int(number[:9])):
            by_layer.setdefault(int(number), set()).add(local)
        else:
            outside.append(name)
    return by_layer, outside


def _complete(
    architecture: Architecture, config: Mapping[str, Any], by_layer: Mapping[int, set[str]]
) -> Sequence[int]:
    """Return the layers' indices. Raises SourceError unless they are those the config counts."""
    count = config.get("num_hidden_layers")
    if type(count) is not int:
        raise SourceError(
            "the config counts no layers",
            code="layer-count",
            where="config.json: num_hidden_layers",
            expected="a whole number",
            found=repr(count)[:40],
        )
    if len(by_layer) != count or set(by_layer) != set(range(count)):
        raise SourceError(
            "the layers are not those that the config counts",
            code="layer-count",
            where=architecture.layers,
            expected=f"num_hidden_layers {str(count)[:40]}, each layer from 0 on",
            found=f"{len(by_layer)} layers" + (f", up to {max(by_layer)}" if by_layer else ""),
        )
    return range(count)


def _layer(architecture: Architecture, config: Mapping[str, Any], index: int, names: set[str]) -> Layer:
    prefix = f"{architecture.layers}.{index}."
    attention = _form(architecture.attention, config, prefix, names)
    mlp = _form(architecture.mlp, config, prefix, names)
    listed = {*_modules(attention), *_modules(mlp), *architecture.inner, architecture.values.module}
    for latent in architecture.latents:
        listed |= {latent.norm, latent.up} if f"{latent.down}.weight" in names else set()
    others = [prefix + n for n in names if n not in listed and n.rpartition(".")[0] not in listed]
    others += [prefix + n for n in names if _odd_leaf(n, listed)]
    return Layer(index, prefix, _full(attention, prefix), _full(mlp, prefix), others)


def _odd_leaf(name: str, listed: set[str]) -> bool:
    """Tell whether a tensor of a listed module is neither its weight nor its bias (nor listed itself)."""
    module, _, leaf = name.rpartition(".")
    return name not in listed and module in listed and leaf not in ("weight", "bias")


def _form(forms: Sequence[Block], config: Mapping[str, Any], prefix: str, names: set[str]) -> Block:
    """Return the first form of a block whose modules are all there, experts counted out."""
    first: str | None = None
    for form in forms:
        block = _with_experts(form, config, names)
        absent = [module for module in _modules(block) if f"{module}.weight" not in names]
        if not absent:
            return block
        first = first or prefix + absent[0]
    raise _missing(f"{first}.weight")


def _with_experts(block: Block, config: Mapping[str, Any], names: set[str]) -> Block:
    """Write out the experts that a block's patterns stand for: as many as the config says, or up to the first
    that must be missing among so few names.
    """
    count = next((config[key] for key in EXPERT_COUNTS if isinstance(config.get(key), int)), 0)
    count = min(count, len(names) + 1)

    def expanded(modules: Iterable[str]) -> tuple[str, ...]:
        return tuple(
            name
            for module in modules
            for name in (
                [module] if "*" not in module else [module.replace("*", str(e)) for e in range(max(count, 1))]
            )
        )

    return Block(block.norm, expanded(block.readers), expanded(block.writers), block.post_norm)


def _modules(block: Block) -> list[str]:
    return [*(n for n in (block.norm, block.post_norm) if n), *block.readers, *block.writers]


def _full(block: Block, prefix: str) -> Block:
    return Block(
        block.norm and prefix + block.norm,
        tuple(prefix + n for n in block.readers),
        tuple(prefix + n for n in block.writers),
        block.post_norm and prefix + block.post_norm,
    )


def _outer_strays(architecture: Architecture, names: Iterable[str]) -> list[str]:
    modules = (*architecture.embeddings, architecture.head)
    known = {f"{module}.weight" for module in modules} | set(architecture.outer)
    known |= {f"{architecture.final_norm}.{leaf}" for leaf in ("weight", "bias")}
    return [name for name in names if name not in known]


def _refuse_quantized(tensors: Mapping[str, TensorInfo]) -> None:
    """Raise Refused for weights that are no floating-point numbers of 16 bits or more."""
    problems: list[W4PackError] = [
        Refused(
            "the source is quantized already",
            code="already-quantized",
            where=f"{info.file}, {info.name}",
            expected=", ".join(FLOATS),
            found=info.dtype,
            hint="of a 4-bit model `w4pack convert --to dense` makes a 16-bit one first; its rounding stays",
        )
        for info in tensors.values()
        if info.name.endswith((".weight", ".bias")) and info.dtype not in FLOATS
    ]
    if problems:
        raise Refused.together(problems)


def _missing(name: str) -> SourceError:
    return SourceError(
        f"`{name}` is missing",
        code="missing-tensor",
        where=name,
        expected="a tensor of this name, as the model's architecture has one",
        found="none",
    )
