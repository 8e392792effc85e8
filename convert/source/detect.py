"""What a checkpoint is: tensors first, config second, and every place where the two disagree.

Headers say which layout a linear has, its bits, its shape and its number of groups. Small *deciding tensors*
(``g_idx``, zero points) say whether it is symmetric and whether its rows are in order. The config is compared
with what was found; where it is contradicted, the tensors win and a warning says so.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from w4pack.convert import dialects
from w4pack.convert.core.facts import Warning_
from w4pack.convert.core.families import natural_key
from w4pack.convert.dialects import Claims
from w4pack.convert.errors import W4PackError
from w4pack.convert.files.checkpoint import Checkpoint
from w4pack.convert.files.tensorfile import TensorInfo
from w4pack.convert.source import foreign
from w4pack.convert.source.claims_check import config_problems, unknown_method
from w4pack.convert.source.layers import SourceLayer, read_layer
from w4pack.convert.source.reading import DetectOptions, Notes, Reading, quant_settings

CODE_SUFFIXES = ("qweight", "B", "weight_packed")
COMPANION_SUFFIXES = (
    "qzeros",
    "g_idx",
    "weight_g_idx",
    "weight_zero_point",
    "weight_shape",
)  # never without codes


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


def read_source(checkpoint: Checkpoint, options: DetectOptions) -> Source:
    """Understand a checkpoint. Problems are collected, not raised, but for files that cannot be read."""
    notes = Notes()
    quant_config, quant_file = quant_settings(checkpoint, notes)
    dialect = dialects.find_dialect(quant_config) if quant_config else None
    claims = dialect.claims(quant_config) if dialect and quant_config else None
    read = Reading(checkpoint, options, claims, quant_config, notes)
    read.problems.extend(config_problems(claims, options, quant_file))
    if quant_config and dialect is None:
        read.problems.append(unknown_method(quant_config, quant_file))
    layers, taken = _read_modules(read)
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


def _read_modules(read: Reading) -> tuple[list[SourceLayer], set[str]]:
    """Read every module in natural order. Returns the quantized linears, and the names of their tensors."""
    layers: list[SourceLayer] = []
    taken: set[str] = set()
    modules = group_tensors(read.checkpoint.tensors)
    examples = Examples(modules) if read.options.evidence == "few" else None
    for name, local in sorted(modules.items(), key=lambda item: natural_key(item[0])):
        try:
            if _is_quantized(local):
                like = examples.like(name, local) if examples is not None else None
                layers.append(like or read_layer(name, local, read))
                if examples is not None:
                    examples.add(layers[-1])
                taken.update(info.name for info in local.values())
            else:
                problem = foreign.foreign_weight(name, local)
                if problem is not None:
                    read.problems.append(problem)
        except W4PackError as err:
            read.problems.append(err)
    return layers, taken


class Examples:
    """Layers that stand for others of the same last name and tensors: a far source is read in samples.

    Of each last name the first, the middle and the last layer are read; the answer says that it is a sample.
    """

    def __init__(self, modules: Mapping[str, Mapping[str, TensorInfo]]) -> None:
        names: dict[str, list[str]] = defaultdict(list)
        for name in sorted(modules, key=natural_key):
            names[name.rpartition(".")[2]].append(name)
        self._read = {n for group in names.values() for n in (group[0], group[len(group) // 2], group[-1])}
        self._seen: dict[object, SourceLayer] = {}

    def like(self, name: str, local: Mapping[str, TensorInfo]) -> SourceLayer | None:
        """Return a layer described by its example, or None: this one is to be read."""
        example = self._seen.get(_kind(name, local))
        if name in self._read or example is None:
            return None
        tensors = {s: t for s, t in local.items() if s != "bias"}
        return replace(example, name=name, tensors=tensors, bias=local.get("bias"))

    def add(self, layer: SourceLayer) -> None:
        """Let a layer stand for later ones."""
        local = {**layer.tensors, **({"bias": layer.bias} if layer.bias else {})}
        self._seen.setdefault(_kind(layer.name, local), layer)


def _kind(name: str, local: Mapping[str, TensorInfo]) -> object:
    return name.rpartition(".")[2], tuple(sorted((s, t.dtype, t.shape) for s, t in local.items()))


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
