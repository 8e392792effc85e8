"""`w4pack generate` as users call it: text on stdout as it comes, figures on stderr, errors in words."""

import io
import json
import operator
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from click.testing import CliRunner, Result  # noqa: E402
from transformers import GenerationMixin  # noqa: E402
from transformers.models.qwen2.modeling_qwen2 import Qwen2Model  # noqa: E402

import builders  # noqa: E402
import w4pack as package  # noqa: E402
from runner import signals_act  # noqa: E402
from runtime import models  # noqa: E402
from w4pack import cli  # noqa: E402
from w4pack.convert import convert, errors  # noqa: E402
from w4pack.convert.errors import UsageError, W4PackError  # noqa: E402
from w4pack.kernels.hf import generate, streams  # noqa: E402
from w4pack.kernels.modules import PackedLinear  # noqa: E402

if TYPE_CHECKING:
    from conftest import Runner

NAME = "gptqmodel-w4g32-asym-desc-qwen2"
ENDLESS = 1_000_000  # tokens: hours
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("generate")
    convert(models.source(NAME, place), place / "out")
    return place / "out"


@pytest.fixture
def chatty(out: Path, tmp_path: Path) -> Path:
    """The artifact with a chat template."""
    folder = tmp_path / "chatty"
    shutil.copytree(out, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def run(*args: object, stdin: str = "") -> Result:
    """Run the command in this process: importing transformers takes seconds."""
    return CliRunner().invoke(cli.root, ["generate", *map(str, args)], input=stdin)


def greedy(folder: Path, text: str, count: int) -> list[int]:
    """The likeliest tokens after a text, one full pass for each."""
    from transformers import AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), package.load(folder)
    ids = list(tokenizer(text)["input_ids"])
    start, ends = len(ids), model.generation_config.eos_token_id
    for _ in range(count):
        ids.append(int(models.logits(model, torch.tensor([ids]))[-1].argmax()))
        if ids[-1] in (ends if isinstance(ends, list) else [ends]):
            break
    return ids[start:]


def test_text_is_the_likeliest_continuation(out: Path, w4pack: "Runner") -> None:
    from transformers import AutoTokenizer

    options = ("--max-new-tokens", "8", "--device", "cpu")
    run = w4pack("generate", out, "She was a", *options, env={"OMP_NUM_THREADS": "1"})
    tokens = greedy(out, "She was a", 8)
    text = AutoTokenizer.from_pretrained(out).decode(tokens, skip_special_tokens=True)
    assert (run.code, run.stdout.rstrip("\n")) == (0, text.rstrip("\n"))
    assert f"{len(tokens)} tokens" in run.stderr and "loaded in" in run.stderr


def test_json_is_one_object_for_each_prompt(out: Path) -> None:
    done = run(out, "She", "He was", "--max-new-tokens", "4", "--json", "--device", "cpu")
    first, second = map(json.loads, done.stdout.splitlines())
    assert (done.exit_code, done.stderr) == (0, "")
    assert (first["schema"], first["prompt"], second["prompt"]) == (1, "She", "He was")
    assert second["prompt_tokens"] == first["prompt_tokens"] + 3  # byte tokens
    assert {first["device"], first["dtype"], first["finish"]} <= {"cpu", "float16", "length", "stop"}
    assert first["new_tokens"] <= 4 and first["load_seconds"] > 0 and first["first_token_seconds"] > 0


def test_a_seed_decides_what_is_drawn(out: Path) -> None:
    def draw(*args: str) -> str:
        options = ("--max-new-tokens", "16", "--json", "--device", "cpu")
        return str(json.loads(run(out, "She", *options, *args).stdout)["text"])

    warm = ("--temperature", "1.5")
    assert draw(*warm, "--seed", "1") == draw(*warm, "--seed", "1") != draw(*warm, "--seed", "2")
    assert draw(*warm, "--top-p", "0.000001") == draw()  # only the likeliest token is left


def test_the_default_device_is_said(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = run(out, "She", "--max-new-tokens", "1")
    assert done.stderr.startswith("running on the CPU, slowly: torch sees no GPU\n")
    quiet = run(out, "-", "--max-new-tokens", "1", "-q", stdin="She")
    assert (quiet.stderr, quiet.stdout) == ("", done.stdout)


def test_a_card_that_is_too_old_is_no_default(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 0))
    done = run(out, "She", "--max-new-tokens", "1")
    assert done.stderr.startswith("running on the CPU, slowly: the card is too old for the kernels\n")


def test_the_chat_template_is_used_where_there_is_one(chatty: Path) -> None:
    def count(*args: str) -> int:
        done = run(chatty, "Hi", "--max-new-tokens", "1", "--json", "--device", "cpu", *args)
        return int(json.loads(done.stdout)["prompt_tokens"])

    assert count() == len("[user]Hi[assistant]")
    assert count("--system", "Be brief.") == len("[system]Be brief.[user]Hi[assistant]")
    assert count("--no-chat") == len("Hi")


def test_wrong_uses_are_told(out: Path, chatty: Path, demo: Path, tmp_path: Path) -> None:
    silent = tmp_path / "silent"
    shutil.copytree(out, silent, ignore=shutil.ignore_patterns("tokenizer*", "special_tokens*"))
    refusing = tmp_path / "refusing"
    shutil.copytree(chatty, refusing)
    (refusing / "chat_template.jinja").write_text("{{ raise_exception('no conversation') }}")
    uses: list[tuple[tuple[Any, ...], int, str]] = [
        ((out, "x", "--system", "y"), 2, "no chat template"),
        ((chatty, "x", "--system", "y", "--no-chat"), 2, "--no-chat"),
        ((out, ""), 2, "the prompt is empty"),
        ((out, "x" * 2000), 2, "no room"),
        ((silent, "x"), 1, "no tokenizer"),
        ((refusing, "x"), 1, "no conversation"),
        ((demo, "x"), 3, "w4pack convert"),
        ((tmp_path / "nothing", "x"), 1, "no such folder"),
        ((out, "x", "--device", "abacus"), 2, "abacus"),
        ((out, "x", "--temperature", "-1"), 2, "temperature"),
        ((out, "x", "--top-p", "0"), 2, "top-p"),
        ((out,), 2, "PROMPT"),
    ]
    for args, code, text in uses:
        done = run(*args, *(() if "--device" in args else ("--device", "cpu")))
        assert (done.exit_code, done.stdout.strip()) == (code, ""), args
        assert text in done.stderr and "Traceback" not in done.stderr, (args, done.stderr)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"repetition_penalty": -1.0}, "penalty"),
        ({"eos_token_id": "abc"}, "TypeError"),
        ({"cache_implementation": "quantized"}, "Error"),
        ({"exponential_decay_length_penalty": ["a", 1.0]}, "TypeError"),
        ({"exponential_decay_length_penalty": [1]}, "IndexError"),
        ({"forced_eos_token_id": 10**9}, "IndexError"),
        ({"prefill_chunk_size": "x"}, "TypeError"),
    ],
)
def test_settings_that_transformers_cannot_take_are_told(
    settings: dict[str, object], named: str, out: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "settings"
    shutil.copytree(out, folder)
    (folder / "generation_config.json").write_text(json.dumps(settings))
    result = run(folder, "hello", "--device", "cpu", "--max-new-tokens", "2")
    assert result.exit_code == 2 and "generation_config.json" in result.stderr and named in result.stderr


def test_an_answer_ends_where_the_file_says(out: Path, tmp_path: Path) -> None:
    words = ("--device", "cpu", "--max-new-tokens", "4", "--json")
    whole = json.loads(run(out, "hello", *words).stdout)
    folder = tmp_path / "settings"
    shutil.copytree(out, folder)
    settings = json.loads((folder / "generation_config.json").read_text())
    settings["stop_strings"] = [whole["text"][:1]]
    (folder / "generation_config.json").write_text(json.dumps(settings))
    cut = json.loads(run(folder, "hello", *words).stdout)
    assert cut["finish"] == "stop" and cut["new_tokens"] < whole["new_tokens"] == 4
    assert whole["text"].startswith(cut["text"])


def raising(name: str, error: type[Exception]) -> Any:
    """A function of the module of a name that raises an error."""
    module = {"__name__": name, "error": error}
    exec("def raising(*args, **kwargs):\n    raise error('it broke')", module)
    return module["raising"]


@pytest.mark.parametrize("error", [ValueError, TypeError, ImportError, IndexError, AttributeError])
@pytest.mark.parametrize(
    ("place", "name", "module"),
    [
        (torch.nn.Embedding, "forward", "torch.nn.modules.sparse"),
        (Qwen2Model, "forward", "transformers.models.qwen2.modeling_qwen2"),
        (PackedLinear, "forward", "w4pack.kernels.modules"),
        (streams.FiniteScores, "__call__", "w4pack.kernels.hf.streams"),
        (streams.Stream, "put", "w4pack.kernels.hf.streams"),
        (torch, "ones_like", "torch.broken"),
        (GenerationMixin, "_prepare_cache_for_generation", "w4pack.kernels.hf.kv_adopt"),
    ],
)
def test_an_error_that_is_no_setting_s_is_not_told_as_one(
    place: Any, name: str, module: str, error: type[Exception], out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, name, raising(module, error))
    result = run(out, "hello", "--device", "cpu", "--max-new-tokens", "2")
    assert result.exit_code == 1 and "generation_config.json" not in result.stderr
    assert f"{error.__name__}: it broke" in result.stderr


def test_an_error_of_the_call_itself_is_not_told_as_a_setting_s(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "ones_like", operator.index)  # fails without a frame of its own
    result = run(out, "hello", "--device", "cpu", "--max-new-tokens", "2")
    assert result.exit_code == 1 and "TypeError: only integer tensors" in result.stderr


def test_a_temperature_that_nothing_can_be_drawn_by_is_told(out: Path) -> None:
    result = run(out, "hello", "--device", "cpu", "--temperature", "1e-40")
    assert result.exit_code == 2 and "at least 1e-05" in result.stderr


def test_a_missing_extra_says_what_brings_it(monkeypatch: pytest.MonkeyPatch, out: Path) -> None:
    monkeypatch.setattr(errors, "find_spec", lambda name: None)
    with pytest.raises(UsageError) as caught:
        generate.run_generate({"path": str(out), "prompts": ("x",), "system": None, "chat": True})
    assert caught.value.code == "extra-missing" and "w4pack[gpu]" in str(caught.value)


def test_the_package_says_which_extra_its_loader_needs(out: Path) -> None:
    program = "import sys; sys.modules['torch'] = None; import w4pack; w4pack.load"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert "ImportError: w4pack.load needs torch: pip install 'w4pack[gpu]'" in done.stderr


@pytest.fixture
def endless(out: Path, tmp_path: Path) -> Path:
    """The artifact, with no end token and a long context: its answer goes on until it is stopped."""
    folder = tmp_path / "endless"
    shutil.copytree(out, folder)
    for name, fields in (
        ("generation_config.json", {"eos_token_id": None}),
        ("config.json", {"eos_token_id": None, "max_position_embeddings": ENDLESS}),
    ):
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | fields))
    return folder


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_an_answer_in_words(
    number: signal.Signals, code: int, endless: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "w4pack", "generate", str(endless), "She", "--temperature", "1"]
    command += ["--device", "cpu", "--max-new-tokens", str(ENDLESS)]
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=signals_act,
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.read(1)  # text comes before the end
        child.send_signal(number)
        try:
            _, err = child.communicate(timeout=60)
        finally:
            child.kill()
    assert child.returncode == code
    assert err.endswith("error: stopped by a signal\n") and "Traceback" not in err


@pytest.mark.parametrize("options", [(), ("--json",)], ids=["", "json"])
def test_an_answer_that_cannot_be_written_is_told(
    options: tuple[str, ...],
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["w4pack", "generate", str(out), "She", "--max-new-tokens", "2", "--device", "cpu", *options]
    monkeypatch.setattr(sys, "argv", words)
    handler = signal.getsignal(signal.SIGTERM)
    with open("/dev/full", "w") as full, pytest.raises(SystemExit) as caught:  # noqa: PTH123 - a device
        monkeypatch.setattr(sys, "stdout", full)
        cli.main()
    signal.signal(signal.SIGTERM, handler)
    assert caught.value.code == 1
    assert capsys.readouterr().err.endswith(
        "error: the answer cannot be written\n  where: stdout\n  found: No space left on device\n"
    )


def hot(place: Path, dtype: str) -> Path:
    """An artifact whose down_proj is far beyond fp16."""
    made = builders.model(7, builders.llama_config(torch_dtype=dtype), dense_tag="BF16", tag="BF16", group=64)
    name = "model.layers.0.mlp.down_proj"
    linear = made.linears[name]
    wide = (linear.scales.astype(np.uint32) << 16).view(np.float32) * 1e9
    linear.scales[:] = builders.floats(wide, "BF16")
    builders.write(place / "source", made, builders.compressed, builders.compressed_config(group=64))
    convert(place / "source", place / "out")
    return place / "out"


def test_numbers_beyond_fp16_stop_a_generation_and_name_the_layer(tmp_path: Path) -> None:
    folder = hot(tmp_path, "bfloat16")
    ids = torch.tensor([[5, 6, 7]])
    exact = models.logits(models.dense(tmp_path / "source", tmp_path), ids)
    found = models.logits(package.load(folder), ids).float()
    assert float((found - exact).abs().max()) <= models.tolerance(exact, torch.bfloat16)
    with pytest.warns(UserWarning, match="65504"):
        model = package.load(folder, dtype="float16")
    check = streams.FiniteScores(model)
    with pytest.raises(W4PackError) as caught:
        check(ids, models.logits(model, ids)[-1:])
    assert caught.value.where == "model.layers.0.mlp.down_proj"
    fine = package.load(folder)
    assert torch.equal(streams.FiniteScores(fine)(ids, found[-1:]), found[-1:])


def test_the_command_stops_too(tmp_path: Path) -> None:
    folder = hot(tmp_path, "float16")
    shutil.copytree(models.source(NAME, tmp_path / "words"), tmp_path / "t")
    for file in (tmp_path / "t").glob("*token*"):
        shutil.copy(file, folder / file.name)
    done = run(folder, "abc", "--device", "cpu", "--max-new-tokens", "5")
    assert (done.exit_code, done.stdout.strip()) == (1, "")
    assert "model.layers.0.mlp.down_proj" in done.stderr


def test_a_stream_counts_and_keeps_the_text(out: Path) -> None:
    from transformers import AutoTokenizer

    stream = streams.Stream(AutoTokenizer.from_pretrained(out), file := io.StringIO())
    stream.begin()
    stream.put(torch.tensor([[65, 66]]))  # the prompt
    for token in b"abc ":
        time.sleep(0.001)
        stream.put(torch.tensor([token]))
    stream.end()
    stream.line_end()
    assert (stream.text, stream.count, file.getvalue()) == ("abc ", 4, "abc \n")
    assert stream.first_seconds > 0 and stream.rate is not None and stream.rate > 0
    assert json.dumps(stream.text) == '"abc "'
