"""A source checkpoint: its configs, its tensors wherever they lie, and the files around them.

``open_checkpoint`` reads configs, the index and the headers, and nothing else. It decides which files are the
model; it never decides what the tensors mean. Reads after that are at offsets, safe in threads, and take no
memory but that of the result.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from w4pack.convert.core.facts import Warning_
from w4pack.convert.errors import SourceError, name_some
from w4pack.convert.files.described import read_manifest
from w4pack.convert.files.jsonfile import read_object, refuse_nonfinite
from w4pack.convert.files.sidefiles import sort_files
from w4pack.convert.files.store import Blob, Store, chunks
from w4pack.convert.files.tensorfile import Header, TensorInfo, natural_order, read_header
from w4pack.convert.files.weightset import WeightSet, choose

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

CONFIG = "config.json"
QUANT_CONFIGS = ("quantize_config.json", "quant_config.json", "quantization_config.json")  # order of reading


class TensorFile(Protocol):
    """One open weight file: its tensors, and their bytes."""

    tensors: tuple[TensorInfo, ...]
    metadata: Mapping[str, str]

    def read_into(self, info: TensorInfo, byte_offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes of a tensor from ``byte_offset`` of the tensor on."""
        ...


class SafetensorsFile:
    """A safetensors file of a store, header checked."""

    def __init__(self, blob: Blob, header: Header) -> None:
        self._blob = blob
        self.tensors = header.tensors
        self.metadata: Mapping[str, str] = header.metadata

    def read_into(self, info: TensorInfo, byte_offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes of a tensor from ``byte_offset`` of the tensor on."""
        self._blob.read_into(info.offset + byte_offset, buffer)


@dataclass(slots=True, eq=False)
class Checkpoint:
    """An open checkpoint. A context manager; closing it closes the store.

    config        parsed config.json, keys in file order; ``{}`` without one
    config_raw    its bytes, None without one
    quant_files   name -> parsed object, for each quantizer config file that is there, in the order of reading
    raw           name -> bytes of every JSON file that was parsed (index excluded)
    tensors       name -> place, in natural order of the names
    metadata      ``__metadata__`` of the safetensors files, merged; the first file wins
    weight_files  the files of the model
    index         name of the index file, or None
    side_files    name -> size: everything that travels byte for byte
    left_out      (name, size, reason): everything that stays behind
    notices       oddities that do not stop a conversion
    """

    store: Store
    config: Mapping[str, Any]
    config_raw: bytes | None
    quant_files: Mapping[str, Mapping[str, Any]]
    raw: Mapping[str, bytes]
    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]
    weight_files: tuple[str, ...]
    index: str | None
    side_files: Mapping[str, int]
    left_out: list[tuple[str, int, str]]
    notices: list[Warning_]
    headers: Mapping[str, TensorFile] = field(repr=False)
    _manifest: list[Mapping[str, Any] | None] = field(default_factory=list, repr=False)  # once it was read

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *exc: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close all files."""
        self.store.close()

    @property
    def label(self) -> str:
        """What messages call the source."""
        return self.store.label

    def manifest(self) -> Mapping[str, Any] | None:
        """Return what w4pack wrote of these tensors, None where it has not. Read when first asked for.

        Raises SourceError for a manifest that is damaged, Refused for one of an unknown version.
        """
        if not self._manifest:
            self._manifest.append(read_manifest(self.store))
        return self._manifest[0]

    def read_into(self, info: TensorInfo, byte_offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with bytes of a tensor, from ``byte_offset`` of the tensor on. Thread-safe."""
        self.headers[info.file].read_into(info, byte_offset, buffer)

    def chunks(self, info: TensorInfo) -> Iterator[tuple[int, bytearray]]:
        """Read a tensor a few MiB at a time. Yields (offset in the tensor, bytes)."""
        return chunks(partial(self.read_into, info), info.nbytes)

    def read(self, name: str) -> "NDArray[Any]":
        """Return a whole tensor in the carrier dtype of ``core.dtypes``, shape kept.

        A dtype of less than 8 bits has no carrier: its bytes come as flat uint8. Raises KeyError for a name
        that is not in ``tensors``.
        """
        import numpy as np

        info = self.tensors[name]
        flat = np.empty(info.nbytes, dtype=np.uint8)
        self.read_into(info, 0, _writable(flat))
        dtype = _carrier(info)
        return flat if dtype is None else flat.view(dtype).reshape(info.shape)

    def rect(self, name: str, rows: "slice | NDArray[Any]", cols: "slice | NDArray[Any]") -> "NDArray[Any]":
        """Return rows and columns of a 2-D tensor, as ``read(name)[rows][:, cols]`` would.

        rows, cols  slices of step 1, or 1-D integer arrays in any order, repeats allowed
        Whole rows that lie together are one read; a part of the columns costs one read a row, or a pass over
        whole rows of at most 1 MiB at a time where that is cheaper. Raises IndexError out of range.
        """
        from w4pack.convert.files.rect import read_rect

        info = self.tensors[name]
        dtype = _carrier(info)
        if dtype is None or len(info.shape) != 2:
            raise ValueError(f"no rectangle of {name}: {info.dtype} {list(info.shape)}")

        def fill(offset: int, buffer: "NDArray[np.uint8]") -> None:
            self.read_into(info, offset, _writable(buffer))

        return read_rect(fill, (info.shape[0], info.shape[1]), dtype, rows, cols)


def _writable(array: "NDArray[np.uint8]") -> memoryview:
    return memoryview(array.data).cast("B") if array.size else memoryview(bytearray())


def _carrier(info: TensorInfo) -> "np.dtype[Any] | None":
    from w4pack.convert.core.dtypes import DTYPES, numpy_dtype

    return numpy_dtype(info.dtype) if info.dtype in DTYPES else None


# ---------------------------------------------------------------- opening


def open_checkpoint(store: Store) -> Checkpoint:
    """Open the checkpoint in ``store``: configs, index, headers. Reads no tensor.

    Raises SourceError for anything broken, missing, hostile, or for two sets of weights without an index. The
    store is closed if it does.
    """
    try:
        return _open(store)
    except BaseException:
        store.close()
        raise


def _open(store: Store) -> Checkpoint:
    files = store.files()
    raw, parsed = _read_configs(store, files)
    config = parsed.pop(CONFIG, {})
    opened = _Headers(store)
    weights = choose(store, opened.names)
    notices = list(weights.notices)
    headers = _open_weights(store, weights, config, opened, notices)
    tensors = _collect(headers, weights, notices)
    side, left_out = sort_files(files, weights, getattr(store, "skipped", ()))
    metadata: dict[str, str] = {}
    for header in headers.values():
        metadata = {**header.metadata, **metadata}
    return Checkpoint(
        store=store,
        config=config,
        config_raw=raw.get(CONFIG),
        quant_files=parsed,
        raw=raw,
        tensors=tensors,
        metadata=metadata,
        weight_files=weights.files,
        index=weights.index,
        side_files=side,
        left_out=left_out,
        notices=notices,
        headers=headers,
    )


def _read_configs(
    store: Store,
    files: Mapping[str, int],
) -> tuple[dict[str, bytes], dict[str, dict[str, Any]]]:
    """Read config.json and the quantizers' own files; settings that will be used hold finite numbers only."""
    raw: dict[str, bytes] = {}
    parsed: dict[str, dict[str, Any]] = {}
    for name in (CONFIG, *QUANT_CONFIGS):
        if name not in files:
            continue
        raw[name], parsed[name] = read_object(store, name)
        if name == CONFIG:
            refuse_nonfinite(parsed[name].get("quantization_config"), f"{name}: quantization_config")
        else:
            refuse_nonfinite(parsed[name], f"{name}:")
    return raw, parsed


class _Headers:
    """Headers of safetensors files, each read once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._open: dict[str, SafetensorsFile] = {}

    def get(self, name: str) -> SafetensorsFile:
        if name not in self._open:
            self._open[name] = self._read(name)
        return self._open[name]

    def all(self, names: Iterable[str]) -> dict[str, TensorFile]:
        return {name: self.get(name) for name in names}

    def names(self, name: str) -> frozenset[str]:
        return frozenset(info.name for info in self.get(name).tensors)

    def _read(self, name: str) -> SafetensorsFile:
        blob = self._store.blob(name)

        def read(offset: int, length: int) -> bytes:
            buffer = bytearray(length)
            blob.read_into(offset, memoryview(buffer))
            return bytes(buffer)

        return SafetensorsFile(blob, read_header(name, blob.size, read))


def _open_weights(
    store: Store,
    weights: WeightSet,
    config: Mapping[str, Any],
    opened: _Headers,
    notices: list[Warning_],
) -> Mapping[str, TensorFile]:
    if not weights.pickled:
        return opened.all(weights.files)
    from w4pack.convert.files.pickled import open_pickles

    return open_pickles(store, weights.files, tied=_says_tied(config), notices=notices)


def _says_tied(config: Mapping[str, Any]) -> bool:
    """True if the config itself says so; the default of a model class is not known here."""
    text = config.get("text_config")
    inner = text.get("tie_word_embeddings") if isinstance(text, dict) else None
    return config.get("tie_word_embeddings", inner) is True


def _collect(
    headers: Mapping[str, TensorFile],
    weights: WeightSet,
    notices: list[Warning_],
) -> dict[str, TensorInfo]:
    """Gather the tensors of all files and compare them with the index."""
    found: dict[str, TensorInfo] = {}
    for header in headers.values():
        for info in header.tensors:
            other = found.setdefault(info.name, info)
            if other is not info:
                _settle_duplicate(found, other, info, weights, notices)
    if weights.weight_map is not None:
        _compare_with_index(found, weights, headers, notices)
    return {name: found[name] for name in sorted(found, key=natural_order)}


def _settle_duplicate(
    found: dict[str, TensorInfo],
    first: TensorInfo,
    second: TensorInfo,
    weights: WeightSet,
    notices: list[Warning_],
) -> None:
    """The index says which of two tensors of one name counts; without one they are refused."""
    named = (weights.weight_map or {}).get(first.name)
    if named not in (first.file, second.file):
        raise SourceError(
            f"`{first.name}` lies in two files",
            code="duplicate-tensor",
            where=f"{first.file}, {second.file}",
            expected="each tensor once",
            found=f"{first.dtype} {list(first.shape)} and {second.dtype} {list(second.shape)}",
        )
    found[first.name] = first if named == first.file else second
    stray = second if named == first.file else first
    where, expected = f"{stray.file}, {stray.name}", f"only in {named}, as the index says"
    notices.append(Warning_("duplicate-tensor", where, expected, "a second copy"))


def _compare_with_index(
    found: Mapping[str, TensorInfo],
    weights: WeightSet,
    headers: Mapping[str, TensorFile],
    notices: list[Warning_],
) -> None:
    weight_map = weights.weight_map or {}
    index = weights.index or "index"
    left_away: set[str] = set()
    for header in headers.values():
        left_away.update(getattr(header, "tied_names", ()))
    _check_named(found, weight_map, index, left_away)
    extra = [name for name in found if name not in weight_map]
    if extra:
        found_text = f"none of {name_some(extra)}"
        notices.append(Warning_("not-in-index", index, "every tensor of its shards", found_text))
    total = sum(found[name].nbytes for name in weight_map if name in found)
    full = sum(info.nbytes for info in found.values())
    if weights.total_size is not None and weights.total_size not in (total, full) and not left_away:
        expected = f"total_size {total:,}, the sum of the tensors"
        notices.append(Warning_("index-total-size", index, expected, _number(weights.total_size)))


def _check_named(
    found: Mapping[str, TensorInfo],
    weight_map: Mapping[str, str],
    index: str,
    left_away: set[str],
) -> None:
    absent = [
        name
        for name, shard in weight_map.items()
        if name not in left_away and (name not in found or found[name].file != shard)
    ]
    if not absent:
        return
    first = min(absent, key=natural_order)
    shard = weight_map[first]
    here = f"it lies in `{found[first].file}`" if first in found else "no such tensor"
    more = f"; {len(absent) - 1:,} more tensors are not where the index says" if len(absent) > 1 else ""
    raise SourceError(
        f"`{first}` is missing from `{shard}`",
        code="missing-tensor",
        where=f"{shard}, {first}",
        expected=f"the tensor in `{shard}`, as {index} says",
        found=here + more,
    )


def _number(value: object) -> str:
    if type(value) is int and value.bit_length() < 256:
        return f"{value:,}"
    return str(value)[:80] if isinstance(value, float | str) else "no number"
