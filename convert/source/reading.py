"""One reading of a source: what the user decided, what the config claims, and what was found on the way."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from w4pack.convert.core.facts import Warning_
from w4pack.convert.dialects import Claims, ModuleClaim
from w4pack.convert.dialects import gptq as gptq_dialect
from w4pack.convert.errors import W4PackError
from w4pack.convert.files.checkpoint import Checkpoint

NO_CLAIM = ModuleClaim()
# What two settings of one checkpoint should say alike, where both say it.
COMPARED_KEYS = (
    "bits",
    "group_size",
    "sym",
    "desc_act",
    "checkpoint_format",
    "format",
    "zero_point",
    "version",
)
Evidence = Literal["all", "sample", "few"]


@dataclass(frozen=True, slots=True)
class DetectOptions:
    """What the user decided about the source.

    evidence      ``all``: every deciding tensor is read whole; ``sample``: every g_idx, a row of the zeros;
                  ``few``: as ``sample``, and for layers in the first, middle and last block only
    zero_reading  ``word`` or ``nibble``, where a v1 file is ambiguous
    source_format ``gptq`` or ``gptq_v2``, where no label says it
    ignore_keys   config keys whose effect on the forward pass the user takes upon himself
    """

    evidence: Evidence = "all"
    zero_reading: str | None = None
    source_format: str | None = None
    ignore_keys: tuple[str, ...] = ()


class Notes:
    """Collects disagreements and merges those of one kind: one line, a count and one example."""

    def __init__(self) -> None:
        self._found: dict[str, list[tuple[str, str, str]]] = defaultdict(list)

    def warn(self, code: str, where: str, expected: str, found: str) -> None:
        """Note one disagreement."""
        self._found[code].append((where, expected, found))

    def merged(self) -> tuple[Warning_, ...]:
        """Return one warning for each kind."""
        lines = []
        for code, items in self._found.items():
            where, expected, found = items[0]
            if len(items) > 1:
                where = f"{where} and {len(items) - 1} more"
            lines.append(Warning_(code, where, expected, found))
        return tuple(lines)


@dataclass(slots=True)
class Reading:
    """State of one detection: what is known about the config, and what was found on the way."""

    checkpoint: Checkpoint
    options: DetectOptions
    claims: Claims | None
    quant_config: Mapping[str, Any] | None
    notes: Notes = field(default_factory=Notes)
    problems: list[W4PackError] = field(default_factory=list)

    def claim(self, name: str) -> ModuleClaim:
        """Return what the config says of a module."""
        if self.claims is None:
            return NO_CLAIM
        return self.claims.for_module(name) or NO_CLAIM


def quant_settings(checkpoint: Checkpoint, notes: Notes) -> tuple[Mapping[str, Any] | None, str | None]:
    """Return the quantization settings an engine reads first, and the file they stand in."""
    found: list[tuple[str, Mapping[str, Any]]] = []
    config = checkpoint.config
    for key in ("quantization_config", "compression_config"):
        if isinstance(config.get(key), Mapping) and config[key]:
            found.append(("config.json", config[key]))
    found += [(name, settings) for name, settings in checkpoint.quant_files.items() if settings]
    from_header = gptq_dialect.from_metadata(checkpoint.metadata) if not found else None
    if from_header is not None:
        found.append(("the safetensors metadata", from_header))
    if not found:
        return None, None
    first_file, first = found[0]
    for other_file, other in found[1:]:
        for key in COMPARED_KEYS:
            if key in first and key in other and first[key] != other[key]:
                notes.warn(
                    "config-files-differ",
                    f"{first_file} and {other_file}: {key}",
                    repr(first[key]),
                    repr(other[key]),
                )
    return first, first_file
