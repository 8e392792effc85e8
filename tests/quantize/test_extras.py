"""Without torch, or with one that cannot be imported: other mistakes first, then the extra; never a bug."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runner import Run, run

HIDDEN = "import sys\nsys.modules['torch'] = sys.modules['transformers'] = None\n"
BROKEN = "raise ImportError('libcudart.so.13: cannot open shared object file')\n"
QUANTIZE = ("--quantize", "gptq", "--group-size", 32)


def process(path: Path, *words: Any) -> Run:
    """Run the command in a process that looks for modules in ``path`` first."""
    search = os.pathsep.join([str(path), *filter(None, [os.environ.get("PYTHONPATH")])])
    args = tuple(map(str, words))
    done = subprocess.run(
        [sys.executable, "-m", "w4pack", *args],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": search},
        timeout=300,
        check=False,
    )
    return Run(args, done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def hidden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that hides torch and transformers from a process."""
    folder = tmp_path_factory.mktemp("hidden")
    (folder / "sitecustomize.py").write_text(HIDDEN)
    return folder


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a torch whose libraries are not there."""
    folder = tmp_path_factory.mktemp("broken")
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(BROKEN)
    return folder


@pytest.mark.parametrize(
    ("source", "options", "code", "field", "value"),
    [
        ("nowhere", (), 1, "code", "no-such-folder"),
        ("demo", (), 3, "code", "already-quantized"),
        ("llama", ("--ignore", "nobody"), 2, "where", "--ignore"),
        ("llama", ("--module-bits", "nobody=8"), 2, "where", "--module-bits"),
        ("llama", ("--damp", 7), 2, "where", "--damp"),
        ("llama", ("--calibration", "nowhere.txt"), 2, "where", "nowhere.txt"),
        ("llama", ("--device", "foo"), 2, "where", "--device"),
        ("llama", ("--to", "marlin-legacy", "--asym"), 3, "code", "target-cannot-carry"),
        ("llama", ("--to", "gptq", "--rotate", "full"), 3, "code", "online-transforms"),
        ("llama", (), 2, "code", "extra-missing"),
        ("llama", ("--device", "cuda"), 2, "code", "extra-missing"),
        ("llama", ("--bpw", 5), 2, "code", "extra-missing"),
    ],
    ids=str,
)
def test_without_torch_what_else_is_wrong_is_said_first(
    hidden: Path,
    llama: Path,
    demo: Path,
    tmp_path: Path,
    source: str,
    options: tuple[Any, ...],
    code: int,
    field: str,
    value: str,
) -> None:
    place = {"llama": llama, "demo": demo, "nowhere": tmp_path / "nowhere"}[source]
    asked = QUANTIZE if "--bpw" not in options else QUANTIZE[:2]
    done = process(hidden, "convert", place, tmp_path / "out", *asked, *options, "--json").expect(code)
    assert done.error[field] == value
    assert [e["event"] for e in done.events] == ["error"]  # no note, no plan of a run that cannot start
    assert done.error["code"] != "extra-missing" or done.error["hint"] == "pip install 'w4pack[quantize]'"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("options", [("--asym",), ("--rotate", "offline")], ids=str)
def test_a_dry_run_without_torch_shows_the_plan_and_says_what_is_missing(
    hidden: Path, llama: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    """Tensors, layers, settings and rotation are those of the run: only the text is not counted."""
    words = ("convert", llama, tmp_path / "out", *QUANTIZE, *options, "--dry-run", "--json")
    done = process(hidden, *words).expect(2)
    assert done.error["code"] == "extra-missing"
    whole = run(*words).expect(0)
    found, wanted = (dict(d.plan["plan"]) for d in (done, whole))
    assert found.pop("quantization").keys() | {"calibration"} == wanted.pop("quantization").keys()
    for plan in (found, wanted):
        plan.pop("digest", None)
    assert found == wanted
    assert any(w["code"] == "extra-missing" for w in done.plan["warnings"])
    assert done.plan["memory"] > 100 * 2**10 * 64  # of the 128 x 2048 tokens asked for
    shown = process(hidden, *words[:-1]).expect(2)
    assert "w4pack[quantize]" in shown.err and "marlin artifact 1" in shown.out and "needs" in shown.out


@pytest.mark.parametrize(
    "words",
    [
        ("convert", "SRC", "OUT", *QUANTIZE),
        ("convert", "SRC", "OUT", *QUANTIZE, "--dry-run"),
        ("convert", "SRC", "OUT", "--to", "dense", "--rotate", "offline"),
        ("convert", "SRC", "OUT", "--to", "marlin", "--quantize", "rtn", "--device", "cuda"),
        ("eval", "SRC", "--text", "BOOK"),
        ("generate", "ARTIFACT", "x", "--json"),
        ("bench", "--shape", "64x64"),
    ],
    ids=lambda words: f"{words[0]}-{words[-1]}",
)
def test_a_torch_that_cannot_be_imported_is_named_with_its_reason(
    broken: Path, llama: Path, book: Path, tmp_path: Path, words: tuple[Any, ...]
) -> None:
    places = {"SRC": llama, "OUT": tmp_path / "out", "BOOK": book, "ARTIFACT": tmp_path / "artifact"}
    if "ARTIFACT" in words:  # what is none is refused before torch is asked for
        made = ("--quantize", "rtn", "--group-size", 32)
        run("convert", llama, places["ARTIFACT"], *made).expect(0)
    done = process(broken, *(places.get(word, word) for word in words if word != "--json")).expect(2)
    assert "needs torch, which is installed but cannot be imported" in done.err
    assert "found: ImportError: libcudart.so.13: cannot open shared object file" in done.err
    assert "--force-reinstall 'w4pack[" in done.err
    assert "packed on the CPU" not in done.text
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", ["--asym", "--sym", "--gptaq", "--no-gptaq"])
def test_an_option_without_quantize_is_named_as_it_was_given(
    option: str, llama: Path, tmp_path: Path
) -> None:
    done = run("convert", llama, tmp_path / "out", option, "--json").expect(2)
    assert done.error["where"] == option and f"`{option}`" in done.error["what"]


@pytest.mark.parametrize("device", ["foo", "meta", "mps", "xpu:0", "cuda:", "cuda:-1", "CPU"])
def test_a_device_that_is_none_is_called_so(device: str, llama: Path, book: Path, tmp_path: Path) -> None:
    """``meta`` is one that torch knows: a model there has no numbers."""
    jobs = [("convert", llama, tmp_path / "out", "--quantize", "rtn"), ("eval", llama, "--text", book)]
    for words in jobs:
        done = run(*words, "--device", device, "--json").expect(2)
        assert (done.error["where"], done.error["found"]) == ("--device", device)
        assert done.error["expected"] == "cpu, cuda or cuda:N"
