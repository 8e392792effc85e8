"""Each "no" has a way on: every refusal in the code carries a hint, and the commands in hints work."""

from __future__ import annotations

import ast
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from runner import run
from w4pack.convert.errors import Refused
from w4pack.kernels.artifact import open_artifact

ROOT = Path(__file__).resolve().parents[2]
RNG = np.random.default_rng(0)


def calls(kind: str) -> Iterator[tuple[str, set[str | None]]]:
    """Yield (place, names of the arguments) of every construction of an error."""
    for path in sorted((ROOT / "convert").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == kind:
                yield f"{path.relative_to(ROOT)}:{node.lineno}", {k.arg for k in node.keywords}


def test_every_refusal_has_a_hint() -> None:
    found = list(calls("Refused"))
    assert len(found) > 50
    assert [place for place, names in found if "hint" not in names] == []


def test_every_limit_of_a_number_says_what_is_expected() -> None:
    """An option that does not go with another one says so; what has a wrong value says which are right."""
    known = re.compile(r"has no meaning|belongs to|is empty|the manifest names")
    silent = []
    for place, names in calls("UsageError"):
        path, line = place.split(":")
        if not names & {"hint", "expected"}:
            text = "".join((ROOT / path).read_text().splitlines(keepends=True)[int(line) - 3 : int(line) + 2])
            silent += [] if known.search(text) else [place]
    assert silent == []


def dense(folder: Path, dtype: type = np.float16) -> Path:
    """Write a 16-bit Llama of one layer, without a tokenizer."""
    folder.mkdir()
    shapes = {"mlp.down_proj": (64, 128), "mlp.gate_proj": (128, 64), "mlp.up_proj": (128, 64)}
    shapes |= {f"self_attn.{name}_proj": (64, 64) for name in "qkvo"}
    tensors = {
        f"model.layers.0.{name}.weight": RNG.standard_normal(shape).astype(dtype)
        for name, shape in shapes.items()
    }
    names = ("model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm", "model.norm")
    tensors |= {f"{name}.weight": np.ones(64, dtype) for name in names}
    tensors |= {f"{name}.weight": np.ones((32, 64), dtype) for name in ("model.embed_tokens", "lm_head")}
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "head_dim": 32,
        "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32,
        "num_key_value_heads": 2, "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def command(hint: str) -> list[str]:
    """Return the words of the command that a hint names."""
    (found,) = re.findall(r"`w4pack (.+?)`", hint)
    return found.split()


@pytest.mark.parametrize("to", ["marlin", "gptq", "compressed-tensors"])
def test_a_16_bit_folder_is_told_how_it_is_quantized(to: str, tmp_path: Path) -> None:
    source, out = dense(tmp_path / "src"), tmp_path / "out"
    error = run("convert", source, out, "--to", to, "--json").expect(3).error
    assert error["code"] == "nothing-to-convert"
    words = [str(out) if word == "OUT" else word for word in command(error["hint"])]
    assert words[1:3] == [str(source), str(out)] and words[-1] == "gptq"
    assert (f"--to {to}" in error["hint"]) == (to != "marlin")
    run(*words[:-1], "rtn", "--group-size", 32).expect(0)  # gptq needs a tokenizer: the same words otherwise
    run("verify", out).expect(0)


def test_a_16_bit_folder_is_dense_already(tmp_path: Path) -> None:
    error = (
        run("convert", dense(tmp_path / "src"), tmp_path / "out", "--to", "dense", "--json").expect(3).error
    )
    assert "already" in error["hint"]


def test_what_holds_no_matrix_of_16_bit_is_told_to_look(tmp_path: Path) -> None:
    source = tmp_path / "src"
    source.mkdir()
    (source / "config.json").write_text("{}")
    save_file({"a": np.ones(4, np.float16)}, source / "model.safetensors")
    error = run("convert", source, tmp_path / "out", "--json").expect(3).error
    run(*command(error["hint"])).expect(0, "1 tensors F16")


def test_a_runner_of_artifacts_names_the_command_that_makes_one(tmp_path: Path) -> None:
    source = dense(tmp_path / "src")
    with pytest.raises(Refused) as caught:
        open_artifact(source)
    words = command(caught.value.hint or "")
    assert words == ["convert", str(source), "OUT", "--quantize", "gptq"]
    packed = shutil.copytree(ROOT / "examples" / "demo-gptq", tmp_path / "packed")
    config = json.loads((packed / "config.json").read_text())
    settings = config.pop("quantization_config")
    (packed / "config.json").write_text(json.dumps(config))
    (packed / "quantize_config.json").write_text(json.dumps(settings))
    with pytest.raises(Refused) as caught:
        open_artifact(packed)
    assert caught.value.hint == f"w4pack convert {packed} OUT"
