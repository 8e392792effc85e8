"""What lies in the folder: the weights that were simulated, in every target, for every option."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import oracle
from quantize import sources
from runner import Run, run
from w4pack.convert.files.checkpoint import open_checkpoint
from w4pack.convert.files.local import LocalStore
from w4pack.convert.modeljobs.weights import Numbers
from w4pack.convert.quantize import layer as layer_module
from w4pack.convert.quantize.linears import Quantized
from w4pack.convert.source.detect import read_source
from w4pack.convert.source.reading import DetectOptions

FEW = ("--samples", 8, "--seqlen", 64, "--threads", 1)


def quantize(source: Path, out: Path, *options: Any, text: Path | None = None, to: str = "marlin") -> Run:
    """Run ``convert --quantize gptq``."""
    given = () if text is None else ("--calibration", text)
    words = (*FEW, *given, *options)
    if "--quantize" not in options:
        words = ("--quantize", "gptq", "--group-size", 32, *words)
    return run("convert", source, out, "--to", to, "--json", *words)


def weights(folder: Path) -> dict[str, np.ndarray]:
    """Return the weights (N, K) float64 of every packed linear, by the tests' own reader."""
    return {
        name: (
            (lin.codes.astype(np.float64) - lin.zeros[lin.gi]) * oracle.widen(lin.scales, lin.tag)[lin.gi]
        ).T
        for name, lin in oracle.decode_folder(folder).items()
    }


def manifest(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "w4pack.json").read_text())


def tree(folder: Path) -> dict[str, str]:
    """Return the hash of every file."""
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, str], torch.Tensor]:
    """Weights that layers computed with once they were quantized: (layer, path) -> (N, K)."""
    found: dict[tuple[int, str], torch.Tensor] = {}
    original = layer_module.LayerWork.run

    def spying(self: layer_module.LayerWork, stream: Any) -> dict[str, Quantized]:
        made = original(self, stream)
        for path in made:
            found[self.index, path] = self.layer.get_submodule(path).weight.detach().clone()
        return made

    monkeypatch.setattr(layer_module.LayerWork, "run", spying)
    return found


@pytest.mark.parametrize("to", ["marlin", "gptq", "compressed-tensors"])
@pytest.mark.parametrize("sym", ["--sym", "--asym"])
def test_the_file_holds_the_weights_that_were_simulated_bit_for_bit(
    to: str, sym: str, llama: Path, book: Path, tmp_path: Path, simulated: dict[tuple[int, str], torch.Tensor]
) -> None:
    quantize(llama, tmp_path / "out", sym, text=book, to=to).expect(0)
    read = weights(tmp_path / "out")
    assert len(read) == len(simulated) == 14
    for (index, path), value in simulated.items():
        assert np.array_equal(read[f"model.layers.{index}.{path}"], value.double().numpy()), path


def test_legacy_marlin_holds_them_too_and_refuses_zero_points(
    book: Path, tmp_path: Path, simulated: dict[tuple[int, str], torch.Tensor]
) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}
    model = sources.llama(**sizes, head_dim=64, num_hidden_layers=1)
    source = sources.save(model, tmp_path / "src")
    options = ("--quantize", "gptq", "--group-size", 128)
    quantize(source, tmp_path / "no", *options, "--asym", text=book, to="marlin-legacy").expect(3)
    quantize(source, tmp_path / "out", *options, text=book, to="marlin-legacy").expect(0)
    read = weights(tmp_path / "out")
    assert len(read) == len(simulated) == 7
    for (index, path), value in simulated.items():
        assert np.array_equal(read[f"model.layers.{index}.{path}"], value.double().numpy()), path


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_awq_holds_asymmetric_four_bit(method: str, llama: Path, book: Path, tmp_path: Path) -> None:
    options = ("--quantize", method, "--group-size", 32, "--asym")
    given = () if method == "rtn" else ("--calibration", book, *FEW)
    run("convert", llama, tmp_path / "out", "--to", "awq", *options, *given).expect(0)
    source = oracle.read_folder(llama)
    for name, value in weights(tmp_path / "out").items():
        exact = source[f"{name}.weight"].array().astype(np.float64)
        assert np.abs(value - exact).max() < 0.35 * np.abs(exact).max()


def test_a_gptq_output_loads_in_transformers_and_predicts_what_its_weights_say(
    llama: Path, book: Path, tmp_path: Path
) -> None:
    """The converter, which has its own proofs, makes a dense model of the output; `eval` reads the same."""
    quantize(llama, tmp_path / "out", text=book, to="gptq").expect(0)
    run("convert", tmp_path / "out", tmp_path / "dense", "--to", "dense", "--dtype", "float32").expect(0)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32)
    state = model.state_dict()
    for name, value in weights(tmp_path / "out").items():
        assert np.array_equal(state[f"{name}.weight"].double().numpy(), value)
    with open_checkpoint(LocalStore(tmp_path / "out")) as checkpoint:
        numbers = Numbers(read_source(checkpoint, DetectOptions()))
        for name in state:
            if name in set(numbers.names()):
                assert torch.equal(numbers.get(name).float(), state[name].float()), name


def test_gptq_is_nearer_to_the_source_than_rounding_and_the_shift_is_nearer_still(
    llama: Path, book: Path, tmp_path: Path
) -> None:
    other = sources.text(tmp_path / "other.txt", seed=7)
    lost = {}
    for name, options in {
        "rtn": ("--quantize", "rtn", "--group-size", 32),
        "gptq": (
            "--quantize",
            "gptq",
            "--group-size",
            32,
            "--no-gptaq",
            "--calibration",
            book,
            "--samples",
            32,
        ),
        "gptaq": ("--quantize", "gptq", "--group-size", 32, "--calibration", book, "--samples", 32),
    }.items():
        more = () if name == "rtn" else ("--seqlen", 64)
        run("convert", llama, tmp_path / name, "--to", "gptq", *options, *more, "--threads", 1).expect(0)
        told = run(
            "eval",
            tmp_path / name,
            "--text",
            other,
            "--windows",
            16,
            "--seqlen",
            64,
            "--against",
            llama,
            "--json",
        ).expect(0)
        lost[name] = told.data["kl_mean"]
    assert lost["gptaq"] < lost["gptq"] < lost["rtn"]


# ---- sources --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_f80_a_source_that_is_quantized_is_refused_with_the_way(
    method: str, demo: Path, tmp_path: Path
) -> None:
    done = run("convert", demo, tmp_path / "out", "--quantize", method, "--json").expect(3)
    assert done.error["code"] == "already-quantized" and done.error["found"].startswith("gptq, 4 bit")
    assert "--to dense" in done.error["hint"] and "error" in done.error["hint"]


TURNED = ("--rotate", "offline")


def test_f80_settings_of_a_quantizer_beside_16_bit_weights_are_left_out(llama: Path, tmp_path: Path) -> None:
    stale = tmp_path / "stale"
    stale.mkdir()
    for file in llama.iterdir():
        (stale / file.name).write_bytes(file.read_bytes())
    config = json.loads((stale / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 8, "group_size": 128}
    (stale / "config.json").write_text(json.dumps(config))
    for number, words in enumerate(
        (("--quantize", "rtn"), ("--quantize", "rtn", *TURNED), ("--to", "dense", *TURNED))
    ):
        out = tmp_path / str(number)
        done = run("convert", stale, out, *words, "--json").expect(0)
        told = [e for e in done.events if e.get("code") == "stale-config"]
        assert len(told) == 1 and "gptq; left out" in told[0]["found"]
        settings = json.loads((out / "config.json").read_text()).get("quantization_config")
        assert settings is None if "dense" in words else settings["bits"] == 4


def test_f80_fp8_weights_are_refused(llama: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "fp8"
    folder.mkdir()
    for file in llama.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    (folder / "config.json").write_text(json.dumps(config))
    done = run("convert", folder, tmp_path / "out", "--quantize", "gptq", "--json").expect(3)
    assert (done.error["code"], done.error["where"]) == ("already-quantized", name)
    assert done.error["found"] == "F8_E4M3 (fp8)" and "quantize the checkpoint" in done.error["hint"]


# ---- resume ---------------------------------------------------------------------------------------------


HOOK = "W4PACK_TEST_EXIT_AT"


def _stopped(step: int, *words: Any) -> bool:
    """Run the command in a forked child that leaves at its n-th step; return whether it got to its end."""
    child = os.fork()
    if child == 0:
        code = 70
        try:
            os.environ[HOOK] = str(step)
            code = run(*words).code
        finally:
            os._exit(code if code in (0, 1, 3, 4) else 70)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def stop_anywhere(source: Path, book: Path, out: Path, steps: range) -> None:
    """End a run at each of some steps: what is resumed is, to the byte, what an undisturbed run wrote."""
    few = ("--quantize", "gptq", "--group-size", 32, "--calibration", book, *FEW, "-q")
    words = ("convert", source, out, *few)
    run(*words).expect(0)
    wanted = tree(out)
    for step in steps:
        shutil.rmtree(out)
        if _stopped(step, *words):
            return
        run(*words, "--resume").expect(0)
        assert tree(out) == wanted, step
    pytest.fail("a run of this size has fewer steps")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # fork, beside idle threads of linear algebra
def test_a_run_that_was_stopped_anywhere_resumes_to_the_same_bytes(
    llama: Path, book: Path, tmp_path: Path
) -> None:
    stop_anywhere(llama, book, tmp_path / "out", range(2, 400, 19))


def test_a_resumed_run_does_not_quantize_finished_layers_again(
    llama: Path, book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from w4pack.convert.modeljobs import quantizerun

    out = tmp_path / "out"
    original = quantizerun.ModelRun.quantize
    seen: list[int] = []

    def stopping(self: Any, index: int) -> Any:
        seen.append(index)
        if index == 1 and len(seen) == 2:
            raise KeyboardInterrupt
        return original(self, index)

    monkeypatch.setattr(quantizerun.ModelRun, "quantize", stopping)
    quantize(llama, out, text=book).expect(130)
    assert not out.exists()
    quantize(llama, out, "--resume", text=book).expect(0)
    assert seen == [0, 1, 1]
    quantize(llama, tmp_path / "again", text=book).expect(0)
    assert tree(out) == tree(tmp_path / "again")


def test_resuming_with_other_text_is_refused(
    llama: Path, book: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    from w4pack.convert.modeljobs import quantizerun

    out = tmp_path / "out"

    def stop(self: Any, index: int) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(quantizerun.ModelRun, "quantize", stop)
        quantize(llama, out, text=book).expect(130)
    other = sources.text(tmp_path / "book.txt", seed=5)
    done = quantize(llama, out, "--resume", text=other).expect(3)
    assert done.error["code"] == "resume-differs"
    done = quantize(llama, out, "--resume", "--damp", "0.5", text=book).expect(3)
    assert done.error["code"] == "resume-differs"
    assert done.error["expected"] == "--damp 0.03" and done.error["found"] == "--damp 0.5"


# ---- gates ----------------------------------------------------------------------------------------------


def test_f81_a_hessian_of_garbage_falls_back_and_says_so(
    llama: Path, book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from w4pack.convert.quantize.hessian import Statistics

    original = Statistics.hessian

    def garbage(self: Statistics) -> torch.Tensor:
        found = original(self)
        if found.shape[0] != 128:
            return found
        wild = torch.randn(128, 128, generator=torch.Generator().manual_seed(0)) * 10
        return wild @ wild.T

    monkeypatch.setattr(Statistics, "hessian", garbage)
    quantize(llama, tmp_path / "out", text=book).expect(0)
    layers = manifest(tmp_path / "out")["layers"]
    downs = [entry for name, entry in layers.items() if name.endswith("down_proj")]
    assert [entry["method"] for entry in downs] == ["rtn", "rtn"]
    assert all("worse than rounding" in entry["note"] for entry in downs)
    assert all(entry["error"] == entry["rtn_error"] for entry in downs)
    assert "worse than rounding to nearest" in (tmp_path / "out" / "README.md").read_text()


def test_f81_a_result_that_no_longer_predicts_is_not_published(
    llama: Path, book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from w4pack.convert.quantize import linears

    original = linears._finish

    def broken(codes: torch.Tensor, *rest: Any) -> Any:
        return original(15 - codes, *rest)

    monkeypatch.setattr(linears, "_finish", broken)
    done = quantize(llama, tmp_path / "out", "--max-kl", 0.5, text=book).expect(4)
    assert (done.error["code"], done.error["expected"]) == (
        "quality",
        "a divergence of at most 0.5 nats a token",
    )
    assert "--max-kl" in done.error["hint"] and float(done.error["found"]) > 0.5
    assert not (tmp_path / "out").exists()
    quantize(llama, tmp_path / "out", "--max-kl", 1000, "--resume", text=book).expect(0)
    assert manifest(tmp_path / "out")["quantization"]["kl"] == pytest.approx(
        float(done.error["found"]), rel=5e-3
    )


# ---- shapes ---------------------------------------------------------------------------------------------


def test_layers_off_the_tile_are_padded_and_decode_to_what_was_simulated(
    book: Path, tmp_path: Path, simulated: dict[tuple[int, str], torch.Tensor]
) -> None:
    model = sources.llama(hidden_size=48, intermediate_size=80, head_dim=24, num_hidden_layers=1)
    source = sources.save(model, tmp_path / "src")
    quantize(source, tmp_path / "out", text=book).expect(0)
    read = weights(tmp_path / "out")
    for (index, path), value in simulated.items():
        assert np.array_equal(read[f"model.layers.{index}.{path}"], value.double().numpy()), path


def test_many_batches_give_what_one_batch_gives(
    llama: Path, book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from w4pack.convert.quantize import whole

    errors = {}
    for name, tokens in (("one", 4096), ("many", 128)):
        monkeypatch.setattr(whole, "BATCH_TOKENS", {"cpu": tokens, "cuda": tokens})
        quantize(llama, tmp_path / name, text=book).expect(0)
        errors[name] = {n: e["tokens"] for n, e in manifest(tmp_path / name)["layers"].items()}
    assert errors["one"] == errors["many"]
    assert set(errors["one"].values()) == {8 * 64}
    one, many = weights(tmp_path / "one"), weights(tmp_path / "many")
    for name in one:  # sums in another order: a code in a hundred may round the other way
        differ = one[name] != many[name]
        assert differ.mean() < 0.05, name


def test_tied_embeddings_stay_tied(book: Path, tmp_path: Path) -> None:
    source = sources.save(sources.llama(tie_word_embeddings=True), tmp_path / "src")
    quantize(source, tmp_path / "out", text=book).expect(0)
    assert "lm_head.weight" not in manifest(tmp_path / "out")["tensors"]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is True


def test_a_rotated_model_is_quantized_and_keeps_its_predictions(
    llama: Path, book: Path, tmp_path: Path
) -> None:
    quantize(llama, tmp_path / "out", "--rotate", "offline", text=book).expect(0)
    assert manifest(tmp_path / "out")["rotation"]["mode"] == "offline"
    told = run(
        "eval", tmp_path / "out", "--text", book, "--windows", 4, "--seqlen", 64, "--against", llama, "--json"
    ).expect(0)
    assert told.data["kl_mean"] < 0.5
    run("verify", tmp_path / "out").expect(0)
