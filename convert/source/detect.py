"""What a checkpoint is: tensors first, config second, and every place where the two disagree.

Headers say which layout a linear has, its bits, its shape and its number of groups. Small *deciding tensors*
(``g_idx``, zero points) say whether it is symmetric and whether its rows are in order. The config is compared
with what was found; where it is contradicted, the tensors win and a warning says so.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
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
    claims = dialect.claims(quant_config, checkpoint.config) if dialect and quant_config else None
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
    for name, local in sorted(modules.items(), key=lambda item: natural_key(item[0])):
        try:
            if _is_quantized(local):
                layers.append(read_layer(name, local, read))
                taken.update(info.name for info in local.values())
            else:
                problem = foreign.foreign_weight(name, local)
                if problem is not None:
                    read.problems.append(problem)
        except W4PackError as err:
            read.problems.append(err)
    return layers, taken


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
