"""safetensors files: read a header and believe none of it. ``shards`` lays out new ones.

A file is 8 bytes (little-endian length of the header), the header (JSON, spaces at its end), the data.
``parse_header`` checks every statement of the header before anybody sizes a buffer or seeks with it: tensors
cover the data exactly (no hole, no overlap, no trailing byte), a shape and a dtype give exactly the span, and
every number is an integer in range. What the safetensors library refuses is refused here; a name given twice
is refused too, because the second entry could hide the first. A tensor name is a name, never a path.

Standard library only: engines import this module to read headers.
"""

import gc
import json
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

from w4pack.convert.errors import SourceError, name_some

MAX_HEADER = 100_000_000  # bytes; the library's own limit (safetensors 0.8: src/tensor.rs)
MAX_WIDE_HEADER = 25_000_000  # bytes, with other than ASCII text: Python spends up to 4 bytes a character
MAX_TENSORS = 250_000  # in one file; the largest mixture-of-experts models have 0.3 million in all shards
MAX_PARTS = 8 * MAX_TENSORS  # commas: values of lists and objects that a header can make us build
MAX_RANK = 32  # numpy's limit before version 2
MAX_SIZE = 2**63 - 1  # bytes or elements: what a file offset can express
MAX_DEPTH = 64  # of values under keys that the format does not define

METADATA = "__metadata__"

BITS: dict[str, int] = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}
_CANONICAL = {tag: (tag, bits) for tag, bits in BITS.items()}  # one string object per tag, not one per tensor


class TensorInfo(NamedTuple):
    """Where one tensor lies. A named tuple, because headers of 100,000 tensors must be read at once.

    file    name of the file within its folder ("" while a new file is being planned)
    offset  of the first byte, from the start of the file
    nbytes  size in bytes
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    nbytes: int


class Header(NamedTuple):
    """A checked header: its tensors in file order, the strings of ``__metadata__``, where the data starts."""

    tensors: tuple[TensorInfo, ...]
    metadata: dict[str, str]
    data_start: int


def tensor_nbytes(dtype: str, shape: Sequence[int]) -> int:
    """Return the size in bytes. Raises ValueError unless the bits fill whole bytes."""
    elements = 1
    for dim in shape:
        elements *= dim
    whole, rest = divmod(elements * BITS[dtype], 8)
    if rest:
        raise ValueError(f"{dtype} {list(shape)} does not fill whole bytes")
    return whole


# ---------------------------------------------------------------- reading


def header_length(prefix: bytes, file: str, size: int) -> int:
    """Return the length in bytes of the JSON header, from the first 8 bytes of a file of ``size`` bytes."""
    if size < 8 or len(prefix) < 8:
        _refuse(
            "header-too-small",
            "too short for a safetensors file",
            file,
            "at least 8 bytes",
            f"{size:,} bytes",
        )
    length = int.from_bytes(prefix[:8], "little")
    if prefix[:8] == b"version " and size < 1024:
        raise SourceError(
            "a git-lfs pointer lies in place of the weights",
            code="lfs-pointer",
            where=file,
            expected="a safetensors file",
            found=f"a pointer of {size:,} bytes",
            hint="git lfs pull",
        )
    if length > size - 8:
        what = "safetensors header is longer than its file"
        expected = f"at most {size - 8:,} bytes (the file has {size:,})"
        _refuse("header-too-large", what, file, expected, f"{length:,}")
    if length > MAX_HEADER:
        what = "safetensors header is too long"
        _refuse("header-too-large", what, file, f"at most {MAX_HEADER:,} bytes", f"{length:,}")
    return length


def parse_header(raw: bytes, file: str, size: int) -> Header:
    """Check the JSON header ``raw`` of a file of ``size`` bytes and return its tensors in file order.

    Raises SourceError with the file, the tensor and the numbers.
    """
    collecting = gc.isenabled()
    gc.disable()  # nothing here is garbage; the collector would walk 100,000 new tuples again and again
    try:
        entries = _load(raw, file)
        start = 8 + len(raw)
        metadata = _metadata(entries.pop(METADATA, None), file)
        return Header(_check(entries, file, start, size), metadata, start)
    finally:
        if collecting:
            gc.enable()


def read_header(name: str, size: int, read: Callable[[int, int], bytes]) -> Header:
    """Read and check the header of a file; ``read(offset, length)`` returns that many bytes."""
    prefix = read(0, 8) if size >= 8 else b""
    length = header_length(prefix, name, size)
    return parse_header(read(8, length), name, size)


def _refuse(code: str, what: str, where: str, expected: str | None, found: str | None) -> NoReturn:
    raise SourceError(what, code=code, where=where, expected=expected, found=found)


def _load(raw: bytes, file: str) -> dict[str, Any]:
    """Decode the JSON object. Its size and the number of containers are bounded first."""
    _bound(raw, file)
    try:
        text = raw.decode("utf-8")
        value = json.loads(
            text,
            object_pairs_hook=_entry_or_dict,
            parse_constant=_no_constant,
            parse_float=_finite_float,
        )
    except _DuplicateKeyError as err:
        what = f"`{_printable(err.key)}` stands twice in the safetensors header"
        _refuse("header-duplicate", what, file, "once", "twice")
    except (ValueError, RecursionError) as err:
        where = f"byte {err.pos:,}: {err.msg}" if isinstance(err, json.JSONDecodeError) else _first_line(err)
        _refuse("header-json", "safetensors header is not JSON", file, "a JSON object in UTF-8", where)
    if type(value) is not dict:
        _refuse("header-json", "safetensors header is not a JSON object", file, "an object", _kind(value))
    return value


def _bound(raw: bytes, file: str) -> None:
    if len(raw) > MAX_WIDE_HEADER and not raw.isascii():
        what = "safetensors header is too long for text other than ASCII"
        _refuse("header-too-large", what, file, f"at most {MAX_WIDE_HEADER:,} bytes", f"{len(raw):,}")
    objects = raw.count(b"{")
    keys, lists = raw.count(b":"), raw.count(b"[")
    if objects > MAX_TENSORS or max(keys, lists) > 4 * MAX_TENSORS or raw.count(b",") > MAX_PARTS:
        what = "safetensors header holds too many tensors"
        _refuse(
            "header-too-many",
            what,
            file,
            f"at most {MAX_TENSORS:,}",
            f"{objects:,} objects in {len(raw):,} bytes",
        )


class _DuplicateKeyError(Exception):
    def __init__(self, key: str) -> None:
        self.key = key


def _entry_or_dict(pairs: list[tuple[str, Any]]) -> Any:
    """Turn a tensor entry in the usual key order into a plain tuple, anything else into a dict.

    JSON never makes tuples, so a tuple is known to be (dtype, shape, data_offsets); it takes a quarter of the
    memory of a dict.
    """
    if len(pairs) == 3:
        (key0, dtype), (key1, shape), (key2, offsets) = pairs
        if key0 == "dtype" and key1 == "shape" and key2 == "data_offsets":
            return (dtype, shape, offsets)
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        raise _DuplicateKeyError(next(k for k, _ in pairs if k in seen or seen.add(k)))  # type: ignore[func-returns-value]
    return value


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _finite_float(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError("a number out of range")
    return value


def _metadata(value: Any, file: str) -> dict[str, str]:
    if value is None:
        return {}
    if type(value) is tuple:  # metadata whose keys happen to be those of an entry
        value = dict(zip(("dtype", "shape", "data_offsets"), value, strict=True))
    if type(value) is not dict:
        _refuse(
            "header-metadata", f"`{METADATA}` is not an object", file, "an object of strings", _kind(value)
        )
    for key, text in value.items():
        if type(text) is not str:
            where = f"{file}: {METADATA}.{_printable(key)}"
            _refuse(
                "header-metadata",
                f"`{METADATA}` holds something else than strings",
                where,
                "a string",
                _kind(text),
            )
        if not (_is_text(key) and _is_text(text)):
            _refuse("header-json", f"`{METADATA}` is not Unicode", file, "text", "half of a surrogate pair")
    return value


def _check(entries: dict[str, Any], file: str, start: int, size: int) -> tuple[TensorInfo, ...]:
    """Check every entry, then that together they cover the data of the file exactly."""
    make, kind = tuple.__new__, TensorInfo
    infos: list[TensorInfo] = []
    for name, entry in entries.items():
        if type(entry) is not tuple:
            entry = _entry(name, entry, file)
        dtype, shape, offsets = entry
        try:
            tag, bits = _CANONICAL[dtype]
            begin, end = offsets
            elements = 1
            for dim in shape:
                if type(dim) is not int or not 0 <= dim <= MAX_SIZE:
                    raise ValueError
                elements *= dim
                if elements > MAX_SIZE:
                    raise ValueError
            if not (
                type(begin) is int
                and type(end) is int
                and type(shape) is list
                and type(offsets) is list
                and 0 <= begin <= end <= MAX_SIZE
                and elements * bits == 8 * (end - begin)
                and len(shape) <= MAX_RANK
                and (name.isascii() or _is_text(name))
            ):
                raise ValueError
        except (KeyError, TypeError, ValueError):
            _explain(name, dtype, shape, offsets, file, size - start)
        infos.append(make(kind, (name, tag, tuple(shape), file, start + begin, end - begin)))
    _check_cover(infos, file, start, size)
    return tuple(infos)


def _check_cover(infos: list[TensorInfo], file: str, start: int, size: int) -> None:
    """Sort by position; each tensor starts where the last one ended, and the last ends with the file."""
    infos.sort(key=_position)
    at = start
    previous = "the header"
    for info in infos:
        if info.offset != at:
            overlap = info.offset < at
            code, verb = ("header-overlap", "overlaps") if overlap else ("header-hole", "leaves a hole after")
            what = f"`{_printable(info.name)}` {verb} `{_printable(previous)}`"
            where = f"{file}, {_printable(info.name)}"
            _refuse(code, what, where, f"data from byte {at - start:,} on", f"byte {info.offset - start:,}")
        at += info.nbytes
        previous = info.name
    if at > size:
        last = _printable(infos[-1].name) if infos else None
        where = file if last is None else f"{file}, {last}"
        _refuse(
            "file-too-short",
            "file is shorter than its header says",
            where,
            f"{at:,} bytes",
            f"{size:,} bytes",
        )
    if at < size:
        what = "file is longer than its header says"
        _refuse("header-hole", what, file, f"{at:,} bytes", f"{size:,} bytes")


def _position(info: TensorInfo) -> tuple[int, int]:
    return info[4], info[5]


def _entry(name: str, entry: Any, file: str) -> tuple[Any, Any, Any]:
    """Pick the three keys of an entry with other keys or in another order; unknown keys are ignored."""
    where = f"{file}, {_printable(name)}"
    if type(entry) is not dict:
        _refuse(
            "header-entry",
            "a tensor's entry is not an object",
            where,
            "dtype, shape, data_offsets",
            _kind(entry),
        )
    missing = [key for key in ("dtype", "shape", "data_offsets") if key not in entry]
    if missing:
        found = name_some([_printable(key) for key in entry]) or "nothing"
        _refuse(
            "header-entry",
            f"a tensor's entry lacks `{missing[0]}`",
            where,
            "dtype, shape, data_offsets",
            found,
        )
    for key, value in entry.items():
        if key not in ("dtype", "shape", "data_offsets") and not _is_plain(value, MAX_DEPTH):
            _refuse(
                "header-json", "a tensor's entry holds a value out of range", where, None, _printable(key)
            )
    return entry["dtype"], entry["shape"], entry["data_offsets"]


def _is_plain(value: Any, depth: int) -> bool:
    """Hold values that nobody reads to the limits of ordinary JSON readers."""
    if depth == 0:
        return False
    if isinstance(value, dict):
        return all(_is_text(k) and _is_plain(v, depth - 1) for k, v in value.items())
    if isinstance(value, list | tuple):
        return all(_is_plain(v, depth - 1) for v in value)
    if isinstance(value, str):
        return _is_text(value)
    return not isinstance(value, int) or value.bit_length() < 1024


def _explain(name: str, dtype: Any, shape: Any, offsets: Any, file: str, data: int) -> NoReturn:
    """Say which rule an entry breaks. ``_check`` found that it breaks one."""
    if not _is_text(name):
        _refuse("header-json", "a tensor's name is not Unicode", file, "text", _printable(name))
    where = f"{file}, {_printable(name)}"
    if type(dtype) is not str or dtype not in BITS:
        found = _printable(dtype) if type(dtype) is str else _kind(dtype)
        _refuse("header-dtype", f"`{_printable(name)}` has an unknown dtype", where, ", ".join(BITS), found)
    if type(shape) is not list or len(shape) > MAX_RANK or not all(_is_count(dim) for dim in shape):
        expected = f"at most {MAX_RANK} integers from 0 on"
        _refuse(
            "header-shape", f"`{_printable(name)}` has a shape that is none", where, expected, _shown(shape)
        )
    if type(offsets) is not list or len(offsets) != 2 or not all(_is_count(at) for at in offsets):
        expected = f"two integers from 0 to {data:,}"
        _refuse(
            "header-offsets",
            f"`{_printable(name)}` has offsets that are none",
            where,
            expected,
            _shown(offsets),
        )
    begin, end = offsets
    if end < begin:
        what = f"`{_printable(name)}` ends before it begins"
        _refuse("header-offsets", what, where, f"an end from {begin:,} on", f"{end:,}")
    elements = 1
    for dim in shape:
        elements *= dim
        if elements > MAX_SIZE:
            what = f"`{_printable(name)}` has a shape that no file can hold"
            expected = f"{end - begin:,} bytes, as its offsets say"
            _refuse("header-shape", what, where, expected, f"{dtype} {_shown(shape)}")
    bits = elements * BITS[dtype]
    if bits % 8:
        what = f"`{_printable(name)}` does not fill whole bytes"
        _refuse(
            "header-shape", what, where, "a multiple of 8 bits", f"{bits:,} bits, {dtype} {_shown(shape)}"
        )
    what = f"the shape of `{_printable(name)}` does not fit its bytes"
    expected = f"{bits // 8:,} bytes ({dtype} {_shown(shape)})"
    _refuse("header-span", what, where, expected, f"{end - begin:,} bytes")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_SIZE  # not isinstance: JSON's true is an int to Python


def _is_text(value: str) -> bool:
    """JSON can spell half of a surrogate pair; such a string cannot be written or printed."""
    return value.isascii() or not any("\ud800" <= char <= "\udfff" for char in value)


def _printable(text: str) -> str:
    """Show a name of a hostile file on one line; ordinary names stay in full."""
    shown = text if len(text) <= 500 else f"{text[:400]}... ({len(text):,} characters)"
    if shown.isprintable():
        return shown
    return shown.encode("unicode_escape", "surrogatepass").decode("ascii")


def _shown(value: Any) -> str:
    if type(value) is not list:
        return _kind(value)
    if len(value) > MAX_RANK:
        return f"{len(value):,} values"
    return "[" + ", ".join(_number(item) for item in value) + "]"


def _number(value: Any) -> str:
    if type(value) is int and value.bit_length() > 256:
        return f"a number of {value.bit_length():,} bits"
    return str(value) if type(value) in (int, float) else _kind(value)


def _kind(value: Any) -> str:
    names = {dict: "an object", tuple: "an object", list: "a list", str: "a string", bool: "true or false"}
    if value is None:
        return "null"
    return names.get(type(value), "a number")


def _first_line(err: BaseException) -> str:
    return "nested too deep" if isinstance(err, RecursionError) else str(err).partition("\n")[0][:200]


# ---------------------------------------------------------------- names


_DIGITS = re.compile(r"([0-9]+)")


def natural_order(name: str) -> tuple[str, str]:
    """Sort key: runs of digits compare as numbers (``layers.2`` before ``layers.10``), the rest as text.

    A number stands in the key as its length and its digits after a NUL, which sorts before any text; so no
    run is too long to compare, and the key is one string. Equal numbers with different zeros in front fall
    back to the name itself.
    """
    return _DIGITS.sub(_numbered, name), name


def _numbered(match: re.Match[str]) -> str:
    return _number_key(match[0]) if len(match[0]) < 16 else _number_key.__wrapped__(match[0])


@lru_cache(maxsize=4096)  # names of a model repeat few numbers many times; long runs of digits are not kept
def _number_key(digits: str) -> str:
    digits = digits.lstrip("0")
    return "\0" + chr(min(len(digits), 0x10FFFF)) + digits
