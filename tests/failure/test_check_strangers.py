"""`check` on what no engine may be said to take: other methods, damaged or ambiguous sources.

The answer is no, with exit code 3 (1 where bytes are broken), and a command is suggested only if it works.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import builders as b
import checkpoints
from oracle import Tensor
from runner import Run, convert, run

ENGINES = ("vllm", "sglang", "transformers", "w4pack")
MLP = "model.layers.0.mlp"


def small() -> b.Model:
    """Return the model of fewest weights."""
    return b.model(7, b.llama_config(intermediate_size=256, num_key_value_heads=4, vocab_size=64))


def suggested_works(done: Run, folder: Path, tmp_path: Path) -> None:
    """Run the command that `check` suggests, if it does: it must not be refused."""
    try:
        command = done.data.get("suggestion")
    except json.JSONDecodeError:
        command = None
    if command is None:
        return
    program, verb, src, _, *options = shlex.split(command)
    assert (program, verb, src) == ("w4pack", "convert", str(folder))
    run("convert", folder, tmp_path / f"tried{len(list(tmp_path.iterdir()))}", *options).expect(0)


def answers_no(
    folder: Path, tmp_path: Path, *engines: str, code: int = 3, said: tuple[object, ...] = ()
) -> None:
    """Ask every engine, in both forms: never yes, never a command that is refused."""
    for engine in engines or ENGINES:
        done = run("check", folder, "--engine", engine, "--json").expect(code, *said)
        suggested_works(done, folder, tmp_path)
        if '"results"' in done.out:
            assert done.data["ok"] is False, engine
        text = run("check", folder, "--engine", engine).expect(code, *said).text
        assert "takes it" not in text, (engine, text)


# --- other methods ----------------------------------------------------------------------------------------


def test_weights_with_quantized_activations(tmp_path: Path) -> None:
    folder = checkpoints.lay_out("llmcompressor-w4a8-g64-llama", tmp_path / "src")
    for target in ("marlin", "compressed-tensors", "dense"):
        convert(folder, tmp_path / "out", target).expect(3)
    answers_no(folder, tmp_path)


def fp8(folder: Path, settings: dict[str, Any] | None) -> Path:
    """Write 8-bit float weights with block scales, with a label or without."""
    model = small()
    tensors = dict(model.dense)
    for name, linear in model.linears.items():
        tensors[f"{name}.weight"] = Tensor("F8_E4M3", (linear.n, linear.k), bytes(linear.n * linear.k))
        tensors[f"{name}.weight_scale_inv"] = b.tensor(
            np.ones((linear.n // 128, linear.k // 128), np.float32), "F32"
        )
    b.write_tensors(folder, tensors)
    b.write_json(
        folder / "config.json", {**model.config, **({"quantization_config": settings} if settings else {})}
    )
    return folder


LABELS: dict[str, dict[str, Any] | None] = {
    "labelled": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "without a label": None,
}


@pytest.mark.parametrize("label", LABELS)
def test_8_bit_floats(label: str, tmp_path: Path) -> None:
    folder = fp8(tmp_path / "src", LABELS[label])
    answers_no(folder, tmp_path, said=("fp8",) if LABELS[label] else ("weight_scale_inv",))


@pytest.mark.parametrize("label", LABELS)
def test_one_layer_of_8_bit_floats_among_16_bit(label: str, tmp_path: Path) -> None:
    """The rest is plain 16 bit: it is not a plain checkpoint for that."""
    model, name = small(), f"{MLP}.down_proj"
    tensors = dict(model.dense)
    for other, linear in model.linears.items():
        tensors[f"{other}.weight"] = b.tensor(linear.weight("F16"), "F16")
    tensors[f"{name}.weight"] = Tensor("F8_E4M3", (256, 256), bytes(256 * 256))
    tensors[f"{name}.weight_scale_inv"] = b.tensor(np.ones((2, 2), np.float32), "F32")
    b.write_tensors(tmp_path / "src", tensors)
    settings = {"quantization_config": LABELS[label]} if LABELS[label] else {}
    b.write_json(tmp_path / "src" / "config.json", {**model.config, **settings})
    answers_no(tmp_path / "src", tmp_path)


def test_an_unknown_checkpoint_format_of_gptq(tmp_path: Path) -> None:
    folder = b.write(tmp_path / "src", small(), b.gptq, b.gptq_config(checkpoint_format="qqq"))
    for target in ("marlin", "gptq", "dense"):
        convert(folder, tmp_path / "out", target).expect(3, "qqq")
    answers_no(folder, tmp_path, said=("qqq",))


@pytest.mark.parametrize("method", ["hqq", "bitsandbytes", "eetq", "quark", "x" * 300, ""])
def test_methods_of_other_tools(method: str, tmp_path: Path) -> None:
    model = small()
    tensors = dict(model.dense) | {
        f"{n}.weight": b.tensor(x.weight("F16").view(np.uint8), "U8") for n, x in model.linears.items()
    }
    b.write_tensors(tmp_path / "src", tensors)
    b.write_json(
        tmp_path / "src" / "config.json", {**model.config, "quantization_config": {"quant_method": method}}
    )
    answers_no(tmp_path / "src", tmp_path)


def test_the_same_weights_in_16_bit_are_taken(tmp_path: Path) -> None:
    model = small()
    tensors = dict(model.dense) | {
        f"{n}.weight": b.tensor(x.weight("F16"), "F16") for n, x in model.linears.items()
    }
    b.write_tensors(tmp_path / "src", tensors)
    b.write_json(tmp_path / "src" / "config.json", model.config)
    run("check", tmp_path / "src", "--engine", "vllm").expect(0, "takes it")


# --- zero points with two readings ------------------------------------------------------------------------


def ambiguous(folder: Path) -> dict[str, Any]:
    """Return vLLM's answer to a checkpoint with a stored zero of 15."""
    return run("check", folder, "--engine", "vllm", "--json").expect(3).data["results"][0]


def test_the_engine_reads_other_zeros_and_they_are_named(tmp_path: Path) -> None:
    folder = checkpoints.lay_out("broken/zero-point-16", tmp_path / "src")
    wrong = [x for x in ambiguous(folder)["blockers"] if x["verdict"] == "wrong"]
    assert [x["layer"] for x in wrong] == [f"{MLP}.down_proj"]
    assert "zero" in wrong[0]["rule"]
    assert "15" in wrong[0]["expected"]
    assert "16" in wrong[0]["found"]
    answers_no(folder, tmp_path)


def test_a_known_producer_is_read_as_it_wrote_but_the_engine_still_is_not(tmp_path: Path) -> None:
    """The word is one subtraction: convert knows that; the engine adds one to every field."""
    model = small()
    for linear in model.linears.values():
        linear.zeros = np.full_like(linear.zeros, 7)
    linear = model.linears[f"{MLP}.down_proj"]
    linear.zeros[0, 0] = 0
    settings = b.gptq_config(sym=False, meta={"quantizer": ["gptqmodel:7.7.0"]})
    folder = b.write(tmp_path / "src", model, b.gptq, settings)
    convert(folder, tmp_path / "out", "marlin").expect(0)
    wrong = [x for x in ambiguous(folder)["blockers"] if x["verdict"] == "wrong"]
    assert [x["layer"] for x in wrong] == [f"{MLP}.down_proj"]
    answers_no(folder, tmp_path, "vllm")


def test_without_a_stored_15_nothing_is_wrong(tmp_path: Path) -> None:
    model = small()
    for linear in model.linears.values():
        linear.zeros = np.full_like(linear.zeros, 7)
    folder = b.write(tmp_path / "src", model, b.gptq, b.gptq_config(sym=False))
    assert not [x for x in ambiguous(folder)["blockers"] if x["verdict"] == "wrong"]


# --- the broken set ---------------------------------------------------------------------------------------

REFUSED = [
    n
    for n in checkpoints.broken_names()
    if checkpoints.meta(f"broken/{n}")["result"] == "refuse"
    and n != "nan-scale"  # scales decide nothing: no question reads them, `verify` and `convert` do
]


@pytest.mark.parametrize("name", REFUSED)
def test_no_engine_is_said_to_take_a_broken_checkpoint(name: str, tmp_path: Path) -> None:
    record = checkpoints.meta(f"broken/{name}")
    if name.startswith("bin"):
        pytest.importorskip("torch", reason="needs torch")
    folder = checkpoints.lay_out(f"broken/{name}", tmp_path / "src")
    for engine in ENGINES:
        if (name, engine) == ("g-idx-uneven", "transformers"):
            continue  # it looks every row's group up: groups of unequal sizes are no fault there
        done = run("check", folder, "--engine", engine, "--thorough", "--json")
        assert done.code in {record["exit"], 3}, (engine, done.text)  # 3: the engine refuses it for its label
        done.expect(done.code)
        suggested_works(done, folder, tmp_path)
