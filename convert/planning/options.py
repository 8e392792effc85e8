"""The options of a conversion that decide bytes. Others (threads, verbosity) may change between runs."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from w4pack.convert.core.dtypes import TAG_OF_NAME
from w4pack.convert.errors import UsageError
from w4pack.convert.planning.quantize_options import OPPOSITES, QuantizeOptions, flag
from w4pack.convert.planning.record import from_plain, to_plain
from w4pack.convert.planning.targets import TARGETS

DEFAULT_SHARD = 5_000_000_000  # bytes; engines and the Hub handle files of this size well
MIN_SHARD = 1_000
HUB_FILE_LIMIT = 50_000_000_000  # bytes a single file may have on the Hub
SOURCE_FORMATS = ("gptq", "gptq_v2")
ZERO_READINGS = ("word", "nibble")
ROTATIONS = ("none", "offline", "full")
MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """What the user asked for. Sizes in bytes; ``dtype``: ``float16``, ``bfloat16``, ``float32`` or None."""

    to: str = "marlin"
    dtype: str | None = None
    max_shard_size: int = DEFAULT_SHARD
    regroup: bool = False
    widen: bool = False
    pad_for_tp: int | None = None
    fold_act_order: bool = False
    round_scales: bool = False
    zero_reading: str | None = None
    source_format: str | None = None
    ignore_key: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    rotate: str = "none"
    tp: int | None = None
    seed: int = 0
    quantize: QuantizeOptions | None = None

    def check(self) -> None:
        """Raise UsageError for values that make no sense, alone or together."""
        if self.to not in TARGETS:
            raise UsageError("no such target", where="--to", expected=", ".join(TARGETS), found=self.to)
        if self.dtype is not None and self.to != "dense":
            raise UsageError(
                "`--dtype` is only for `--to dense`: other targets keep the scales as they are",
                where="--dtype",
                expected="--to dense",
                found=f"--to {self.to}",
            )
        if self.dtype is not None and self.dtype not in TAG_OF_NAME:
            raise UsageError(
                "no such dtype", where="--dtype", expected=", ".join(TAG_OF_NAME), found=self.dtype
            )
        self._check_dense()
        self._check_rotate()
        self._check_quantize()
        if self.max_shard_size < MIN_SHARD:
            raise UsageError(
                "shards would be too small",
                where="--max-shard-size",
                expected=f"at least {MIN_SHARD} bytes",
                found=str(self.max_shard_size),
            )
        if self.pad_for_tp is not None and not 1 <= self.pad_for_tp <= 1024:
            raise UsageError(
                "no such number of ranks",
                where="--pad-for-tp",
                expected="1 to 1024",
                found=str(self.pad_for_tp),
            )
        if self.zero_reading not in (None, *ZERO_READINGS):
            raise UsageError(
                "no such reading",
                where="--zero-reading",
                expected=", ".join(ZERO_READINGS),
                found=str(self.zero_reading),
            )
        if self.source_format not in (None, *SOURCE_FORMATS):
            raise UsageError(
                "no such source format",
                where="--source-format",
                expected=", ".join(SOURCE_FORMATS),
                found=str(self.source_format),
            )

    def _check_dense(self) -> None:
        """Raise UsageError for options about packed layers, where nothing stays packed."""
        packed_only = {
            "--ignore": self.ignore,
            "--widen": self.widen,
            "--regroup": self.regroup,
            "--fold-act-order": self.fold_act_order,
        }
        for option, given in packed_only.items():
            if given and self.to == "dense":
                raise UsageError(
                    f"`{option}` has no meaning with `--to dense`: nothing stays packed", where=option
                )

    def _check_rotate(self) -> None:
        """Raise UsageError for options that a rotation cannot use, or that need one."""
        if self.rotate not in ROTATIONS:
            raise UsageError(
                "no such rotation", where="--rotate", expected=", ".join(ROTATIONS), found=self.rotate
            )
        if not 0 <= self.seed <= MAX_SEED:
            raise UsageError(
                "no such seed", where="--seed", expected=f"0 to {MAX_SEED}", found=str(self.seed)
            )
        if self.tp is not None and self.rotate != "full":
            raise UsageError(
                "`--tp` cuts online transforms, which only `--rotate full` has",
                where="--tp",
                expected="--rotate full",
                found=f"--rotate {self.rotate}",
            )
        if self.tp is not None and not 1 <= self.tp <= 1024:
            raise UsageError(
                "no such number of ranks", where="--tp", expected="1 to 1024", found=str(self.tp)
            )
        if self.rotate == "none":
            if self.seed and self.quantize is None:
                raise UsageError("`--seed` has no meaning without `--rotate` or `--quantize`", where="--seed")
            return
        if self.to != "dense" and self.quantize is None:
            raise UsageError(
                "a rotated model has 16-bit weights, which this target cannot hold",
                where="--rotate",
                expected="--to dense",
                found=f"--to {self.to}",
            )
        self._no_packed_layers("--rotate", self._of_packed_sources())

    def _check_quantize(self) -> None:
        """Raise UsageError for options that quantization cannot use, and for values that make no sense."""
        if self.quantize is None:
            return
        self.quantize.check()
        if self.to == "dense":
            raise UsageError(
                "`--to dense` has 16-bit weights: nothing is quantized",
                where="--quantize",
                expected=f"--to {', '.join(t for t in TARGETS if t != 'dense')}",
                found="--to dense",
            )
        repacking = {
            "--regroup": self.regroup,
            "--widen": self.widen,
            "--fold-act-order": self.fold_act_order,
        }
        self._no_packed_layers("--quantize", repacking | self._of_packed_sources())

    def _of_packed_sources(self) -> dict[str, object]:
        """Return the options that say how a source's packed layers are read or written, by name."""
        return {
            "--pad-for-tp": self.pad_for_tp,
            "--round-scales": self.round_scales,
            "--zero-reading": self.zero_reading,
            "--source-format": self.source_format,
            "--ignore-key": self.ignore_key,
        }

    @staticmethod
    def _no_packed_layers(asked: str, options: dict[str, object]) -> None:
        """Raise UsageError for an option that was given although what was asked for has no packed source."""
        for option, given in options.items():
            if given:
                what = f"`{option}` has no meaning with `{asked}`: the source has no packed layers"
                raise UsageError(what, where=option)

    def chosen(self) -> dict[str, Any]:
        """Return the options that differ from their defaults, and the target: what the manifest records."""
        defaults = ConvertOptions()
        values = asdict(self)
        return {
            f.name: values[f.name]
            for f in fields(self)
            if f.name == "to" or values[f.name] != getattr(defaults, f.name)
        }

    @classmethod
    def from_chosen(cls, chosen: dict[str, Any]) -> "ConvertOptions":
        """Rebuild options from a manifest. Unknown names are ignored by nobody: they raise UsageError."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(chosen) - known)
        if unknown:
            raise UsageError(
                "the manifest names options that this version does not know", found=", ".join(unknown)
            )
        values = dict(chosen)
        try:
            return from_plain(cls, {**to_plain(cls()), **to_plain(values)}, "options")
        except ValueError as err:
            raise UsageError("the manifest names options of a wrong type", found=str(err)[:200]) from err


def as_given(chosen: Mapping[str, Any]) -> dict[str, str]:
    """Return options as a plan records them in the words of the command line, defaults in full, by name.

    Those of quantization begin with ``quantize.``, and are left out where nothing is quantized.
    """
    values = {**to_plain(ConvertOptions()), **chosen}
    asked = values.pop("quantize")
    asked = dict(asked) if isinstance(asked, Mapping) else {}
    method = {"quantize": _given("quantize", asked.pop("method", None))}
    own = {f"quantize.{name}": _given(name, value) for name, value in asked.items()}
    return {name: _given(name, value) for name, value in values.items()} | method | own


def _given(name: str, value: object) -> str:
    if name in OPPOSITES or value is True:
        return flag(name, value)
    named = flag(name, None)
    if value in (None, False, [], ()):
        return f"without {named}"
    return " ".join(f"{named} {one}" for one in (value if isinstance(value, list | tuple) else (value,)))
