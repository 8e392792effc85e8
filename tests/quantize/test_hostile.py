"""What is not as it should be: named and refused, with no traceback and no figure that means nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from rotate import tiny

from quantize import sources
from quantize.test_outputs import quantize
from runner import run
from w4pack.convert.errors import SourceError, UsageError
from w4pack.convert.files.checkpoint import open_checkpoint
from w4pack.convert.files.local import LocalStore
from w4pack.convert.modeljobs import quantizerun
from w4pack.convert.modeljobs.prepared import tokenizer_of
from w4pack.convert.quantize import texts
from w4pack.convert.source.detect import read_source
from w4pack.convert.source.reading import DetectOptions
from w4pack.kernels.hf import before


def changed(source: Path, folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """Copy a model and change its tensors."""
    shutil.copytree(source, folder)
    file = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    change(tensors)
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    return folder


def claiming(source: Path, folder: Path, **values: object) -> Path:
    """Copy a checkpoint whose config.json says something else."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))
    return folder


def spoiled(source: Path, folder: Path, name: str, value: float = float("nan")) -> Path:
    """Copy a model; the second row (or value) of one tensor is no number."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name][1] = value

    return changed(source, folder, change)


# ---- text --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["plain", "byte order mark"])
def test_a_line_of_jsonl_ends_at_a_line_feed_alone(mark: bytes, tmp_path: Path) -> None:
    odd = "a\u2028b\u2029c\u0085d"
    rows = [json.dumps({"text": odd}, ensure_ascii=False), "", json.dumps({"text": "\U0001f600"})]
    (tmp_path / "t.jsonl").write_bytes(mark + "\r\n".join(rows).encode())
    assert list(texts.Texts(str(tmp_path / "t.jsonl"))) == [odd, "\U0001f600"]
    (tmp_path / "t.txt").write_bytes(mark + odd.encode())
    assert list(texts.Texts(str(tmp_path / "t.txt"))) == [odd]


@pytest.mark.parametrize(
    "line",
    ['{"text": "\\ud800"}', "[" * 100_000, '{"text":' * 100_000, '{"text": ' + "9" * 10_000 + "}"],
    ids=["half a surrogate pair", "deep list", "deep object", "long number"],
)
def test_a_hostile_line_is_named(line: str, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"text": "good"}\n' + line)
    with pytest.raises(UsageError) as caught:
        list(texts.Texts(str(tmp_path / "t.jsonl")))
    assert caught.value.where == f"{tmp_path / 't.jsonl'}: line 2"


# ---- tokenizer, vocabulary, positions ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content"),
    [("tokenizer.json", "{}"), ("tokenizer.json", "{"), ("tokenizer_config.json", "[1]")],
)
def test_a_tokenizer_that_cannot_be_loaded_is_said(
    name: str, content: str, llama: Path, book: Path, tmp_path: Path
) -> None:
    source = shutil.copytree(llama, tmp_path / "src")
    (source / name).write_text(content)
    done = quantize(source, tmp_path / "out", text=book).expect(1)
    assert done.error["code"] == "no-tokenizer" and done.error["where"] == str(source)


def test_without_a_tokenizer_the_hint_is_one_that_the_command_has(
    llama: Path, book: Path, tmp_path: Path
) -> None:
    source = shutil.copytree(llama, tmp_path / "src")
    (source / "tokenizer.json").unlink()
    assert "rtn" in quantize(source, tmp_path / "out", text=book).expect(1).error["hint"]
    assert run("eval", source, "--text", book, "--json").expect(1).error["hint"] is None


@pytest.mark.parametrize(
    "name", ["tokenizer.model", "vocab.txt", "m.spm", "spiece.model", "qwen.tiktoken", "tekken.json"]
)
def test_whoever_reads_text_looks_for_the_same_files(
    name: str, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer is tried wherever one of its files lies, before a conversion as before `generate`."""
    folder = tmp_path / "src"
    folder.mkdir()
    for part in ("config.json", "model.safetensors"):
        shutil.copy(llama / part, folder)
    monkeypatch.setattr(before, "open_artifact", lambda *_, **__: None)
    monkeypatch.setattr(before.online, "plan", lambda *_, **__: None)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *_, **__: "read")
    given: dict[str, Any] = {"act_bits": None, "kv_bits": None, "system": None}
    with open_checkpoint(LocalStore(folder)) as checkpoint:
        source = read_source(checkpoint, DetectOptions())
        (folder / name).mkdir()  # no file
        with pytest.raises(SourceError, match="no text can be read") as caught:
            tokenizer_of(source)
        with pytest.raises(SourceError) as other:
            before.check(folder, given)
        assert caught.value.expected == other.value.expected
        (folder / name).rmdir()
        (folder / name).write_text("{}")
        assert tokenizer_of(source) == "read"
        before.check(folder, given)


def test_a_tokenizer_of_another_model_is_refused(llama: Path, book: Path, tmp_path: Path) -> None:
    small = sources.save(sources.llama(vocab_size=100, num_hidden_layers=1), tmp_path / "src")
    for done in (
        quantize(small, tmp_path / "out", text=book),
        run("eval", small, "--text", book, "--seqlen", 32, "--json"),
        run("eval", llama, "--text", book, "--seqlen", 32, "--against", small, "--json"),
    ):
        error = done.expect(1).error
        assert error["code"] == "tokenizer-mismatch" and "100" in error["expected"]
    assert not (tmp_path / "out").exists()


def test_models_of_different_vocabularies_are_not_compared(llama: Path, book: Path, tmp_path: Path) -> None:
    large = sources.save(sources.llama(vocab_size=300, num_hidden_layers=1), tmp_path / "src")
    done = run("eval", llama, "--text", book, "--seqlen", 32, "--against", large, "--json").expect(2)
    assert done.error["where"] == "--against"
    assert done.error["expected"] == "256 tokens" and "300" in done.error["found"]


def test_windows_longer_than_learned_positions_are_refused_and_as_long_ones_are_not(
    book: Path, tmp_path: Path
) -> None:
    source = tiny.save("opt", tmp_path / "opt", torch.float16, vocab_size=256)
    sources.write_tokenizer(source)
    for done in (
        quantize(source, tmp_path / "out", "--seqlen", 65, "--dry-run", text=book),
        run("eval", source, "--text", book, "--seqlen", 65, "--json"),
    ):
        error = done.expect(2).error
        assert (error["where"], error["expected"], error["found"]) == ("--seqlen", "at most 64", "65")
    quantize(source, tmp_path / "out", "--seqlen", 64, text=book).expect(0)
    run("eval", source, "--text", book, "--seqlen", 64, "--windows", 1).expect(0)


# ---- configs and tensors -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", "64"),
        ("rope_parameters", 3),
        ("rms_norm_eps", "x"),
        ("vocab_size", -1),
        ("pad_token_id", 9999),
        ("num_attention_heads", 0),
        ("hidden_act", "none such"),
        ("num_hidden_layers", 10**7),
    ],
)
def test_a_config_that_no_model_can_be_built_of_is_said(
    key: str, value: object, llama: Path, book: Path, tmp_path: Path
) -> None:
    source = claiming(llama, tmp_path / "src", **{key: value})
    for done in (
        quantize(source, tmp_path / "out", text=book),
        run("convert", source, tmp_path / "out", "--rotate", "offline", "--to", "dense", "--json"),
        run("eval", source, "--text", book, "--seqlen", 32, "--json"),
    ):
        assert done.code in (1, 3) and "bug" not in done.error["what"], done.error
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    ("key", "value", "code", "expected"),
    [
        ("num_hidden_layers", 10**6, "layers-missing", "at most "),
        ("num_local_experts", 5, "experts-missing", "at most 4"),
        ("num_local_experts", 10**9, "experts-missing", "at most 4"),
    ],
)
def test_what_no_header_has_is_refused_before_it_is_built(
    key: str, value: int, code: str, expected: str, mixtral: Path, book: Path, tmp_path: Path
) -> None:
    source = claiming(mixtral, tmp_path / "src", **{key: value})
    for done in (
        quantize(source, tmp_path / "out", text=book),
        run("eval", source, "--text", book, "--seqlen", 32, "--json"),
    ):
        error = done.expect(1).error
        assert error["code"] == code and expected in error["expected"]
        assert error["found"] == f"{value:,}"


def test_layers_that_no_header_has_are_refused_before_a_tokenizer_lists_them(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To find its class, transformers makes the config, whose lists are as long as its count of layers."""
    source = claiming(llama, tmp_path / "src", num_hidden_layers=10**11)
    monkeypatch.setattr(transformers, "AutoTokenizer", None)
    with open_checkpoint(LocalStore(source)) as checkpoint, pytest.raises(SourceError) as caught:
        tokenizer_of(read_source(checkpoint, DetectOptions()))
    assert caught.value.code == "layers-missing"


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=["int8", "fp8"])
def test_codes_without_their_scales_are_not_measured_as_if_they_were_weights(
    dtype: torch.dtype, llama: Path, book: Path, tmp_path: Path
) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    source = changed(llama, tmp_path / "src", lambda t: t.update({name: t[name].to(dtype)}))
    error = run("eval", source, "--text", book, "--seqlen", 32, "--json").expect(1).error
    assert (error["code"], error["where"]) == ("dtype", name)
    assert error["found"] == str(dtype).removeprefix("torch.")


def test_a_linear_without_weights_is_copied(llama: Path, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    source = changed(llama, tmp_path / "src", lambda t: t.update({name: t[name][:0].clone()}))
    run("convert", source, tmp_path / "out", "--quantize", "rtn").expect(0)
    assert safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")[name].shape == (0, 64)


# ---- values that are no numbers ----------------------------------------------------------------------


@pytest.mark.parametrize("options", [("--quantize", "rtn"), ("--quantize", "gptq")], ids=["rtn", "gptq"])
def test_copied_values_that_are_not_finite_are_told(
    options: tuple[str, ...], llama: Path, book: Path, tmp_path: Path
) -> None:
    """The row of a token that no text has: nothing of it reaches a Hessian."""
    source = spoiled(llama, tmp_path / "src", "model.embed_tokens.weight")
    given = () if "rtn" in options else ("--calibration", book, "--samples", 2, "--seqlen", 32)
    done = run("convert", source, tmp_path / "out", *options, *given, "--json").expect(0)
    (warning,) = [e for e in done.events if e.get("code") == "nonfinite"]
    assert (warning["where"], warning["found"]) == ("model.embed_tokens.weight", "64 not finite")


@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_f73_logits_that_are_not_finite_stop_the_job(
    name: str, value: float, llama: Path, book: Path, tmp_path: Path
) -> None:
    source = spoiled(llama, tmp_path / "src", name, value)
    error = quantize(source, tmp_path / "out", "--max-kl", 1000, text=book).expect(1).error
    assert (error["code"], error["where"]) == ("activations", "the final norm and the head")
    assert "logits of the source" in error["found"] and not (tmp_path / "out").exists()


@pytest.mark.parametrize("against", [False, True])
def test_no_figure_is_made_of_predictions_that_are_no_numbers(
    against: bool, llama: Path, book: Path, tmp_path: Path
) -> None:
    bad = spoiled(llama, tmp_path / "src", "model.norm.weight")
    models: tuple[Any, ...] = (llama, "--against", bad) if against else (bad,)
    words = ("--text", book, "--seqlen", 32, "--windows", 3, "--json")
    error = run("eval", *models, *words).expect(1).error
    assert (error["code"], error["where"]) == ("predictions", str(bad))
    assert "3 of 3 windows" in error["found"]


def test_bits_per_weight_name_the_weight_that_no_scale_reaches(llama: Path, tmp_path: Path) -> None:
    source = spoiled(llama, tmp_path / "src", "model.layers.1.mlp.up_proj.weight")
    done = run("convert", source, tmp_path / "out", "--quantize", "rtn", "--bpw", 5, "--json").expect(3)
    assert done.error["where"] == "model.layers.1.mlp.up_proj" and done.error["found"] == "nan"


@pytest.mark.parametrize("option", ["--max-kl", "--damp", "--bpw"])
def test_nan_is_no_number_of_an_option(option: str, llama: Path, book: Path, tmp_path: Path) -> None:
    words = ("convert", llama, tmp_path / "out", "--quantize", "gptq", "--calibration", book)
    assert "nan" in run(*words, option, "nan").expect(2).text
    assert not list(tmp_path.iterdir())


# ---- memory ------------------------------------------------------------------------------------------


def torch_error() -> Exception:
    """Return what torch raises for a tensor that no machine holds."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    return caught.value


@pytest.mark.parametrize(
    "made",
    [lambda: MemoryError(), lambda: torch.OutOfMemoryError("CUDA out of memory. Tried"), torch_error],
    ids=["Python", "a card", "torch on the CPU"],
)
def test_too_little_memory_is_no_bug_and_the_run_goes_on_later(
    made: Callable[[], Exception], llama: Path, book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = quantizerun.ModelRun.quantize

    def failing(self: Any, index: int) -> Any:
        if index == 1:
            raise made()
        return compute(self, index)

    with monkeypatch.context() as patch:
        patch.setattr(quantizerun.ModelRun, "quantize", failing)
        error = quantize(llama, tmp_path / "out", text=book).expect(1).error
    assert error["code"] == "memory" and "--resume" in error["hint"]
    quantize(llama, tmp_path / "out", "--resume", text=book).expect(0)
