"""What goes to stdout, to stderr and into the exit code, for every command that works on folders."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import builders as b
import oracle
from runner import command, convert, run, run_process


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose label lies about symmetry: every command has a warning to give."""
    config = b.llama_config(intermediate_size=256, num_key_value_heads=1, vocab_size=64)
    folder = tmp_path_factory.mktemp("cli") / "src"
    return b.write(folder, b.model(1, config), b.gptq, b.gptq_config(sym=False), shards=2)


@pytest.fixture(scope="module")
def out(source: Path) -> Path:
    """Its artifact."""
    path = source.parent / "out"
    convert(source, path, "marlin").expect(0)
    return path


@pytest.fixture(scope="module")
def ordered(source: Path) -> Path:
    """A checkpoint with a real activation order."""
    config = b.llama_config(intermediate_size=256, num_key_value_heads=1, vocab_size=64)
    model = b.model(2, config, group=64, order=np.random.default_rng(3).permutation(256))
    return b.write(source.parent / "ordered", model, b.gptq, b.gptq_config(group=64, desc=True))


# --- one JSON object for a question -----------------------------------------------------------------------

INSPECT = {"schema", "path", "format", "evidence", "bytes_read", "bytes", "parameters", "bits_per_weight"}
INSPECT |= {"layers", "other", "tied", "warnings"}
LAYER = {
    "name",
    "format",
    "bits",
    "group_size",
    "sym",
    "act_order",
    "in_features",
    "out_features",
    "stored_in",
}
LAYER |= {"stored_out", "scale_dtype", "bias", "max_tp"}


def test_inspect_json_has_the_documented_keys_and_right_values(source: Path) -> None:
    done = run_process("inspect", source, "--json").expect(0)
    told = done.data
    assert told.keys() >= INSPECT
    assert told["schema"] == 1
    assert told["path"] == str(source)
    assert told["evidence"] == "all"
    tensors = oracle.read_folder(source)
    assert told["parameters"] == parameters(tensors)
    assert 4 < told["bits_per_weight"] < 4.5  # 4 bits, and 16 + 4 bits for every 128 weights
    layers = {layer["name"]: layer for layer in told["layers"]}
    assert set(layers) == set(oracle.decode_folder(source))
    for layer in layers.values():
        assert layer.keys() >= LAYER
    k = layers["model.layers.0.self_attn.k_proj"]
    want = {
        "bits": 4,
        "group_size": 128,
        "sym": True,
        "act_order": "trivial",
        "in_features": 256,
        "out_features": 64,
    }
    assert {name: k[name] for name in want} == want
    other = {entry["name"]: (entry["dtype"], tuple(entry["shape"])) for entry in told["other"]}
    dense = {n: (t.tag, t.shape) for n, t in tensors.items() if n.rsplit(".", 1)[0] not in layers}
    assert other == dense
    (warning,) = told["warnings"]
    assert warning.keys() >= {"code", "where", "expected", "found"}
    assert 0 < told["bytes_read"] < told["bytes"]


def parameters(tensors: dict[str, oracle.Tensor]) -> int:
    """Count weights: packed ones by their codes, dense ones by their elements; no scales, zeros, maps."""
    count = 0
    for name, tensor in tensors.items():
        if name.endswith(".qweight"):
            count += int(np.prod(tensor.shape)) * 8
        elif not name.endswith((".qzeros", ".scales", ".g_idx")):
            count += int(np.prod(tensor.shape))
    return count


def test_tensor_parallelisms_add_up(source: Path) -> None:
    words = ("check", source, "--engine", "vllm", "--json")
    for asked, sizes in (
        (("--tp", "1", "--tp", "2"), [1, 2]),
        (("--tp", "4,1", "--tp", "2,4"), [4, 1, 2]),
        ((), [1]),
    ):
        assert [r["tp"] for r in run(*words, *asked).data["results"]] == sizes


def test_the_way_on_names_the_command_that_is_run_with_fewer_ranks(source: Path, out: Path) -> None:
    """Three ranks, which no number of heads here is a multiple of."""
    words = {
        "vllm": "vllm serve with a lower --tensor-parallel-size",
        "sglang": "--tp-size",
        "w4pack": "ranks",
    }
    for engine, way in words.items():
        folder = out if engine == "w4pack" else source
        said = run("check", folder, "--engine", engine, "--tp", "3").expect(3).out
        assert [line for line in said.splitlines() if "way on: " in line and way in line], said


def test_check_json_has_the_documented_keys(source: Path, ordered: Path) -> None:
    done = run_process("check", source, "--engine", "vllm", "--tp", "1,2", "--json")
    answer = done.data
    keys = {
        "schema",
        "path",
        "engine",
        "engine_version",
        "ok",
        "evidence",
        "bytes_read",
        "results",
        "suggestion",
    }
    assert answer.keys() >= keys
    assert answer["engine"] == "vllm"
    assert [r["tp"] for r in answer["results"]] == [1, 2]
    assert answer["ok"] == all(r["ok"] for r in answer["results"])
    done.expect(0 if answer["ok"] else 3)
    refused = run_process("check", ordered, "--engine", "vllm", "--json").expect(3).data
    (result,) = refused["results"]
    assert result["verdict"] == "refuses"
    assert result["blockers"]
    assert result["blockers"][0].keys() >= {"layer", "rule", "expected", "found"}
    assert refused["suggestion"].startswith("w4pack convert ")


def test_check_suggestion_runs_as_it_stands(ordered: Path, tmp_path: Path) -> None:
    answer = run("check", ordered, "--engine", "vllm", "--json").expect(3).data
    words = answer["suggestion"].split()[1:]
    words = [str(tmp_path / "out") if w in ("OUT", "out") else w for w in words]
    assert str(ordered) in words
    run(*words, "-q").expect(0)


def test_check_asks_all_engines_by_default(source: Path) -> None:
    done = run("check", source, "--json").expect(3)  # w4pack itself takes artifacts only
    assert done.data["engine"] == "all"
    engines = [answer["engine"] for answer in done.data["engines"]]
    assert engines == ["vllm", "sglang", "transformers", "w4pack"]


def test_verify_json_has_the_documented_keys(source: Path, out: Path) -> None:
    told = run_process("verify", out, "--against", source, "--json").expect(0).data
    keys = {"schema", "path", "against", "ok", "lossless", "tensors", "compared", "failures"}
    assert told.keys() >= keys
    assert told["ok"] is True
    assert told["lossless"] is True
    assert told["failures"] == []
    assert told["tensors"] == len(oracle.read_folder(out))
    assert told["against"] == str(source)
    assert run("verify", out, "--json").expect(0).data["against"] is None


@pytest.mark.parametrize("words", [("inspect",), ("check", "--engine", "vllm")])
def test_json_stdout_is_one_object_though_there_are_warnings(words: tuple[str, ...], source: Path) -> None:
    name, *options = words
    done = run_process(name, source, *options, "--json")
    assert isinstance(json.loads(done.out), dict)
    if name == "inspect":
        assert done.data["warnings"]


def test_human_output_warns_on_stderr_and_keeps_data_on_stdout(source: Path) -> None:
    done = run_process("inspect", source).expect(0)
    assert "warning: " in done.err
    assert "warning: " not in done.out
    assert "k_proj" in done.out or "self_attn" in done.out
    assert "\x1b" not in done.out + done.err


# --- JSON lines for a job ---------------------------------------------------------------------------------


def test_convert_json_lines_begin_with_the_plan_and_end_with_done(source: Path, tmp_path: Path) -> None:
    done = run_process("convert", source, tmp_path / "out", "--to", "marlin", "--json").expect(0)
    events = done.events
    kinds = [event["event"] for event in events]
    assert kinds[-1] == "done"
    assert kinds.count("done") == 1
    assert kinds.count("plan") == 1
    assert "error" not in kinds
    assert set(kinds) <= {"plan", "start", "progress", "layer", "shard", "warning", "done"}
    assert events[0]["schema"] == 1
    assert kinds.index("plan") < min(
        kinds.index(k) for k in kinds if k in ("progress", "layer", "shard", "done")
    )
    (warning,) = [event for event in events if event["event"] == "warning"]
    assert warning.keys() >= {"code", "where", "expected", "found"}
    assert not done.err.strip()


def test_convert_json_lines_end_with_error(ordered: Path, tmp_path: Path) -> None:
    done = run_process("convert", ordered, tmp_path / "out", "--to", "awq", "--json").expect(3)
    error = done.events[-1]
    assert error["event"] == "error"
    assert error["exit"] == 3
    assert error.keys() >= {"event", "code", "exit", "what", "where", "expected", "found", "hint"}
    assert re.fullmatch(r"[a-z0-9-]+", error["code"])
    assert error["what"][0].islower()
    assert not error["what"].endswith(".")


@pytest.mark.parametrize("name", ["inspect", "check", "verify", "unpack"])
def test_json_errors_are_json_too(name: str, tmp_path: Path) -> None:
    words: list[Any] = [
        name,
        tmp_path / "nowhere",
        *([tmp_path / "out"] if name == "unpack" else []),
        "--json",
    ]
    done = run_process(*words).expect(1)
    error = json.loads(done.out.splitlines()[-1])
    assert error["event"] == "error"
    assert error["exit"] == 1


def test_error_text_has_the_four_parts_and_goes_to_stderr(ordered: Path, tmp_path: Path) -> None:
    done = run_process("convert", ordered, tmp_path / "out", "--to", "awq").expect(3)
    lines = done.err.splitlines()
    (first,) = [i for i, line in enumerate(lines) if line.startswith("error: ")]
    assert any(line.startswith("  where: ") for line in lines[first:])
    (hint,) = [line for line in lines if line.startswith("hint: ")]
    assert "--regroup" in hint or "--to marlin" in hint
    assert "error: " not in done.out


# --- quiet, dry run, usage --------------------------------------------------------------------------------


def test_a_quiet_dry_run_says_nothing_when_it_works_and_only_the_error_when_not(
    source: Path, ordered: Path, tmp_path: Path
) -> None:
    assert run("convert", source, tmp_path / "out", "--dry-run", "-q").expect(0).text == ""
    refused = run("convert", ordered, tmp_path / "out", "--to", "awq", "--dry-run", "-q").expect(3)
    assert refused.err.startswith("error: ") and refused.out == ""
    told = run("convert", source, tmp_path / "out", "--dry-run", "-q", "--json").expect(0)
    assert told.events[0]["event"] == "plan"


@pytest.mark.parametrize("name", ["tpu", "cuda:x", "mps"])
def test_a_device_of_no_kind_is_told_with_a_way_on(name: str, source: Path, tmp_path: Path) -> None:
    error = run("convert", source, tmp_path / "out", "--device", name, "--json").expect(2).error
    assert (error["found"], error["hint"]) == (name, "--device cpu")


def test_quiet_says_nothing_when_it_works_and_only_the_error_when_not(
    source: Path, ordered: Path, tmp_path: Path
) -> None:
    done = run_process("convert", source, tmp_path / "out", "--to", "marlin", "-q").expect(0)
    assert (done.out, done.err) == ("", "")
    done = run_process("convert", ordered, tmp_path / "bad", "--to", "awq", "-q").expect(3)
    assert done.out == ""
    assert done.err.startswith("error: ")


def test_dry_run_prints_the_plan_and_writes_nothing(source: Path, tmp_path: Path) -> None:
    done = run_process("convert", source, tmp_path / "out", "--to", "marlin", "--dry-run").expect(0)
    assert list(tmp_path.iterdir()) == []
    assert "lossless" in done.out
    for part in ("source", "target", "lm_head"):
        assert part in done.out
    again = run_process("convert", source, tmp_path / "out", "--to", "marlin", "--dry-run", "--json").expect(
        0
    )
    assert again.plan
    assert list(tmp_path.iterdir()) == []
    assert again.events[-1]["event"] == "done"


def test_dry_run_refuses_as_the_real_run_does(ordered: Path, tmp_path: Path) -> None:
    done = convert(ordered, tmp_path / "out", "awq", "--dry-run").expect(3)
    real = convert(ordered, tmp_path / "out", "awq").expect(3)
    assert done.error == real.error


def test_plan_text_is_the_same_with_and_without_dry_run(source: Path, tmp_path: Path) -> None:
    dry = run_process("convert", source, tmp_path / "out", "--to", "marlin", "--dry-run").expect(0)
    wet = run_process("convert", source, tmp_path / "out", "--to", "marlin").expect(0)
    steady = [line for line in dry.out.splitlines() if line.strip() and "free" not in line]
    assert steady
    said = wet.out + wet.err
    assert [line for line in steady if line not in said] == []


@pytest.mark.parametrize(
    "words",
    [
        ["convert"],
        ["convert", "SRC"],
        ["convert", "SRC", "OUT", "--to", "gguf"],
        ["convert", "SRC", "OUT", "--threads", "-1"],
        ["convert", "SRC", "OUT", "--threads", "many"],
        ["convert", "SRC", "OUT", "--dtype", "int8"],
        ["convert", "SRC", "OUT", "--zero-reading", "byte"],
        ["convert", "SRC", "OUT", "--pad-for-tp", "0"],
        ["convert", "SRC", "OUT", "--surprise"],
        ["inspect"],
        ["check", "SRC", "--tp", "0"],
        ["check", "SRC", "--tp", "1,x"],
        ["check", "SRC", "--engine", "tgi"],
        ["verify"],
        ["unpack", "SRC"],
        ["surprise"],
    ],
    ids=" ".join,
)
def test_usage_errors_exit_2_and_write_nothing(words: list[str], source: Path, tmp_path: Path) -> None:
    places = {"SRC": str(source), "OUT": str(tmp_path / "out")}
    done = run(*[places.get(word, word) for word in words]).expect(2)
    assert list(tmp_path.iterdir()) == []
    assert done.err


def test_unpack_of_what_is_no_artifact_is_refused(source: Path, tmp_path: Path) -> None:
    run("unpack", source, tmp_path / "back", "--json").expect(1, "w4pack.json")
    assert not (tmp_path / "back").exists()


def test_a_dense_model_has_nothing_to_convert(tmp_path: Path) -> None:
    config = b.llama_config(vocab_size=32)
    made = b.Model(config, b.skeleton(np.random.default_rng(0), config))
    made.dense["model.layers.0.self_attn.q_proj.weight"] = b.dense(np.random.default_rng(1), 256, 256)
    source = b.write(tmp_path / "src", made, b.gptq, None)
    convert(source, tmp_path / "out", "marlin").expect(3)
    assert not (tmp_path / "out").exists()
    labelled = b.write(tmp_path / "labelled", made, b.gptq, b.gptq_config())
    convert(labelled, tmp_path / "out", "marlin").expect(3)


def test_version_and_help_come_first(tmp_path: Path) -> None:
    done = run_process("--version", cwd=tmp_path).expect(0)
    assert re.search(r"\d+\.\d+", done.out)
    assert "convert" in run_process("--help", cwd=tmp_path).expect(0).out


# --- pipes and terminals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words", [["inspect", "SRC"], ["inspect", "SRC", "--json"], ["convert", "SRC", "OUT", "--json"]]
)
def test_closed_pipe_ends_quietly_with_0(words: list[str], source: Path, tmp_path: Path) -> None:
    places = {"SRC": str(source), "OUT": str(tmp_path / "out")}
    read_end, write_end = os.pipe()
    os.close(read_end)
    args = command(*[places.get(word, word) for word in words])
    done = subprocess.run(args, stdout=write_end, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    os.close(write_end)
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr
    assert done.returncode == 0, done.stderr


def on_terminal(words: list[str], env: dict[str, str]) -> tuple[int, str]:
    """Run a command whose stderr is a terminal; return exit code and what the terminal saw."""
    main_end, child_end = pty.openpty()
    fcntl.ioctl(child_end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))  # a new one is 0 x 0
    full = {k: v for k, v in os.environ.items() if k not in ("W4PACK_NO_PROGRESS", "NO_COLOR")} | env
    child = subprocess.Popen(command(*words), stdout=subprocess.DEVNULL, stderr=child_end, env=full)
    os.close(child_end)
    seen, deadline = b"", time.monotonic() + 60
    while time.monotonic() < deadline:
        ready, _, _ = select.select([main_end], [], [], 1)
        if not ready:
            continue
        try:
            data = os.read(main_end, 4096)
        except OSError:  # the child closed its end
            break
        if not data:
            break
        seen += data
    os.close(main_end)
    return child.wait(timeout=60), seen.decode("utf-8", "replace")


def test_bar_on_a_terminal_and_none_where_it_is_unwanted(source: Path, tmp_path: Path) -> None:
    words = ["convert", str(source), str(tmp_path / "out"), "--to", "marlin", "--overwrite"]
    code, seen = on_terminal(words, {"TERM": "xterm", "COLUMNS": "100"})
    assert code == 0, seen
    assert "\r" in seen.replace("\r\n", "\n")
    assert "%" in seen
    for env in ({"TERM": "xterm", "W4PACK_NO_PROGRESS": "1"}, {"TERM": "dumb"}):
        code, seen = on_terminal(words, env)
        assert code == 0, seen
        assert "\r" not in seen.replace("\r\n", "\n"), env
    code, seen = on_terminal([*words, "-q"], {"TERM": "xterm"})
    assert (code, seen) == (0, "")
    code, seen = on_terminal(words, {"TERM": "xterm", "NO_COLOR": "1"})
    assert code == 0
    assert not re.search(r"\x1b\[[0-9;]*m", seen)


def test_no_bar_where_stderr_is_no_terminal(source: Path, tmp_path: Path) -> None:
    done = run_process("convert", source, tmp_path / "out", "--to", "marlin").expect(0)
    assert "\r" not in done.err
    assert "\x1b" not in done.text
    assert "verify" in done.text  # the next command


def test_odd_names_of_folders(source: Path, tmp_path: Path) -> None:
    strange = tmp_path / "größe mit  Leerzeichen [1]"
    run("convert", source, strange, "--to", "marlin", "-q").expect(0)
    assert run("inspect", strange, "--json").expect(0).data["path"] == str(strange)
    cwd = tmp_path / "cwd"
    cwd.mkdir()
    (cwd / "-src").symlink_to(source)
    run_process("convert", "./-src", "./out/", "--to", "marlin", "-q", cwd=cwd).expect(0)
    assert (cwd / "out" / "config.json").exists()
