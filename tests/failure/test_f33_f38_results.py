"""What travels, memory, what an artifact says, what verify finds: rows F33 to F38 of the failure list."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from failure.folders import accepted, folder, small

import builders as b
import oracle
from runner import convert, run

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
