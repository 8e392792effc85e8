"""The options of quantization: what the user asked for, and whether it makes sense."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from w4pack.convert.core.patterns import matcher
from w4pack.convert.core.scheme import ONE_GROUP, RUN_BITS, WIDE
from w4pack.convert.errors import UsageError

METHODS = ("gptq", "rtn")
GROUP_SIZES = (ONE_GROUP, 32, 64, 128)
BITS = (4, 8)
LEFT = 16  # bits of a linear that is left as it is
OPPOSITES = {"sym": "--asym", "gptaq": "--no-gptaq"}  # what says no to an option
CALIBRATED = ("gptaq", "calibration", "samples", "seqlen", "damp")  # settings that only gptq has


@dataclass(frozen=True, slots=True)
class QuantizeOptions:
    """How weights are quantized.

    method       gptq or rtn
    gptaq        move weights towards the source's outputs first (gptq)
    module_bits  ``PATTERN=BITS``: other bits for some linears, 16 leaves them as they are
    bpw          bits per weight to meet by choosing a scheme for each linear, or None
    calibration  a file, or None: the built-in sample; recorded by its name only
    damp         share of the mean diagonal of the Hessian that is added to it
    act_bits     of activations: what calibration runs with, and the runtime unless asked otherwise
    kv_bits      the same of keys and values in the cache
    """

    method: str = "gptq"
    gptaq: bool = True
    bits: int = 4
    group_size: int = 128
    sym: bool = True
    module_bits: tuple[str, ...] = ()
    bpw: float | None = None
    calibration: str | None = None
    samples: int = 128
    seqlen: int = 2048
    damp: float = 0.03
    act_bits: int = WIDE
    kv_bits: int = WIDE

    def check(self) -> None:
        """Raise UsageError for values that make no sense."""
        _one_of("--quantize", self.method, METHODS)
        _one_of("--bits", self.bits, BITS)
        _one_of("--group-size", self.group_size, GROUP_SIZES)
        _one_of("--act-bits", self.act_bits, RUN_BITS)
        _one_of("--kv-bits", self.kv_bits, RUN_BITS)
        if self.act_bits != LEFT and not self.sym:
            raise UsageError(
                "integer products with 4- and 8-bit activations take weights without zero points",
                where="--act-bits",
                expected="--sym, or --act-bits 16",
                found=f"--asym --act-bits {self.act_bits}",
            )
        for option, value, least in (("--samples", self.samples, 1), ("--seqlen", self.seqlen, 2)):
            if value < least:
                raise UsageError(
                    "too few to learn from", where=option, expected=f"at least {least}", found=str(value)
                )
        if not 0 < self.damp <= 1:
            raise UsageError(
                "no such damping", where="--damp", expected="above 0, at most 1", found=str(self.damp)
            )
        if self.bpw is not None and not 4 < self.bpw <= 8.5:
            raise UsageError(
                "no scheme has so few or so many bits",
                where="--bpw",
                expected="above 4, at most 8.5 bits per weight",
                found=str(self.bpw),
            )
        if self.bpw is not None and (self.bits, self.group_size) != (4, 128):
            raise UsageError(
                "`--bpw` chooses bits and group sizes itself",
                where="--bpw",
                expected="neither `--bits` nor `--group-size` beside it",
                found=f"--bits {self.bits} --group-size {self.group_size}",
            )
        for rule in self.module_bits:
            read_rule(rule)


def flag(name: str, value: object) -> str:
    """Return an option as it is given on the command line, without its value."""
    return OPPOSITES[name] if value is False else "--" + name.replace("_", "-")


def _one_of(option: str, value: object, allowed: Sequence[object]) -> None:
    if value not in allowed:
        raise UsageError(
            "no such choice", where=option, expected=", ".join(map(str, allowed)), found=str(value)
        )


def read_rule(rule: str) -> tuple[str, int]:
    """Return (pattern, bits) of a rule ``PATTERN=BITS``. Raises UsageError."""
    pattern, _, bits = rule.rpartition("=")
    if not pattern or bits not in ("4", "8", "16"):
        raise UsageError(
            "not a rule for the bits of some linears",
            where="--module-bits",
            expected="PATTERN=4, PATTERN=8 or PATTERN=16",
            found=rule,
        )
    return pattern, int(bits)


def named_by(pattern: str, names: Iterable[str], option: str) -> list[str]:
    """Return the names that a pattern means: a full name, or ``re:`` and a regular expression.

    Raises UsageError for a pattern that cannot be read or names nothing.
    """
    regular = matcher(pattern.removeprefix("re:")) if pattern.startswith("re:") else None
    if pattern.startswith("re:") and regular is None:
        raise UsageError(
            "not a regular expression that can be read",
            where=option,
            expected="re: and an expression in Python's spelling",
            found=pattern,
        )
    found = [n for n in names if (regular(n) if regular is not None else n == pattern)]
    if not found:
        raise UsageError(
            "no quantized layer has this name",
            where=option,
            expected="a name that `inspect` lists",
            found=pattern,
        )
    return found
