"""Files, memory, environment: rows F30 to F43 of the failure list (the Hub rows stand in tests/hub)."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from compare import same_numbers

import builders as b
import oracle
from runner import Run, convert, run, run_process


def small(**more: Any) -> dict[str, Any]:
    """Return the config with the fewest weights."""
    return b.llama_config(**{"intermediate_size": 256, "num_key_value_heads": 1, "vocab_size": 64, **more})


def folder(path: Path, shards: int = 1, **more: Any) -> Path:
    """Write the small GPTQ checkpoint."""
    return b.write(path, b.model(30, small()), b.gptq, b.gptq_config(), shards=shards, **more)


def tree(path: Path) -> dict[str, str]:
    """Return the hash of every file below a folder."""
    files = sorted(p for p in path.rglob("*") if p.is_file())
    return {str(p.relative_to(path)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def refused(
    source: Path, out: Path, *said: object, code: int = 1, options: Any = (), to: str = "marlin"
) -> Run:
    """Convert; it must stop with this code and these words, leave no OUT, and leave the source alone."""
    before = tree(source) if source.is_dir() else {}
    done = convert(source, out, to, *options).expect(code, *said)
    assert not out.exists()
    assert (tree(source) if source.is_dir() else {}) == before
    return done


def accepted(source: Path, out: Path, *options: str, to: str = "marlin") -> Run:
    """Convert the small checkpoint and compare every module."""
    done = convert(source, out, to, *options).expect(0)
    want, got = b.model(30, small()).linears, oracle.decode_folder(out)
    assert set(got) == set(want)
    for name, linear in want.items():
        same_numbers(got[name], linear, name)
    return done


# --- F30: the index and the shards disagree ---------------------------------------------------------------


def test_f30_whole_set_is_accepted(tmp_path: Path) -> None:
    accepted(folder(tmp_path / "src", shards=3), tmp_path / "out")


def test_f30_missing_shard_is_named_with_what_it_should_hold(tmp_path: Path) -> None:
    source = folder(tmp_path / "src", shards=3)
    gone = "model-00002-of-00003.safetensors"
    count = len(oracle.read_safetensors(source / gone))
    (source / gone).unlink()
    refused(source, tmp_path / "out", gone, count)


def test_f30_tensor_that_its_shard_lacks_is_named(tmp_path: Path) -> None:
    source = folder(tmp_path / "src", shards=3)
    shard = source / "model-00003-of-00003.safetensors"
    tensors = oracle.read_safetensors(shard)
    name = next(n for n in tensors if n.endswith(".qweight"))
    del tensors[name]
    shard.write_bytes(b.safetensors_bytes(tensors))
    refused(source, tmp_path / "out", name, shard.name)


def test_f30_wrong_total_size_is_only_said(tmp_path: Path) -> None:
    source = folder(tmp_path / "src", shards=3)
    index = source / "model.safetensors.index.json"
    value = json.loads(index.read_text())
    right = value["metadata"]["total_size"]
    value["metadata"]["total_size"] = right + 7
    b.write_json(index, value)
    done = accepted(source, tmp_path / "out")
    told = json.dumps([e for e in done.events if e["event"] in ("plan", "warning")])
    assert "total_size" in told


def test_f30_numbered_files_without_an_index_and_with_a_gap(tmp_path: Path) -> None:
    source = folder(tmp_path / "src", shards=3)
    (source / "model.safetensors.index.json").unlink()
    (source / "model-00002-of-00003.safetensors").unlink()
    refused(source, tmp_path / "out", "model-00002-of-00003.safetensors")


@pytest.mark.parametrize("broken", ["[]", "{", '{"weight_map": {"x": 7}}', '{"weight_map": []}', "null"])
def test_f30_index_that_is_no_index(broken: str, tmp_path: Path) -> None:
    source = folder(tmp_path / "src", shards=3)
    (source / "model.safetensors.index.json").write_text(broken)
    refused(source, tmp_path / "out", "model.safetensors.index.json")


def test_f30_same_tensor_in_two_shards(tmp_path: Path) -> None:
    source = folder(tmp_path / "src", shards=2)
    first, second = (source / f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    name = "model.norm.weight"
    tensors = {p: oracle.read_safetensors(p) for p in (first, second)}
    owner, other = (first, second) if name in tensors[first] else (second, first)
    values = tensors[owner][name].array().copy()
    values[0] += np.float16(1)
    other.write_bytes(b.safetensors_bytes(tensors[other] | {name: b.tensor(values, "F16")}))
    done = convert(source, tmp_path / "out", "marlin").expect(0)  # the index says which one counts
    assert oracle.read_folder(tmp_path / "out")[name] == tensors[owner][name]
    (warning,) = [e for e in done.events if e["event"] == "warning"]
    assert name in warning["where"]
    assert other.name in warning["where"]


# --- F31: two sets of weights in one folder ---------------------------------------------------------------


def test_f31_only_what_the_index_names_is_read_or_copied(tmp_path: Path) -> None:
    source = folder(tmp_path / "src", shards=2)
    (source / "original").mkdir()
    strays = ["consolidated.safetensors", "original/x.pth", "pytorch_model.bin", "model.safetensors"]
    for stray in strays:
        (source / stray).write_bytes(b"not even weights" * 3)
    done = accepted(source, tmp_path / "out")
    assert not [s for s in strays if s != "model.safetensors" and (tmp_path / "out" / s).exists()]
    told = json.dumps([e for e in done.events if e["event"] in ("plan", "warning")])
    for stray in strays:
        assert stray in told, stray


@pytest.mark.parametrize("name", ["model.safetensors", "gptq_model-4bit-128g.safetensors", "any.safetensors"])
def test_f31_one_safetensors_file_of_any_name_wins_over_bin(name: str, tmp_path: Path) -> None:
    source = folder(tmp_path / "src")
    (source / "model.safetensors").rename(source / name)
    (source / "pytorch_model.bin").write_bytes(b"x" * 100)
    accepted(source, tmp_path / "out")
    assert not (tmp_path / "out" / "pytorch_model.bin").exists()


def test_f31_two_safetensors_files_without_an_index(tmp_path: Path) -> None:
    source = folder(tmp_path / "src")
    weights = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").unlink()
    for name in ("a.safetensors", "b.safetensors"):
        (source / name).write_bytes(weights)
    convert(source, tmp_path / "out", "marlin").expect(3, "a.safetensors", "b.safetensors")  # ambiguous
    assert not (tmp_path / "out").exists()


# --- F32: truncated or damaged shards ---------------------------------------------------------------------


def with_header(text: bytes, data: bytes = b"") -> bytes:
    """Frame header bytes as a safetensors file."""
    return struct.pack("<Q", len(text)) + text + data


def entry(**more: Any) -> bytes:
    """Return a header with one tensor, with changes."""
    return json.dumps({"x": {"dtype": "F16", "shape": [2, 2], "data_offsets": [0, 8], **more}}).encode()


DAMAGE: dict[str, bytes] = {
    "0 bytes": b"",
    "4 bytes": b"\x08\0\0\0",
    "8 bytes": struct.pack("<Q", 64),
    "header longer than file": struct.pack("<Q", 2**60) + b"{}",
    "header of 90 MiB": struct.pack("<Q", 90 << 20) + b"{}",
    "negative as signed": struct.pack("<q", -1) + b"{}",
    "json cut short": with_header(entry()[:-5], b"\0" * 8),
    "not an object": with_header(b"[1, 2]"),
    "not utf-8": with_header(b'{"\xff\xfe": 1}'),
    "offsets past the end": with_header(entry(data_offsets=[0, 800]), b"\0" * 8),
    "offsets reversed": with_header(entry(data_offsets=[8, 0]), b"\0" * 8),
    "negative offset": with_header(entry(data_offsets=[-8, 0]), b"\0" * 8),
    "offsets are floats": with_header(entry(data_offsets=[0.0, 8.0]), b"\0" * 8),
    "shape lies": with_header(entry(shape=[2, 3]), b"\0" * 8),
    "negative shape": with_header(entry(shape=[-2, -2]), b"\0" * 8),
    "shape is huge": with_header(entry(shape=[2**40, 2**40]), b"\0" * 8),
    "shape is true": with_header(entry(shape=[True, 4]), b"\0" * 8),
    "unknown dtype": with_header(entry(dtype="F3"), b"\0" * 8),
    "dtype is a list": with_header(entry(dtype=["F16"]), b"\0" * 8),
    "no dtype": with_header(b'{"x": {"shape": [1], "data_offsets": [0, 2]}}', b"\0" * 2),
    "entry is a string": with_header(b'{"x": "F16"}'),
    "hole": with_header(entry(), b"\0" * 16),
    "data cut": with_header(entry(), b"\0" * 7),
    "overlap": with_header(
        b'{"x": {"dtype": "F16", "shape": [4], "data_offsets": [0, 8]},'
        b' "y": {"dtype": "F16", "shape": [4], "data_offsets": [4, 12]}}',
        b"\0" * 12,
    ),
    "deep nesting": with_header(b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "a key twice": with_header(
        b'{"x": {"dtype": "F16", "shape": [4], "data_offsets": [0, 8]},'
        b' "x": {"dtype": "F16", "shape": [4], "data_offsets": [0, 8]}}',
        b"\0" * 8,
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_f32_damaged_file_is_named_by_every_command(damage: str, tmp_path: Path) -> None:
    source = folder(tmp_path / "src", shards=2)
    shard = source / "model-00002-of-00002.safetensors"
    shard.write_bytes(DAMAGE[damage])
    refused(source, tmp_path / "out", shard.name)
    for words in (("inspect", source), ("check", source, "--engine", "vllm"), ("verify", source)):
        done = run(*words, "--json")
        assert done.code != 0
        done.expect(done.code, shard.name)


def test_f32_cut_shard_gives_both_sizes(tmp_path: Path) -> None:
    source = folder(tmp_path / "src", shards=2)
    shard = source / "model-00001-of-00002.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1000])
    done = refused(source, tmp_path / "out", shard.name)
    assert done.says(len(whole))
    assert done.says(len(whole) - 1000)


# --- F33: files around the weights ------------------------------------------------------------------------

SIDE: dict[str, bytes] = {
    "tokenizer.json": b'{"version": "1.0"}',
    "tokenizer_config.json": b'{"a": 1}\n',
    "special_tokens_map.json": b"{}",
    "tokenizer.model": bytes(range(256)),
    "vocab.json": b"{ }",
    "merges.txt": b"#version: 0.2\r\na b\r\n",
    "chat_template.jinja": "{{ 'Grüße' }}".encode(),
    "chat_template.json": b'{"chat_template": "x"}',
    "additional_chat_templates/tool.jinja": b"{% tool %}",
    "generation_config.json": b'{"do_sample": true, "x":1}',
    "preprocessor_config.json": b'{"size": 3}',
    "modeling_x.py": b"raise SystemExit('remote code ran')\n",
    "configuration_x.py": b"raise SystemExit('remote code ran')\n",
    "LICENSE": b"licence text",
    "NOTICE": b"",
    "größe-表.txt": b"name is not ASCII",
    "assets/deep/er/empty": b"",
}


@pytest.mark.parametrize("target", ["marlin", "awq", "dense"])
def test_f33_side_files_travel_byte_for_byte(target: str, tmp_path: Path) -> None:
    source = folder(tmp_path / "src")
    for name, data in SIDE.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(data)
    (source / "README.md").write_text("---\nlicense: mit\n---\nthe source's own card\n")
    out = tmp_path / "out"
    done = convert(source, out, target).expect(0)
    assert "remote code ran" not in done.text
    for name, data in SIDE.items():
        assert (out / name).read_bytes() == data, name
    assert (out / "README.source.md").read_bytes() == (source / "README.md").read_bytes()
    assert (out / "README.md").exists()


def test_f33_config_keeps_every_key_in_order(tmp_path: Path) -> None:
    source = folder(tmp_path / "src")
    config = json.loads((source / "config.json").read_text())
    wanted = {
        "zeta": 1, **config, "auto_map": {"AutoConfig": "configuration_x.XConfig"},
        "alpha": [1, {"b": None}], "pi": 3.0, "tiny": 1e-06, "name": "größe",
    }  # fmt: skip
    b.write_json(source / "config.json", wanted)
    for target in ("marlin", "gptq", "awq", "compressed-tensors"):
        convert(source, tmp_path / target, target).expect(0)
        got = oracle.read_config(tmp_path / target)
        assert list(got) == list(wanted)
        assert {k: v for k, v in got.items() if k != "quantization_config"} == {
            k: v for k, v in wanted.items() if k != "quantization_config"
        }


def test_f33_no_stale_quantizer_settings_stay_behind(tmp_path: Path) -> None:
    source = folder(tmp_path / "src")
    for name in ("quantize_config.json", "quant_config.json"):
        b.write_json(source / name, b.gptq_config())
    for target in ("marlin", "awq", "compressed-tensors", "dense"):
        convert(source, tmp_path / target, target).expect(0)
        for name in ("quantize_config.json", "quant_config.json", "quantization_config.json"):
            assert not (tmp_path / target / name).exists(), (target, name)
    convert(source, tmp_path / "gptq", "gptq").expect(0)
    settings = oracle.read_config(tmp_path / "gptq")["quantization_config"]
    assert json.loads((tmp_path / "gptq" / "quantize_config.json").read_text()) == settings


def test_f33_file_modes_are_ordinary(tmp_path: Path) -> None:
    previous = os.umask(0o022)
    try:
        convert(folder(tmp_path / "src"), tmp_path / "out", "marlin").expect(0)
    finally:
        os.umask(previous)
    for path in (tmp_path / "out").rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o755 if path.is_dir() else 0o644), path


# --- F34: memory ------------------------------------------------------------------------------------------

# VmHWM, not ru_maxrss: that of a child begins with the peak of the process which started it.
PEAK = """
import sys
import w4pack.cli
import numpy
def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
base = peak()
sys.argv = ["w4pack", *sys.argv[1:]]
try:
    w4pack.cli.main()
except SystemExit as stop:
    assert not stop.code, stop.code
print("PEAK", peak() - base, file=sys.stderr)
"""


def peak_kib(source: Path, out: Path, to: str) -> int:
    """Return by how much the peak memory of a conversion is above that after import."""
    words = [sys.executable, "-c", PEAK, "convert", str(source), str(out), "--to", to, "-q"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return int(done.stderr.rsplit("PEAK", 1)[1])


def big(path: Path, layers: int, hidden: int = 1024, inner: int = 4096) -> Path:
    """Write a checkpoint whose blocks repeat the same random bytes; about 7 MB a block."""
    config = b.llama_config(
        hidden_size=hidden, intermediate_size=inner, num_attention_heads=8, num_key_value_heads=8
    )
    config.update(head_dim=128, num_hidden_layers=layers)
    first = b.model(34, {**config, "num_hidden_layers": 1})
    made = b.Model(config, b.skeleton(np.random.default_rng(0), config))
    for i in range(layers):
        made.linears.update({n.replace("layers.0", f"layers.{i}"): x for n, x in first.linears.items()})
    return b.write(path, made, b.gptq, b.gptq_config())


@pytest.mark.slow
def test_f34_peak_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    peaks = {n: peak_kib(big(tmp_path / f"src{n}", n), tmp_path / f"out{n}", "marlin") for n in (6, 30)}
    assert max(peaks.values()) < 256 * 1024
    # 200 MB against 40 MB of weights; what may differ is the allocator's mood, not the model
    assert peaks[30] - peaks[6] < 48 * 1024, peaks


# --- F35: an interruption (random kills stand in tests/crash) ---------------------------------------------


def test_f35_resume_without_a_start_is_an_ordinary_run(tmp_path: Path) -> None:
    accepted(folder(tmp_path / "src"), tmp_path / "out", "--resume")


# --- F37: an artifact says what it is ---------------------------------------------------------------------


def test_f37_higher_artifact_version_is_refused_with_both_numbers(tmp_path: Path) -> None:
    out = tmp_path / "out"
    accepted(folder(tmp_path / "src"), out)
    config = oracle.read_config(out)
    config["quantization_config"]["artifact_version"] = 2
    b.write_json(out / "config.json", config)
    for words in (("convert", out, tmp_path / "again", "--to", "gptq"), ("unpack", out, tmp_path / "u")):
        done = run(*words, "--json").expect(3, "artifact_version")
        assert "2" in done.error["found"]
        assert "1" in done.error["found"].partition("2")[2] or "1" in (done.error["expected"] or "")
        assert not (tmp_path / "again").exists()
        assert not (tmp_path / "u").exists()
    run("inspect", out, "--json").expect(3, "artifact_version")


@pytest.mark.parametrize(
    "change", [{"layout": "marlin-32x32"}, {"surprise": 1}, {"online": [{"kind": "who-knows"}]}]
)
def test_f37_unknown_layout_key_or_record_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "out"
    accepted(folder(tmp_path / "src"), out)
    config = oracle.read_config(out)
    config["quantization_config"].update(change)
    b.write_json(out / "config.json", config)
    value = next(iter(change.values()))
    said = "who-knows" if isinstance(value, list) else next(iter(change))
    convert(out, tmp_path / "again", "gptq").expect(3, said)
    run("unpack", out, tmp_path / "back", "--json").expect(3, said)
    assert not (tmp_path / "again").exists()
    assert not (tmp_path / "back").exists()


def test_f37_artifact_to_artifact_is_a_copy(tmp_path: Path) -> None:
    accepted(folder(tmp_path / "src"), tmp_path / "one")
    accepted(tmp_path / "one", tmp_path / "two")
    assert (tmp_path / "one" / "model.safetensors").read_bytes() == (
        tmp_path / "two" / "model.safetensors"
    ).read_bytes()
    run("unpack", tmp_path / "two", tmp_path / "back").expect(0)
    assert oracle.read_folder(tmp_path / "back") == oracle.read_folder(tmp_path / "src")


@pytest.mark.parametrize("target", ["gptq", "awq", "compressed-tensors", "dense"])
def test_f37_artifact_is_a_source_of_every_target(target: str, tmp_path: Path) -> None:
    source = folder(tmp_path / "src")
    accepted(source, tmp_path / "one")
    convert(tmp_path / "one", tmp_path / "two", target).expect(0)
    convert(source, tmp_path / "direct", target).expect(0)
    assert oracle.read_folder(tmp_path / "two") == oracle.read_folder(tmp_path / "direct")


STOCK = """
import sys, warnings
warnings.simplefilter("ignore")
import transformers
from transformers import AutoModelForCausalLM
try:
    AutoModelForCausalLM.from_pretrained(sys.argv[1])
except Exception as error:
    print("STOPPED", type(error).__name__, str(error)[:2000])
else:
    print("LOADED")
"""


@pytest.mark.slow
@pytest.mark.pair
@pytest.mark.parametrize("kind", ["dense", "mixtral", "qwen3-moe"])
def test_f37_stock_transformers_stops_on_the_artifact(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    config = {"dense": small, "mixtral": b.mixtral_config, "qwen3-moe": b.qwen3_moe_config}[kind]()
    source = b.write(tmp_path / "src", b.model(37, config), b.gptq, b.gptq_config())
    convert(source, tmp_path / "out", "marlin").expect(0)
    words = [sys.executable, "-c", STOCK, str(tmp_path / "out")]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
    assert "STOPPED" in done.stdout, done.stdout + done.stderr[-2000:]


# --- F38: names that do not fit ---------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["marlin", "gptq", "awq", "compressed-tensors", "dense"])
def test_f38_verify_names_both_names_of_a_renamed_tensor(target: str, tmp_path: Path) -> None:
    source, out = folder(tmp_path / "src"), tmp_path / "out"
    convert(source, out, target).expect(0)
    tensors = oracle.read_folder(out)
    old = "model.layers.0.input_layernorm.weight"
    new = "model.layers.0.input_layer_norm.weight"
    tensors[new] = tensors.pop(old)
    (out / "model.safetensors").write_bytes(b.safetensors_bytes(tensors))
    for more in ((), ("--against", source)):
        failures = json.dumps(run("verify", out, *more, "--json").expect(4).data["failures"])
        assert old in failures
        assert new in failures


@pytest.mark.parametrize("target", ["marlin", "gptq", "awq", "compressed-tensors", "dense"])
def test_f38_verify_names_a_tensor_with_one_flipped_bit(target: str, tmp_path: Path) -> None:
    source, out = folder(tmp_path / "src"), tmp_path / "out"
    convert(source, out, target).expect(0)
    path = out / "model.safetensors"
    header, start = oracle.read_header(path)
    ends = {"marlin": "weight", "gptq": "qweight", "awq": "qzeros", "compressed-tensors": "weight_packed"}
    name = f"model.layers.0.mlp.down_proj.{ends.get(target, 'weight')}"
    data = bytearray(path.read_bytes())
    data[start + header[name]["data_offsets"][0] + 5] ^= 0x10
    path.write_bytes(data)
    told = run("verify", out, "--json").expect(4).data
    assert [f["tensor"] for f in told["failures"]] == [name]
    told = run("verify", out, "--against", source, "--json").expect(4).data
    assert name in json.dumps(told["failures"])


# --- F39: the environment ---------------------------------------------------------------------------------


def test_f39_too_little_room_is_known_before_the_first_byte(tmp_path: Path) -> None:
    source = folder(tmp_path / "src")
    real = os.statvfs(tmp_path)
    free = 12345
    tight = os.statvfs_result((1, 1, real.f_blocks, free, free, *tuple(real)[5:]))
    with mock.patch("os.statvfs", return_value=tight):
        done = convert(source, tmp_path / "out", "marlin").expect(1, free)
    assert not (tmp_path / "out").exists()
    total = sum(len(t.data) for t in oracle.read_folder(source).values())
    assert any(abs(int(x) - total) < total * 0.2 for x in digits(done.text)), "the bytes needed"


def digits(text: str) -> list[str]:
    """Return every whole number of a text."""
    import re

    return re.findall(r"\d+", text.replace(",", ""))


UNPRIVILEGED = 65534  # nobody


@contextlib.contextmanager
def without_root() -> Iterator[None]:
    """Give up root's right to read and write everything, for a while; others have nothing to give."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(UNPRIVILEGED)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that any user may enter (pytest's own are private)."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o777)
        yield Path(name)


def test_f39_unreadable_shard(open_folder: Path) -> None:
    source = folder(open_folder / "src", shards=2)
    shard = source / "model-00001-of-00002.safetensors"
    shard.chmod(0)
    with without_root():
        convert(source, open_folder / "out", "marlin").expect(1, shard.name)
    assert not (open_folder / "out").exists()


def test_f39_read_only_parent(open_folder: Path) -> None:
    source, parent = folder(open_folder / "src"), open_folder / "parent"
    parent.mkdir(mode=0o555)
    with without_root():
        convert(source, parent / "out", "marlin").expect(1, "parent")
    assert not list(parent.iterdir())


def test_f39_weights_that_are_a_folder(tmp_path: Path) -> None:
    source = folder(tmp_path / "src")
    (source / "model.safetensors").unlink()
    (source / "model.safetensors").mkdir()
    convert(source, tmp_path / "out", "marlin").expect(1, "src")


def test_f39_out_must_be_new_or_empty(tmp_path: Path) -> None:
    source, out = folder(tmp_path / "src"), tmp_path / "out"
    out.mkdir()
    accepted(source, out)
    before = tree(out)
    convert(source, out, "marlin").expect(1, "out", "--overwrite")
    assert tree(out) == before
    (out / "stray.txt").write_text("x")
    accepted(source, out, "--overwrite")
    assert tree(out) == before
    assert not list(tmp_path.glob("out.w4pack*"))


def test_f39_out_inside_source(tmp_path: Path) -> None:
    source = folder(tmp_path / "src")
    before = tree(source)
    for out in (source / "out", source, source / "a" / ".." / "out"):
        convert(source, out, "marlin", "--overwrite").expect(1, "src")
        assert tree(source) == before


@pytest.mark.parametrize("command", ["convert", "inspect", "check", "verify", "unpack"])
def test_f39_no_such_folder(command: str, tmp_path: Path) -> None:
    words: list[str | Path] = [command, tmp_path / "nowhere"]
    if command in ("convert", "unpack"):
        words.append(tmp_path / "out")
    run(*words).expect(1, "nowhere")


def test_f39_an_old_output_is_put_back_after_a_crash_between_the_renames(tmp_path: Path) -> None:
    source, out = folder(tmp_path / "src"), tmp_path / "out"
    accepted(source, out)
    before = tree(out)
    out.rename(tmp_path / "out.w4pack-old")
    convert(source, out, "marlin").expect(1, "--overwrite")
    assert tree(out) == before


# --- F40: names that escape -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shard", ["../x.safetensors", "/etc/x", "a/../../x", "sub/x.safetensors", "", ".", ".."]
)
def test_f40_shard_names_are_plain_file_names(shard: str, tmp_path: Path) -> None:
    source = folder(tmp_path / "src", shards=2)
    (tmp_path / "x.safetensors").write_bytes(b.safetensors_bytes({"x": b.dense(np.random.default_rng(0), 2)}))
    index = source / "model.safetensors.index.json"
    value = json.loads(index.read_text())
    value["weight_map"]["model.norm.weight"] = shard
    b.write_json(index, value)
    refused(source, tmp_path / "out", "model.safetensors.index.json")


def test_f40_link_that_leaves_the_folder(tmp_path: Path) -> None:
    source = folder(tmp_path / "src")
    outside = tmp_path / "outside.safetensors"
    (source / "model.safetensors").rename(outside)
    (source / "model.safetensors").symlink_to(outside)
    convert(source, tmp_path / "out", "marlin").expect(1, "model.safetensors")
    assert not (tmp_path / "out").exists()


def test_f40_links_of_the_hub_cache_are_followed_and_copied_as_files(tmp_path: Path) -> None:
    repo = tmp_path / "models--org--name"
    snapshot = repo / "snapshots" / "abc"
    plain = folder(tmp_path / "plain")
    (plain / "tokenizer.json").write_text("{}")
    (repo / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in plain.iterdir():
        blob = repo / "blobs" / hashlib.sha256(path.name.encode()).hexdigest()
        path.rename(blob)
        (snapshot / path.name).symlink_to(Path("..", "..", "blobs", blob.name))
    before = tree(repo / "blobs")
    accepted(snapshot, tmp_path / "out")
    assert all(p.is_file() and not p.is_symlink() for p in (tmp_path / "out").rglob("*"))
    copy = tmp_path / "out" / "tokenizer.json"
    assert copy.read_text() == "{}"
    assert copy.stat().st_nlink == 1  # a file of its own: the cache may be emptied
    copy.write_text("changed")
    assert tree(repo / "blobs") == before


def test_f40_side_file_that_links_outside_is_not_copied_silently(tmp_path: Path) -> None:
    source = folder(tmp_path / "src")
    secret = tmp_path / "secret.txt"
    secret.write_text("do not publish")
    (source / "vocab.txt").symlink_to(secret)
    refused(source, tmp_path / "out", "vocab.txt")
    assert secret.read_text() == "do not publish"


@pytest.mark.parametrize("name", ["../../w", "/etc/passwd", "a\nb", "x" * 5000, "größe"])
def test_f40_tensor_names_are_never_paths(name: str, tmp_path: Path) -> None:
    inside = tmp_path / "deep" / "er"
    inside.mkdir(parents=True)
    extra = {name: b.dense(np.random.default_rng(1), 4, 4)}
    source = folder(inside / "src", extra=extra)
    before = set(tree(tmp_path))
    convert(source, inside / "out", "marlin").expect(0)
    new = {p for p in tree(tmp_path) if p not in before}
    assert all(p.startswith("deep/er/out") for p in new), new
    assert oracle.read_folder(inside / "out")[name] == extra[name]


def test_f40_a_million_empty_tensors_are_refused(tmp_path: Path) -> None:
    source = folder(tmp_path / "src")
    item = '"t%d":{"dtype":"F16","shape":[0],"data_offsets":[0,0]}'
    text = ("{" + ",".join(item % i for i in range(10**6)) + "}").encode()
    (source / "model.safetensors").write_bytes(with_header(text))
    run("inspect", source, "--json").expect(1, "model.safetensors")


def test_f40_remote_code_is_never_run(tmp_path: Path) -> None:
    source = folder(tmp_path / "src")
    marker = tmp_path / "ran"
    (source / "configuration_x.py").write_text(f"open({str(marker)!r}, 'w')\n")
    config = json.loads((source / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil/repo--configuration_x.XConfig"}
    b.write_json(source / "config.json", config)
    accepted(source, tmp_path / "out")
    for words in (
        ("inspect", source),
        ("check", source),
        ("verify", tmp_path / "out"),
        ("unpack", tmp_path / "out", tmp_path / "u"),
    ):
        run(*words, "--json")
    assert not marker.exists()


# --- F41: no GPU, no torch --------------------------------------------------------------------------------

NO_TORCH = """
import sys
class Wall:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers"):
            raise ImportError(f"{name} is not here")
sys.meta_path.insert(0, Wall())
from w4pack.cli import main
sys.argv = ["w4pack", *sys.argv[1:]]
main()
"""


@pytest.mark.parametrize("command", ["--help", "inspect", "check", "convert", "verify", "unpack"])
def test_f41_every_command_works_without_torch_and_without_a_gpu(command: str, tmp_path: Path) -> None:
    source, out = folder(tmp_path / "src"), tmp_path / "out"
    if command in ("verify", "unpack"):
        convert(source, out, "marlin").expect(0)
    words: dict[str, list[str]] = {
        "--help": ["--help"],
        "inspect": ["inspect", str(source)],
        "check": ["check", str(source), "--engine", "w4pack"],
        "convert": ["convert", str(source), str(out), "--to", "marlin"],
        "verify": ["verify", str(out), "--against", str(source)],
        "unpack": ["unpack", str(out), str(tmp_path / "back")],
    }
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "error"}
    done = subprocess.run(
        [sys.executable, "-c", NO_TORCH, *words[command]],
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    assert "Traceback" not in done.stderr
    wanted = 3 if command == "check" else 0  # it is no artifact yet
    assert done.returncode == wanted, done.stderr


def test_f41_a_bin_source_without_torch_says_what_brings_it(tmp_path: Path) -> None:
    source = folder(tmp_path / "src")
    (source / "model.safetensors").unlink()
    (source / "pytorch_model.bin").write_bytes(b"PK\x03\x04" + b"\0" * 60)
    words = ["convert", str(source), str(tmp_path / "out"), "--to", "marlin"]
    done = subprocess.run(
        [sys.executable, "-c", NO_TORCH, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "pip install 'w4pack[quantize]'" in done.stderr


# --- F43: shards ------------------------------------------------------------------------------------------


def shard_check(out: Path, limit: int) -> dict[str, Path]:
    """Check names, index and sizes of a sharded output; return where each tensor lies."""
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    count = len(files)
    assert files == [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    held = {name: out / file for file in files for name in oracle.read_safetensors(out / file)}
    assert {name: path.name for name, path in held.items()} == index["weight_map"]
    tensors = oracle.read_folder(out)
    assert index["metadata"]["total_size"] == sum(len(t.data) for t in tensors.values())
    for file in files:
        inside = oracle.read_safetensors(out / file)
        if sum(len(t.data) for t in inside.values()) > limit:
            assert len({name.rsplit(".", 1)[0] for name in inside}) == 1, file
    return held


@pytest.mark.parametrize(("written", "limit"), [("100KB", 100_000), ("40000", 40_000), ("0.1MB", 100_000)])
def test_f43_shards_keep_the_limit_and_a_linear_together(written: str, limit: int, tmp_path: Path) -> None:
    accepted(folder(tmp_path / "src"), tmp_path / "out", "--max-shard-size", written)
    held = shard_check(tmp_path / "out", limit)
    places: dict[str, set[Path]] = {}
    for name, path in held.items():
        places.setdefault(name.rsplit(".", 1)[0], set()).add(path)
    sizes: dict[str, int] = {}
    for name, tensor in oracle.read_folder(tmp_path / "out").items():
        stem = name.rsplit(".", 1)[0]
        sizes[stem] = sizes.get(stem, 0) + len(tensor.data)
    for stem, paths in places.items():
        assert len(paths) == 1 or sizes[stem] > limit, stem


@pytest.mark.parametrize("target", ["marlin", "gptq", "dense"])
def test_f43_a_tensor_above_the_limit_is_a_file_of_its_own(target: str, tmp_path: Path) -> None:
    limit, out = 10_000, tmp_path / "out"
    convert(folder(tmp_path / "src"), out, target, "--max-shard-size", limit).expect(0)
    held = shard_check(out, limit)
    above = {name for name, t in oracle.read_folder(out).items() if len(t.data) > limit}
    assert "model.embed_tokens.weight" in above
    assert len(above) >= 7
    for name in above:
        assert set(oracle.read_safetensors(held[name])) == {name}
    for path in set(held.values()) - {held[name] for name in above}:
        assert sum(len(t.data) for t in oracle.read_safetensors(path).values()) <= limit, path.name


def test_f43_one_shard_has_no_index(tmp_path: Path) -> None:
    accepted(folder(tmp_path / "src", shards=3), tmp_path / "out")
    assert [p.name for p in sorted((tmp_path / "out").glob("*.safetensors*"))] == ["model.safetensors"]


def test_f43_over_50_gb_cannot_be_pushed(tmp_path: Path) -> None:
    source = folder(tmp_path / "src")
    words = ("--max-shard-size", "60GB")
    done = convert(source, tmp_path / "out", "marlin", *words, "--push-to", "org/name", "--dry-run")
    done.expect(2)
    done = convert(source, tmp_path / "out", "marlin", *words, "--dry-run").expect(0)
    assert [e for e in done.events if e["event"] == "warning"]
    convert(source, tmp_path / "out", "marlin", "--max-shard-size", "50GB", "--dry-run").expect(0)


@pytest.mark.parametrize("size", ["0", "-5GB", "many", "5XB", ""])
def test_f43_sizes_that_are_none(size: str, tmp_path: Path) -> None:
    convert(folder(tmp_path / "src"), tmp_path / "out", "marlin", "--max-shard-size", size).expect(2)


def test_f43_tensors_are_aligned_and_files_are_deterministic(tmp_path: Path) -> None:
    source = folder(tmp_path / "src")
    accepted(source, tmp_path / "one")
    accepted(source, tmp_path / "two")
    assert tree(tmp_path / "one") == tree(tmp_path / "two")
    header, start = oracle.read_header(tmp_path / "one" / "model.safetensors")
    assert start % 4096 == 0
    power: Callable[[int], int] = lambda size: min(4096, size & -size) if size else 4096  # noqa: E731
    spans = {n: e["data_offsets"] for n, e in header.items() if n != "__metadata__"}
    order = [power(end - begin) for begin, end in sorted(spans.values())]
    assert order == sorted(order, reverse=True)
    for name, (begin, end) in spans.items():
        assert begin % power(end - begin) == 0, name


def test_f43_real_process_agrees_with_the_in_process_runs(tmp_path: Path) -> None:
    source = folder(tmp_path / "src")
    accepted(source, tmp_path / "one")
    run_process("convert", source, tmp_path / "two", "--to", "marlin", "-q").expect(0)
    assert tree(tmp_path / "one") == tree(tmp_path / "two")
