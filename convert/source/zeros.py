"""Zero points as stored: which convention, symmetric or not, and where readers of the file disagree.

GPTQ stores zero points minus one in v1 files and as they are in v2 files, and the label is often wrong.
Constant words decide by themselves; otherwise the config's label is followed and the plan says so.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from w4pack.convert.core.scheme import QuantScheme
from w4pack.convert.dialects import Claims, ModuleClaim
from w4pack.convert.errors import Refused, SourceError, W4PackError

V1_MIDPOINT = {4: 0x77777777, 8: 0x7F7F7F7F}
V2_MIDPOINT = {4: 0x88888888, 8: 0x80808080}
DUMMY_WORDS = (0x00000000, 0xFFFFFFFF)
MINUS_ONE = {4: 0x11111111, 8: 0x01010101}

AMBIGUOUS = "zero-reading"  # code of the refusal for stored zeros that two readings decode differently

Warn = Callable[[str, str, str, str], None]  # code, where, expected, found


@dataclass(frozen=True, slots=True)
class ZeroReading:
    """How the zeros of one layer are to be read.

    kind       ``v1`` (add one on whole words), ``v1-nibble`` (add one per field), ``v2`` / ``plain``,
               ``none`` (no tensor), ``dummy`` (constant words that symmetric readers ignore)
    sym        every zero is the midpoint
    ambiguous  fields that v1 readers disagree about
    overflow   the reading gives a zero point that its field cannot hold (16 or 256)
    """

    kind: str
    sym: bool
    ambiguous: int = 0
    overflow: bool = False


def _fields(words: NDArray[np.uint32], bits: int) -> NDArray[np.uint8]:
    """Split words into their fields, low bits first: (..., W) -> (..., W * 32 / bits)."""
    as_bytes = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return as_bytes
    out = np.empty((*as_bytes.shape[:-1], as_bytes.shape[-1] * 2), np.uint8)
    out[..., 0::2] = as_bytes & 15
    out[..., 1::2] = as_bytes >> 4
    return out


def _gptq_constant(
    word: int, bits: int, label: str | None, claim: ModuleClaim, where: str, warn: Warn
) -> ZeroReading | None:
    """Decide a layer whose zero words are all ``word``; None if the word says nothing by itself."""
    for kind, other, midpoint in (("v1", "v2", V1_MIDPOINT), ("v2", "v1", V2_MIDPOINT)):
        if word != midpoint[bits]:
            continue
        if label == other and claim.sym is False:
            return None  # asymmetric under the label that is written; follow it
        if label == other:
            warn(
                "zero-version",
                where,
                f"{other} zeros, by the label",
                f"{kind} zeros: every word is 0x{word:08x}",
            )
        return ZeroReading(kind, sym=True)
    if word in DUMMY_WORDS and claim.sym is True:
        warn(
            "dummy-zeros",
            where,
            "the midpoint, as `sym` is true",
            f"every zero word is 0x{word:08x}; read as symmetric",
        )
        return ZeroReading("dummy", sym=True)
    if word in DUMMY_WORDS and claim.sym is None:
        raise SourceError(
            "zero points are all the same dummy word and no config says that the layer is symmetric",
            code="dummy-zeros",
            where=where,
            expected="`sym` in the quantization config",
            found=f"0x{word:08x} everywhere",
        )
    return None


def _reading_problem(words: NDArray[np.uint32], bits: int, count: int, where: str) -> W4PackError:
    """Describe a layer whose stored zeros of 15 (255) two families of readers decode differently."""
    limit = (1 << bits) - 1
    row = int(np.flatnonzero((_fields(words, bits) == limit).any(axis=-1))[0])
    stored = _fields(words[row], bits)
    first = int(np.flatnonzero(stored == limit)[0]) // (32 // bits)
    word = words[row, first : first + 1]
    by_word = _fields(word + np.uint32(MINUS_ONE[bits]), bits).tolist()
    by_nibble = [int(f) + 1 for f in _fields(word, bits)]
    return Refused(
        f"stored zero points of {limit} under a v1 label can be read in two ways",
        code=AMBIGUOUS,
        where=where,
        expected=f"no stored {limit}, or a producer that is known to subtract on whole words",
        found=f"{count} fields; word {first} of group {row}: {by_word} by word, {by_nibble} by nibble",
        hint="say which with `--zero-reading word` or `--zero-reading nibble`",
    )


@dataclass(frozen=True, slots=True)
class GptqZeros:
    """What is known before the zero words of a GPTQ layer are read.

    label   ``v1`` / ``v2`` from the config or ``--source-format``, or None
    choice  ``word`` / ``nibble`` from ``--zero-reading``, or None
    where   the tensor, for messages
    """

    bits: int
    claim: ModuleClaim
    claims: Claims | None
    label: str | None
    choice: str | None
    where: str


def _gptq_asymmetric(words: NDArray[np.uint32], how: GptqZeros) -> ZeroReading:
    if how.label is None:
        raise Refused(
            "zero points of an asymmetric GPTQ layer cannot be read without knowing the format version",
            code="zero-version-unknown",
            where=how.where,
            expected="a `checkpoint_format` of `gptq` or `gptq_v2` in the quantization config",
            found="no label",
            hint="say which with `--source-format gptq` or `--source-format gptq_v2`",
        )
    if how.label == "v2":
        return ZeroReading("v2", sym=False)
    count = int((_fields(words, how.bits) == (1 << how.bits) - 1).sum())
    if count == 0:
        return ZeroReading("v1", sym=False)
    if how.choice == "nibble":
        return ZeroReading("v1-nibble", sym=False, ambiguous=count, overflow=True)
    if how.choice == "word" or (how.claims is not None and how.claims.word_zeros):
        return ZeroReading("v1", sym=False, ambiguous=count)
    raise _reading_problem(words, how.bits, count, how.where)


def read_gptq(raw: NDArray[Any], how: GptqZeros, warn: Warn) -> ZeroReading:
    """Decide how the ``qzeros`` of one GPTQ layer are read.

    raw  (G, N * bits / 32) int32, or some of its rows
    Raises Refused where the file is ambiguous, SourceError where it is not a zero tensor.
    """
    words = np.ascontiguousarray(raw).view(np.uint32)
    first = int(words.flat[0])
    if bool((words == np.uint32(first)).all()):
        decided = _gptq_constant(first, how.bits, how.label, how.claim, how.where, warn)
        if decided is not None:
            return decided
    reading = _gptq_asymmetric(words, how)
    if how.claim.sym is True:
        midpoint = (words == V1_MIDPOINT[how.bits]).all(axis=1) | (words == V2_MIDPOINT[how.bits]).all(axis=1)
        group = int(np.flatnonzero(~midpoint)[0]) if not midpoint.all() else 0
        warn(
            "sym-flag",
            f"{how.where}, group {group}",
            "every zero point at the midpoint, as `sym` is true",
            "other zero points; asymmetric",
        )
    return reading


def read_plain(
    layout: ModuleType,
    tensors: Mapping[str, NDArray[Any]],
    scheme: QuantScheme,
    claim: ModuleClaim,
    where: str,
    warn: Warn,
) -> ZeroReading:
    """Decide symmetry of a layout that stores zeros as they are: decode, and compare with the midpoint."""
    zeros = layout.decode_params(tensors, scheme, "plain").zeros
    sym = zeros is None or bool((zeros == scheme.midpoint).all())
    if claim.sym is True and not sym:
        group = int(np.flatnonzero((zeros != scheme.midpoint).any(axis=1))[0])
        warn(
            "sym-flag",
            f"{where}, group {group}",
            "every zero point at the midpoint, by the config",
            "other zero points; asymmetric",
        )
    return ZeroReading("plain", sym=sym)
