"""safetensors headers, rule by rule, from raw bytes; the library is asked about every one of them."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from w4pack.convert.core.dtypes import DTYPES
from w4pack.convert.errors import SourceError
from w4pack.convert.files import tensorfile as t
from w4pack.convert.files.shards import alignment, index_json, new_tensor, place, plan_shards


def framed(header: bytes | str, data: bytes = b"") -> bytes:
    """Return the bytes of a file, with the true length of its header."""
    raw = header.encode() if isinstance(header, str) else header
    return struct.pack("<Q", len(raw)) + raw + data


def read(blob: bytes, name: str = "x.safetensors") -> t.Header:
    """Read a header as ``Checkpoint`` does; fails if a read leaves the file."""

    def at(offset: int, length: int) -> bytes:
        assert offset >= 0
        assert offset + length <= len(blob)
        return blob[offset : offset + length]

    return t.read_header(name, len(blob), at)


def library_accepts(blob: bytes) -> bool:
    try:
        safetensors.deserialize(blob)
    except safetensors.SafetensorError:
        return False
    return True


ENTRY = '{"dtype":"F16","shape":[2,2],"data_offsets":[0,8]}'
EIGHT = b"\0" * 8


def entry(dtype: str = '"F16"', shape: str = "[2,2]", offsets: str = "[0,8]") -> str:
    return f'{{"a":{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}}}}}'


def two(second: str) -> str:
    return f'{{"a":{ENTRY},"b":{{"dtype":"F16","shape":[4],"data_offsets":{second}}}}}'


# ---- what is accepted ---------------------------------------------------------------------------------


def test_a_file_written_by_hand_is_read_to_the_byte() -> None:
    header = (
        '{"__metadata__":{"format":"pt"},'
        '"b":{"dtype":"I32","shape":[3],"data_offsets":[4,16]},'
        '"a":{"dtype":"BF16","shape":[1,2],"data_offsets":[0,4]}}  '
    )
    got = read(framed(header, bytes(16)))
    start = 8 + len(header)
    assert got.tensors == (
        t.TensorInfo("a", "BF16", (1, 2), "x.safetensors", start, 4),
        t.TensorInfo("b", "I32", (3,), "x.safetensors", start + 4, 12),
    )
    assert got.metadata == {"format": "pt"}
    assert got.data_start == start


ACCEPTED: dict[str, bytes] = {
    "no tensor": framed("{}"),
    "metadata only": framed('{"__metadata__":{"a":"b"}}'),
    "metadata null": framed('{"__metadata__":null}'),
    "metadata with the keys of an entry": framed(
        '{"__metadata__":{"dtype":"a","shape":"b","data_offsets":"c"}}'
    ),
    "space first": framed(" " + entry(), EIGHT),
    "spaces last": framed(entry() + " " * 100, EIGHT),
    "another key order": framed('{"a":{"data_offsets":[0,8],"shape":[4],"dtype":"F16"}}', EIGHT),
    "unknown key": framed(
        '{"a":{"dtype":"F16","shape":[4],"data_offsets":[0,8],"more":[1,{"x":2.5}]}}', EIGHT
    ),
    "scalar": framed(entry('"F64"', "[]", "[0,8]"), EIGHT),
    "empty tensor": framed(entry('"F16"', "[0,7]", "[0,0]")),
    "empty tensors in the middle": framed(
        '{"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},"z":{"dtype":"U8","shape":[0],"data_offsets":[8,8]},'
        '"y":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
        EIGHT,
    ),
    "4 bit, whole bytes": framed(entry('"F4"', "[4,4]", "[0,8]"), EIGHT),
    "6 bit, whole bytes": framed(entry('"F6_E2M3"', "[4]", "[0,3]"), b"\0" * 3),
    "a name that looks like a path": framed('{"../../w":' + ENTRY + "}", EIGHT),
    "a name with NUL": framed('{"a\\u0000b":' + ENTRY + "}", EIGHT),
    "a name of another script": framed('{"größe.表":' + ENTRY + "}", EIGHT),
    "a name spelled with a surrogate pair": framed('{"\\ud83d\\ude00":' + ENTRY + "}", EIGHT),
    "the empty name": framed('{"":' + ENTRY + "}", EIGHT),
    "rank 32": framed(entry('"U8"', "[" + "1," * 31 + "8]"), EIGHT),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_accepted_here_and_by_the_library(case: str) -> None:
    assert library_accepts(ACCEPTED[case])
    got = read(ACCEPTED[case])
    assert sum(info.nbytes for info in got.tensors) == len(ACCEPTED[case]) - got.data_start


def test_metadata_may_use_the_keys_of_an_entry() -> None:
    assert read(ACCEPTED["metadata with the keys of an entry"]).metadata == {
        "dtype": "a",
        "shape": "b",
        "data_offsets": "c",
    }


# ---- what is refused ----------------------------------------------------------------------------------

# case -> file, code, words that the message must hold
REFUSED: dict[str, tuple[bytes, str, tuple[str, ...]]] = {
    "no byte": (b"", "header-too-small", ("8", "0")),
    "4 bytes": (b"\x08\0\0\0", "header-too-small", ("8", "4")),
    "8 bytes": (struct.pack("<Q", 64), "header-too-large", ("64", "8")),
    "length of 0": (struct.pack("<Q", 0), "header-json", ()),
    "length of 2^60": (
        struct.pack("<Q", 2**60) + b"{}",
        "header-too-large",
        ("1,152,921,504,606,846,976", "10"),
    ),
    "length of 2^63": (struct.pack("<Q", 2**63) + b"{}", "header-too-large", ("9,223,372,036,854,775,808",)),
    "length of 2^64 - 1": (b"\xff" * 8 + b"{}", "header-too-large", ("18,446,744,073,709,551,615",)),
    "length one too many": (struct.pack("<Q", 3) + b"{}", "header-too-large", ("2", "3")),
    "not JSON": (framed("{hello"), "header-json", ()),
    "cut short": (framed(entry()[:-3], EIGHT), "header-json", ()),
    "not an object": (framed("[1]"), "header-json", ("a list",)),
    "a number": (framed("7"), "header-json", ("a number",)),
    "NaN": (framed('{"a":NaN}'), "header-json", ()),
    "two objects": (framed("{}{}"), "header-json", ()),
    "not UTF-8": (framed(b'{"\xff":1}'), "header-json", ()),
    "byte order mark": (framed(b"\xef\xbb\xbf{}"), "header-json", ()),
    "UTF-16": (framed("{}".encode("utf-16-le")), "header-json", ()),
    "nested 100,000 deep": (framed('{"a":' + "[" * 100_000 + "]" * 100_000 + "}"), "header-json", ("deep",)),
    "number of 5,000 digits": (framed(entry(shape="[" + "9" * 5000 + "]"), EIGHT), "header-json", ()),
    "half a surrogate pair": (framed('{"\\ud800":' + ENTRY + "}", EIGHT), "header-json", ("a",)),
    "name twice": (framed('{"a":' + ENTRY + ',"a":' + ENTRY + "}", EIGHT), "header-duplicate", ("`a`",)),
    "name twice, spelled apart": (
        framed('{"a":' + ENTRY + ',"\\u0061":' + ENTRY + "}", EIGHT),
        "header-duplicate",
        ("`a`",),
    ),
    "key twice in an entry": (
        framed('{"a":{"dtype":"F16","dtype":"F16","shape":[4],"data_offsets":[0,8]}}', EIGHT),
        "header-duplicate",
        ("dtype",),
    ),
    "metadata a list": (framed('{"__metadata__":[]}'), "header-metadata", ("a list",)),
    "metadata with an integer": (framed('{"__metadata__":{"n":1}}'), "header-metadata", ("n", "a number")),
    "metadata nested": (framed('{"__metadata__":{"n":{}}}'), "header-metadata", ("n", "an object")),
    "entry a string": (framed('{"a":"F16"}'), "header-entry", ("a", "a string")),
    "entry null": (framed('{"a":null}'), "header-entry", ("null",)),
    "no dtype": (framed('{"a":{"shape":[4],"data_offsets":[0,8]}}', EIGHT), "header-entry", ("dtype",)),
    "no shape": (framed('{"a":{"dtype":"F16","data_offsets":[0,8]}}', EIGHT), "header-entry", ("shape",)),
    "no offsets": (framed('{"a":{"dtype":"F16","shape":[4]}}', EIGHT), "header-entry", ("data_offsets",)),
    "dtype F3": (framed(entry('"F3"'), EIGHT), "header-dtype", ("F3", "BF16")),
    "dtype in small letters": (framed(entry('"f16"'), EIGHT), "header-dtype", ("f16",)),
    "dtype a list": (framed(entry('["F16"]'), EIGHT), "header-dtype", ("a list",)),
    "dtype null": (framed(entry("null"), EIGHT), "header-dtype", ("null",)),
    "shape with true": (framed(entry(shape="[true,4]"), EIGHT), "header-shape", ("true",)),
    "shape with 1.0": (framed(entry(shape="[1.0,4]"), EIGHT), "header-shape", ("1.0",)),
    "shape with a string": (framed(entry(shape='["2",2]'), EIGHT), "header-shape", ("a string",)),
    "shape negative": (framed(entry(shape="[-2,-2]"), EIGHT), "header-shape", ("-2",)),
    "shape a number": (framed(entry(shape="4"), EIGHT), "header-shape", ("a number",)),
    "shape a string": (framed(entry(shape='"22"'), EIGHT), "header-shape", ("a string",)),
    "shape an object": (framed(entry(shape='{"2":2}'), EIGHT), "header-shape", ("an object",)),
    "shape beyond 64 bits": (framed(entry(shape=f"[{2**64}]"), EIGHT), "header-shape", (str(2**64),)),
    "product overflows": (framed(entry(shape=f"[{2**40},{2**40}]"), EIGHT), "header-shape", (str(2**40),)),
    "product overflows before a zero": (
        framed(entry(shape=f"[{2**40},{2**40},0]", offsets="[0,0]")),
        "header-shape",
        (),
    ),
    "shape of 10,000 twos": (
        framed(entry(shape="[" + "2," * 9999 + "2]"), EIGHT),
        "header-shape",
        ("10,000",),
    ),
    "offsets past 64 bits": (framed(entry(offsets=f"[0,{2**64}]"), EIGHT), "header-offsets", (str(2**64),)),
    "offsets negative": (framed(entry(offsets="[-8,0]"), EIGHT), "header-offsets", ("-8",)),
    "offsets reversed": (framed(entry(offsets="[8,0]"), EIGHT), "header-offsets", ("8", "0")),
    "offsets with floats": (framed(entry(offsets="[0.0,8.0]"), EIGHT), "header-offsets", ("8.0",)),
    "offsets with false": (framed(entry(offsets="[false,8]"), EIGHT), "header-offsets", ("true or false",)),
    "offsets of three": (framed(entry(offsets="[0,4,8]"), EIGHT), "header-offsets", ("[0, 4, 8]",)),
    "offsets a string": (framed(entry(offsets='"08"'), EIGHT), "header-offsets", ("a string",)),
    "shape larger than its bytes": (
        framed(entry(shape="[2,3]"), EIGHT),
        "header-span",
        ("12", "8", "F16 [2, 3]"),
    ),
    "shape smaller than its bytes": (framed(entry(shape="[3]"), EIGHT), "header-span", ("6", "8")),
    "4 bit, half a byte": (framed(entry('"F4"', "[3]", "[0,2]"), b"\0\0"), "header-shape", ("12 bits",)),
    "hole before the first": (framed(entry(offsets="[8,16]"), EIGHT * 2), "header-hole", ("0", "8")),
    "hole between": (framed(two("[16,24]"), EIGHT * 3), "header-hole", ("`b`", "`a`", "8", "16")),
    "overlap": (framed(two("[4,12]"), b"\0" * 12), "header-overlap", ("`b`", "`a`", "4", "8")),
    "same bytes twice": (framed(two("[0,8]"), EIGHT), "header-overlap", ("`b`",)),
    "bytes after the last": (framed(entry(), EIGHT + b"\0"), "header-hole", ("72 bytes", "73 bytes")),
    "bytes and no tensor": (framed("{}", b"\0"), "header-hole", ()),
    "data cut": (framed(entry(), EIGHT[:-1]), "file-too-short", ()),
    "offsets far past the end": (
        framed(entry('"U8"', "[8000000000]", "[0,8000000000]"), EIGHT),
        "file-too-short",
        ("8,000,000,0",),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_code_file_and_numbers(case: str) -> None:
    blob, code, words = REFUSED[case]
    with pytest.raises(SourceError) as caught:
        read(blob, "shard-7.safetensors")
    error = caught.value
    assert error.exit_code == 1
    assert error.code == code
    assert error.where is not None
    assert error.where.startswith("shard-7.safetensors")
    for word in words:
        assert word in str(error)
    first = str(error).partition("\n")[0]
    assert not first.endswith(".")
    assert first.isprintable()


# The format's document forbids these; the library (0.8.0) lets them pass, or has wider limits.
STRICTER = {
    "name twice",
    "name twice, spelled apart",
    "shape of 10,000 twos",
}


@pytest.mark.parametrize("case", sorted(set(REFUSED) - STRICTER))
def test_the_library_refuses_it_too(case: str) -> None:
    assert not library_accepts(REFUSED[case][0])


def test_cut_data_gives_both_sizes() -> None:
    blob = framed(entry(), EIGHT)
    with pytest.raises(SourceError) as caught:
        read(blob[:-3])
    assert caught.value.expected == f"{len(blob)} bytes"
    assert caught.value.found == f"{len(blob) - 3} bytes"
    assert caught.value.where == "x.safetensors, a"


def test_names_of_hostile_files_stay_on_one_line() -> None:
    name = json.dumps("evil\n\x1b[2Jerror: no\u2028" + "x" * 5000)
    with pytest.raises(SourceError) as caught:
        read(framed("{" + name + ':{"dtype":"F3","shape":[],"data_offsets":[0,0]}}'))
    assert all(line.isprintable() for line in str(caught.value).split("\n"))
    assert len(str(caught.value)) < 3000


def test_a_pointer_of_git_lfs_is_called_by_its_name() -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 4976698672\n"
    with pytest.raises(SourceError) as caught:
        read(pointer)
    assert caught.value.code == "lfs-pointer"
    assert caught.value.hint == "git lfs pull"


def test_header_length_is_bounded_before_it_is_read() -> None:
    prefix = struct.pack("<Q", t.MAX_HEADER + 1)
    with pytest.raises(SourceError) as caught:
        t.header_length(prefix, "x", 2**40)
    assert (caught.value.code, caught.value.found) == ("header-too-large", "100,000,001")
    assert t.header_length(struct.pack("<Q", t.MAX_HEADER), "x", 2**40) == t.MAX_HEADER


@pytest.mark.parametrize(
    "raw",
    [
        b"{" * (t.MAX_TENSORS + 1),
        b'{"a":[' + b"[]," * (t.MAX_TENSORS * 5),
        b'{"a":[' + b"0," * (t.MAX_PARTS + 1),
    ],
    ids=["objects", "lists", "numbers"],
)
def test_containers_are_counted_before_they_are_built(raw: bytes) -> None:
    with pytest.raises(SourceError) as caught:
        t.parse_header(raw, "x", len(raw) + 8)
    assert caught.value.code == "header-too-many"


def test_dtypes_agree_with_the_carriers_and_the_library() -> None:
    assert {tag: bits for tag, (bits, _) in DTYPES.items()} == {
        k: v for k, v in t.BITS.items() if k in DTYPES
    }
    for tag, bits in t.BITS.items():
        blob = framed(entry(f'"{tag}"', "[8]", f"[0,{bits}]"), b"\0" * bits)
        assert library_accepts(blob)
        assert read(blob).tensors[0].nbytes == bits


# ---- writing ------------------------------------------------------------------------------------------


def power_of(size: int) -> int:
    """The largest power of two up to 4096 that divides a size, by trying."""
    return max(p for p in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096) if size % p == 0)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 6, 8, 24, 2048, 4096, 8192, 12288, 4098, 5 * 2**33])
def test_alignment(size: int) -> None:
    assert alignment(size) == power_of(size)


def test_natural_order() -> None:
    names = ["a.10.b", "a.2.b", "a.2", "a.02.b", "a", "b.1", "a.2.a", "a." + "9" * 5000, "10", "9"]
    got = sorted(names, key=t.natural_order)
    assert got == ["9", "10", "a", "a.2", "a.2.a", "a.02.b", "a.2.b", "a.10.b", "a." + "9" * 5000, "b.1"]


def spelled_out(name: str) -> tuple[list[tuple[str, int]], str]:
    """The order in words: text, then the number after it, again and again; then the name."""
    parts: list[tuple[str, int]] = [("", -1)]
    for char in name:
        text, number = parts[-1]
        if char in "0123456789":
            parts[-1] = (text, 10 * max(number, 0) + int(char))
        elif number >= 0:
            parts.append((char, -1))
        else:
            parts[-1] = (text + char, -1)
    return parts, name


@given(st.lists(st.text("ab.019\u0661", max_size=8), max_size=6))
def test_natural_order_is_text_then_number_then_text(names: list[str]) -> None:
    assert sorted(names, key=t.natural_order) == sorted(names, key=spelled_out)


def test_bytes_of_a_small_file() -> None:
    tensors = [
        new_tensor("n.10", "F16", (3,)),
        new_tensor("n.9", "F16", (3,)),
        new_tensor("q", "I32", (4, 4)),
    ]
    shard = place("model.safetensors", tensors)
    text = (
        '{"__metadata__":{"format":"pt"},'
        '"q":{"dtype":"I32","shape":[4,4],"data_offsets":[0,64]},'
        '"n.9":{"dtype":"F16","shape":[3],"data_offsets":[64,70]},'
        '"n.10":{"dtype":"F16","shape":[3],"data_offsets":[70,76]}}'
    )
    assert shard.header == struct.pack("<Q", 4088) + text.encode().ljust(4088)
    assert [(i.name, i.offset, i.file) for i in shard.tensors] == [
        ("q", 4096, "model.safetensors"),
        ("n.9", 4160, "model.safetensors"),
        ("n.10", 4166, "model.safetensors"),
    ]
    assert shard.size == 4172


TAGS = st.sampled_from(sorted(tag for tag, bits in t.BITS.items() if bits >= 8))
SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 5, 8, 16, 64]), max_size=3)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(lambda name: name != t.METADATA)
TENSORS = st.dictionaries(NAMES, st.tuples(TAGS, SHAPES), max_size=12)


@given(TENSORS, st.randoms(use_true_random=False))
def test_any_file_we_lay_out_is_read_by_the_library_and_aligned(made: dict[str, Any], random: Any) -> None:
    tensors = [new_tensor(name, tag, shape) for name, (tag, shape) in made.items()]
    shard = place("model.safetensors", tensors)
    random.shuffle(tensors)
    assert place("model.safetensors", tensors) == shard  # whatever order they came in
    blob = shard.header + bytes(shard.size - len(shard.header))
    assert len(shard.header) % 4096 == 0
    seen = {name: (info["dtype"], tuple(info["shape"])) for name, info in safetensors.deserialize(blob)}
    assert seen == {name: (tag, tuple(shape)) for name, (tag, shape) in made.items()}
    assert set(read(blob, "model.safetensors").tensors) == set(shard.tensors)
    for info in shard.tensors:
        assert info.offset % power_of(info.nbytes) == 0


@given(TENSORS, st.integers(0, 3), st.integers(1, 4000))
def test_shards_hold_every_tensor_once_and_keep_the_limit(made: dict[str, Any], cut: int, limit: int) -> None:
    tensors = [new_tensor(name, tag, shape) for name, (tag, shape) in made.items()]
    groups = {name: name[:cut] for name in made if cut}
    shards = plan_shards(tensors, limit, groups)
    placed = [info for shard in shards for info in shard.tensors]
    assert sorted(info.name for info in placed) == sorted(made)
    assert plan_shards(tensors[::-1], limit, groups) == shards
    total = {key: sum(i.nbytes for i in tensors if groups.get(i.name) == key) for key in set(groups.values())}
    for shard in shards:
        data = sum(info.nbytes for info in shard.tensors)
        assert data <= limit or sum(info.nbytes > 0 for info in shard.tensors) == 1
    for key, size in total.items():
        homes = {info.file for info in placed if groups.get(info.name) == key}
        assert size > limit or len(homes) <= 1


def test_names_of_shards_and_the_index() -> None:
    tensors = [new_tensor(f"layers.{i}.w", "U8", (100,)) for i in (10, 9, 1)]
    one = plan_shards(tensors, 300)
    assert [shard.name for shard in one] == ["model.safetensors"]
    shards = plan_shards(tensors, 250)
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert [(s.name, [i.name for i in s.tensors]) for s in shards] == [
        (names[0], ["layers.1.w", "layers.9.w"]),
        (names[1], ["layers.10.w"]),
    ]
    assert index_json(shards).decode() == (
        '{\n  "metadata": {\n    "total_size": 300\n  },\n  "weight_map": {\n'
        f'    "layers.1.w": "{names[0]}",\n    "layers.9.w": "{names[0]}",\n    "layers.10.w": "{names[1]}"\n'
        "  }\n}\n"
    )


def test_f43_a_tensor_above_the_limit_gets_a_shard_of_its_own() -> None:
    tensors = [
        new_tensor("a", "F16", (2**30,)),
        new_tensor("b", "F16", (6 * 2**30,)),
        new_tensor("c", "F16", (1,)),
    ]
    shards = plan_shards(tensors, 5 * 10**9)
    assert [[i.name for i in shard.tensors] for shard in shards] == [["a"], ["b"], ["c"]]
    assert shards[1].name == "model-00002-of-00003.safetensors"


def test_f43_two_hundred_gigabytes_of_headers_make_shards_of_the_limit() -> None:
    tensors = [
        new_tensor(f"layers.{i}.mlp.{p}.qweight", "I32", (1024, 32768))
        for i in range(160)
        for p in "abcdefghij"
    ]
    groups = {info.name: info.name.rpartition(".")[0] for info in tensors}
    assert sum(info.nbytes for info in tensors) > 200 * 10**9
    shards = plan_shards(tensors, 60 * 10**9, groups)
    assert len(shards) == 4
    assert all(shard.size - len(shard.header) <= 60 * 10**9 for shard in shards)


def test_one_linear_stays_together() -> None:
    parts = {"qweight": 400, "scales": 40, "qzeros": 60}
    tensors = [new_tensor(f"l.{i}.{part}", "U8", (size,)) for i in range(3) for part, size in parts.items()]
    groups = {info.name: info.name.rpartition(".")[0] for info in tensors}
    shards = plan_shards(tensors, 900, groups)
    assert [sorted({groups[i.name] for i in shard.tensors}) for shard in shards] == [
        ["l.0"],
        ["l.1"],
        ["l.2"],
    ]
    loose = plan_shards(tensors, 900)
    assert len(loose) == 2  # without groups a shard is filled to the limit


def test_numpy_reads_what_was_laid_out(tmp_path: Any) -> None:
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    shard = place("model.safetensors", [new_tensor("x", "F32", (3, 4))])
    path = tmp_path / shard.name
    path.write_bytes(shard.header + values.tobytes())
    assert (safetensors.numpy.load_file(path)["x"] == values).all()
