"""What is known about a model, in the form that `inspect` prints and that engine rules are applied to.

A source that was inspected and an output that is only planned are described by the same values.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

ActOrder = Literal["none", "trivial", "block", "groups"]
Evidence = Literal["all", "sample", "label"]


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """One quantized linear as it lies in the file.

    name        checkpoint name of the module, e.g. ``model.layers.0.mlp.down_proj``
    layout      tensor layout: a key of ``convert.formats.FORMATS``
    sym         what the zero points say (not the config)
    act_order   none: no g_idx tensor; trivial: present, k // group_size; block: constant on aligned blocks
                of 32, 64 or 128 rows; groups: a real permutation
    stored_in   rows in the file, padding included; equal to in_features except in the artifact
    zero_kind   how the zeros are stored: ``v1`` (minus one), ``v2``, ``plain``, ``none``
    nbytes      of its tensors in the file: codes, scales, zero points, order, padding; not of the bias
    """

    name: str
    layout: str
    bits: int
    group_size: int
    sym: bool
    act_order: ActOrder
    in_features: int
    out_features: int
    stored_in: int
    stored_out: int
    scale_dtype: str
    bias: bool
    zero_kind: str = "plain"
    uneven: bool = False  # groups of different sizes: only a dequantized model can hold the layer
    ambiguous_zeros: int = 0  # stored 15 (255) under a v1 label: readers differ (formats: zero points)
    nbytes: int = 0


def bits_per_weight(nbytes: int, weights: int) -> float:
    """Return the bits that a file takes for each weight of its quantized linears; see ``LayerFacts.nbytes``.

    The one definition, for `inspect`, the plan, ``--bpw`` and the model card.
    """
    return round(8 * nbytes / max(weights, 1), 4)


@dataclass(frozen=True, slots=True)
class DenseFacts:
    """A tensor that is not part of a quantized linear."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Warning_:  # noqa: N801 - the plain name is a builtin
    """One disagreement or oddity. ``code`` is a stable slug; the text is made from the fields.

    hint  the way on, in words, if there is one
    """

    code: str
    where: str
    expected: str
    found: str
    hint: str | None = None

    def text(self) -> str:
        """Return the one-line human form."""
        way = "" if self.hint is None else f"; {self.hint}"
        return f"{self.where}: expected {self.expected}, found {self.found}{way} [{self.code}]"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model as a checkpoint folder presents it.

    config        the parsed config.json (``{}`` if there is none)
    quant_config  the quantization settings an engine would read, as written; None for a plain model
    quant_file    the file they come from
    layers        quantized linears, in natural order of their names
    dense         every other tensor
    files         names of all files in the folder
    weight_files  weight files that belong to the model
    unfit         of an artifact: ``online`` records that w4pack's loader cannot run on this model
    """

    config: Mapping[str, Any]
    quant_config: Mapping[str, Any] | None
    quant_file: str | None
    layers: tuple[LayerFacts, ...]
    dense: tuple[DenseFacts, ...]
    evidence: Evidence = "all"
    bytes_read: int = 0
    total_bytes: int = 0
    files: tuple[str, ...] = ()
    weight_files: tuple[str, ...] = ()
    warnings: tuple[Warning_, ...] = field(default=())
    unfit: tuple[Warning_, ...] = field(default=())
