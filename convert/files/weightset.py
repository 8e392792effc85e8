"""Which files of a folder are the model, and which only lie beside it.

The order is that of the engines, with one difference: where two sets of weights could both be meant, nothing
is guessed. An index wins; else ``model.safetensors``; else one safetensors file of any name; else one
complete series ``x-00001-of-0000n``; else the same for pickles.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from w4pack.convert.core.facts import Warning_
from w4pack.convert.errors import Refused, SourceError, name_some
from w4pack.convert.files.jsonfile import MAX_INDEX, parse_object
from w4pack.convert.files.store import Store

INDEX = ".index.json"
SAFETENSORS = ".safetensors"
PICKLES = (".bin", ".pt", ".pth")
# pickles that trainers leave beside a model; none of them holds weights of the model
STATE_FILES = re.compile(r"(optimizer|scheduler|scaler|training_args|rng_state|random_states|adapter_model)")

_SERIES = re.compile(r"^(.*)-(\d{5,6})-of-(\d{5,6})(\.\w+)$", re.ASCII)


@dataclass(frozen=True, slots=True)
class WeightSet:
    """The weight files of a model.

    files       names, in the order in which they are read
    weight_map  tensor name -> file, from the index; None without one
    index       name of the index file
    total_size  ``metadata.total_size`` of the index as written, if there is one
    pickled     the files are pickles
    """

    files: tuple[str, ...]
    weight_map: Mapping[str, str] | None = None
    index: str | None = None
    total_size: object = None
    pickled: bool = False
    notices: tuple[Warning_, ...] = ()


def choose(store: Store, tensor_names: Callable[[str], frozenset[str]]) -> WeightSet:
    """Find the model's weight files. ``tensor_names`` reads the header of one safetensors file.

    Raises SourceError if there are none, if a file that must exist does not, or if two sets could be meant.
    """
    files = store.files()
    top = [name for name in files if "/" not in name]
    if index := _index_of(top, SAFETENSORS):
        return _indexed(store, index, pickled=False)
    safetensors = [name for name in top if name.endswith(SAFETENSORS)]
    if safetensors:
        return _unindexed(store.label, safetensors, tensor_names, "model.safetensors")
    for suffix in PICKLES:
        if index := _index_of(top, suffix):
            return _indexed(store, index, pickled=True)
    pickles = [name for name in top if name.endswith(PICKLES) and not STATE_FILES.match(name)]
    if pickles:
        found = _unindexed(store.label, pickles, None, "pytorch_model.bin")
        return WeightSet(found.files, pickled=True, notices=found.notices)
    raise _no_weights(store.label, files)


def _no_weights(label: str, files: Mapping[str, int]) -> SourceError:
    other = [name for name in files if name.endswith((".gguf", ".h5", ".msgpack", ".onnx", ".ckpt", ".npz"))]
    below = [name for name in files if "/" in name and name.endswith((SAFETENSORS, *PICKLES))]
    found = name_some(other or below) or (f"{len(files)} other files" if files else "an empty folder")
    return SourceError(
        "no weight files",
        code="no-weights",
        where=label,
        expected="*.safetensors, or a pickle (*.bin, *.pt)",
        found=found,
    )


# ---------------------------------------------------------------- with an index


def _index_of(top: Sequence[str], suffix: str) -> str | None:
    """Return the index to follow; one of another name (GPTQ tools) counts if nothing has the usual name."""
    usual = "model.safetensors" if suffix == SAFETENSORS else f"pytorch_model{suffix}"
    if usual + INDEX in top:
        return usual + INDEX
    if usual in top:
        return None
    others = [name for name in top if name.endswith(suffix + INDEX)]
    if len(others) > 1:
        what = "several weight indexes and none of the usual name"
        hint = "move those that do not belong to the model out of the folder"
        where = name_some(others)
        raise Refused(what, code="two-weight-sets", where=where, expected=usual + INDEX, hint=hint)
    return others[0] if others else None


def _indexed(store: Store, index: str, *, pickled: bool) -> WeightSet:
    value = parse_object(store.read(index, MAX_INDEX), index)
    weight_map = value.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        found = "nothing" if weight_map is None else f"a {type(weight_map).__name__} without entries"
        _broken(index, "the index has no `weight_map`", "tensor names and the shard of each", found)
    counts: dict[str, int] = {}
    for tensor, shard in weight_map.items():
        if type(shard) is not str:
            _broken(f"{index}: {tensor}", "the index gives a tensor no file", "a file name", repr(shard)[:80])
        counts[shard] = counts.get(shard, 0) + 1
    for shard in counts:
        check_file_name(shard, index)
    _check_present(store, index, counts)
    metadata = value.get("metadata")
    total: Any = metadata.get("total_size") if isinstance(metadata, dict) else None
    notices = _stray_notice(store.files(), counts, index)
    return WeightSet(tuple(sorted(counts)), weight_map, index, total, pickled, notices)


def _stray_notice(files: Mapping[str, int], named: Mapping[str, int], index: str) -> tuple[Warning_, ...]:
    """A stray ``model.safetensors`` is what transformers would load in place of the shards."""
    stray = "model.safetensors"
    if stray not in files or stray in named:
        return ()
    found = f"a file of {files[stray]:,} bytes, which transformers takes in place of the shards"
    return (Warning_("stray-weights", stray, f"only the files that {index} names", found),)


def check_file_name(name: str, where: str) -> None:
    """Refuse a file name from inside a file unless it is a plain name: no folder, no ``..``, not empty."""
    plain = name not in ("", ".", "..") and not any(char in name for char in "/\\\0") and name.isprintable()
    if not plain or len(name) > 255:
        shown = name if name.isprintable() else name.encode("unicode_escape", "surrogatepass").decode()
        shown = shown if len(shown) <= 300 else f"{shown[:300]}..."
        what = f"`{shown}` is not the name of a file in the folder"
        raise SourceError(what, code="path-escape", where=where, expected="a plain file name", found=shown)


def _check_present(store: Store, index: str, counts: Mapping[str, int]) -> None:
    missing = sorted(name for name in counts if name not in store.files())
    if not missing:
        return
    count = counts[missing[0]]
    others = f"; {len(missing) - 1} more files are missing too" if len(missing) > 1 else ""
    raise SourceError(
        f"`{missing[0]}` is missing",
        code="missing-shard",
        where=f"{store.label}, {index}",
        expected=f"`{missing[0]}` with {count:,} tensors",
        found=f"no such file{others}",
    )


def _broken(where: str, what: str, expected: str, found: str) -> NoReturn:
    raise SourceError(what, code="bad-index", where=where, expected=expected, found=found)


# ---------------------------------------------------------------- without an index


def _unindexed(
    label: str,
    names: Sequence[str],
    tensor_names: Callable[[str], frozenset[str]] | None,
    usual: str,
) -> WeightSet:
    """Take ``usual``, else the only file, else the only series."""
    if len(names) == 1:
        chosen: tuple[str, ...] = (names[0],)
    elif usual in names:
        chosen = (usual,)
    else:
        chosen = _series(label, names)
    if len(chosen) == 1:
        chosen = _whole_series(label, chosen[0])
    strays = [name for name in names if name not in chosen]
    if strays:
        _refuse_twins(label, chosen, strays, tensor_names)
    return WeightSet(chosen, notices=_unindexed_notice(label, chosen))


def _unindexed_notice(label: str, chosen: Sequence[str]) -> tuple[Warning_, ...]:
    if len(chosen) == 1:
        return ()
    found = f"{len(chosen)} shards without one"
    return (Warning_("no-index", label, "a weight index beside the shards", found),)


def _whole_series(label: str, name: str) -> tuple[str, ...]:
    """A single file that calls itself one of several is refused; any other name is fine."""
    match = _SERIES.match(name)
    return _series(label, [name]) if match else (name,)


def _series(label: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return the files of the one numbered series in ``names``, complete."""
    series: dict[tuple[str, str, str], set[str]] = {}
    for name in names:
        if match := _SERIES.match(name):
            series.setdefault((match[1], match[3], match[4]), set()).add(name)
    if len(series) != 1:
        raise _two_sets(label, names)
    ((prefix, total, suffix), present), *_ = series.items()
    count = int(total)
    missing = []
    for number in range(1, min(count, len(present) + 1) + 1):  # a gap is among these; the total may be a lie
        name = f"{prefix}-{number:0{len(total)}d}-of-{total}{suffix}"
        if name not in present:
            missing.append(name)
    if missing or not count:
        raise SourceError(
            f"`{missing[0]}` is missing" if missing else "shards of a series of none",
            code="missing-shard",
            where=label,
            expected=f"{count:,} shards",
            found=f"{len(present):,}: {name_some(sorted(present))}",
        )
    return tuple(sorted(present))


def _refuse_twins(
    label: str,
    chosen: Sequence[str],
    strays: Sequence[str],
    tensor_names: Callable[[str], frozenset[str]] | None,
) -> None:
    """Other files may lie beside the model (another layout, extra data), but not a second copy of it.

    A file counts as a copy if it holds more than half of the model's tensors, or nothing but such tensors, or
    cannot be read.
    """
    if tensor_names is None:
        return
    ours = frozenset[str]().union(*(tensor_names(name) for name in chosen))
    for stray in strays:
        try:
            theirs = tensor_names(stray)
        except SourceError:
            raise _two_sets(label, [*chosen, stray]) from None
        if theirs <= ours or 2 * len(ours & theirs) > len(ours):
            raise _two_sets(label, [*chosen, stray])


def _two_sets(label: str, names: Sequence[str]) -> Refused:
    return Refused(
        "more than one set of weights and no index",
        code="two-weight-sets",
        where=label,
        expected="one set of weights, or `model.safetensors.index.json`",
        found=name_some(sorted(names)),
        hint="move the files that do not belong to the model out of the folder",
    )
