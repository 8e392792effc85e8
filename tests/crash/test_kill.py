"""Stops at every step and at random moments, then ``--resume``: the bytes are those of an undisturbed run.

The hook: with ``W4PACK_TEST_EXIT_AT=n`` the command leaves by ``os._exit`` at its n-th write, fsync, rename.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import builders as b
import oracle
from runner import Run, command, convert, run, run_process
from w4pack.convert.events import JsonLines
from w4pack.convert.jobs import execute

Trees = dict[str, dict[str, str]]  # target -> file -> hash
HOOK = "W4PACK_TEST_EXIT_AT"


def tree(path: Path) -> dict[str, str]:
    """Return the hash of every file below a folder."""
    files = sorted(p for p in path.rglob("*") if p.is_file())
    return {str(p.relative_to(path)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def tiny_source(path: Path) -> Path:
    """Write a checkpoint of one block, in two shards, with act-order in one place and a side file."""
    config = b.llama_config(
        hidden_size=128, intermediate_size=128, num_attention_heads=2, num_key_value_heads=2, vocab_size=32
    )
    model = b.model(1, config, group=64)
    down = model.linears["model.layers.0.mlp.down_proj"]
    down.gi = down.gi[np.random.default_rng(2).permutation(128)]
    b.write(path, model, b.gptq, b.gptq_config(group=64, desc=True), shards=2)
    (path / "tokenizer.json").write_text("{}")
    return path


SHARDS = ("--max-shard-size", "20KB")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source of every test here."""
    return tiny_source(tmp_path_factory.mktemp("crash") / "src")


@pytest.fixture(scope="module")
def want(source: Path) -> Trees:
    """The trees of undisturbed runs."""
    trees = {}
    for target in ("marlin", "gptq"):
        out = source.parent / f"want-{target}"
        convert(source, out, target, *SHARDS).expect(0)
        assert len(list(out.glob("model-*.safetensors"))) >= 4
        trees[target] = tree(out)
    return trees


# --- every step -------------------------------------------------------------------------------------------


def stopped_child(step: int, *words: str | Path) -> bool:
    """Run the command in a forked child that stops at its n-th step; return whether it got to its end."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # idle threads of numpy's linear algebra
        child = os.fork()  # the imports are there already: much cheaper than a fresh interpreter
    if child == 0:
        code = 70
        try:
            os.environ[HOOK] = str(step)
            code = run(*words).code
        finally:
            os._exit(code if code in (0, 1, 3, 4) else 70)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code == 0


def steps(source: Path, out: Path, target: str, *options: str) -> Iterator[int]:
    """Yield 1, 2, 3, ... as long as a conversion has that many steps; each conversion stops there."""
    for step in range(1, 2000):
        words = ("convert", source, out, "--to", target, *SHARDS, "-q", *options)
        if stopped_child(step, *words):
            return
        yield step
    raise AssertionError("a conversion of this size has fewer steps")


@pytest.mark.parametrize("target", ["marlin", "gptq"])
def test_stop_at_every_step_publishes_nothing_half_and_resume_ends_equal(
    target: str, source: Path, want: Trees, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    untouched, count = tree(source), 0
    for step in steps(source, out, target):
        count += 1
        if out.exists():  # stopped after the last rename: the result is whole
            assert tree(out) == want[target], step
        convert(source, out, target, *SHARDS, "--resume").expect(0)
        assert tree(out) == want[target], step
        assert not list(tmp_path.glob("out.w4pack*")), step
        for path in out.iterdir():
            path.unlink()
        out.rmdir()
    assert count > 10, f"{HOOK} has no effect"
    assert tree(out) == want[target]  # the last run was not stopped
    assert tree(source) == untouched


def test_two_stops_in_one_conversion(source: Path, want: Trees, tmp_path: Path) -> None:
    rng = random.Random(35)
    for i in range(12):
        out = tmp_path / f"out{i}"
        words = ("convert", source, out, "--to", "marlin", *SHARDS, "-q", "--resume")
        for _ in range(2):
            stopped_child(rng.randrange(1, 30), *words)
        run(*words).expect(0) if not out.exists() else None
        assert tree(out) == want["marlin"], i


def test_overwrite_never_leaves_less_than_one_whole_output(source: Path, want: Trees, tmp_path: Path) -> None:
    out, old = tmp_path / "out", tmp_path / "out.w4pack-old"
    for step in range(1, 400):
        convert(source, out, "gptq", *SHARDS, "--overwrite").expect(0)
        done = stopped_child(step, "convert", source, out, "--to", "marlin", *SHARDS, "-q", "--overwrite")
        whole = [tree(p) for p in (out, old) if p.exists()]
        assert want["gptq"] in whole or want["marlin"] in whole, step
        if done:
            return
        convert(source, out, "marlin", *SHARDS, "--overwrite", "--resume").expect(0)
        assert tree(out) == want["marlin"], step
        assert not list(tmp_path.glob("out.w4pack*")), step
    raise AssertionError("a conversion of this size has fewer steps")


# --- what may not change between two runs -----------------------------------------------------------------


def half_done(source: Path, out: Path, *options: str) -> Path:
    """Leave a conversion unfinished, with at least one finished shard; return its staging folder."""
    staging = out.with_name(out.name + ".w4pack-staging")
    for step in range(8, 400):  # every stop starts afresh
        for path in sorted(staging.rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
        if staging.exists():
            staging.rmdir()
        if stopped_child(step, "convert", source, out, "--to", "marlin", *SHARDS, "-q", *options):
            raise AssertionError("never unfinished with a finished shard")
        if staging.exists() and len(list(staging.rglob("*.safetensors"))) >= 2 and finished(staging):
            return staging
    raise AssertionError("no stop left a finished shard")


def finished(staging: Path) -> bool:
    """Return whether the first shard reads as a whole file with data in it."""
    for path in staging.rglob("*.safetensors"):
        try:
            if any(any(t.data) for t in oracle.read_safetensors(path).values()):
                return True
        except (ValueError, KeyError, OSError):
            continue
    return False


def copied(source: Path, target: Path) -> Path:
    """Copy a checkpoint, so that a test may change it."""
    target.mkdir()
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def test_resume_with_another_target_or_option_is_refused(source: Path, want: Trees, tmp_path: Path) -> None:
    out = tmp_path / "out"
    half_done(source, out)
    for words in (("gptq", *SHARDS), ("marlin", "--max-shard-size", "40KB")):
        done = convert(source, out, *words, "--resume").expect(3)
        assert done.error["code"] == "resume-differs"
        assert not out.exists()
    convert(source, out, "marlin", *SHARDS, "--resume", "--threads", "3").expect(0)
    assert tree(out) == want["marlin"]


def test_resume_after_the_source_changed_is_refused(source: Path, tmp_path: Path) -> None:
    changed, out = copied(source, tmp_path / "src"), tmp_path / "out"
    half_done(changed, out, "--strict")
    shard = changed / "model-00002-of-00002.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    done = convert(changed, out, "marlin", *SHARDS, "--strict", "--resume").expect(3, shard.name)
    assert done.error["code"] == "resume-differs"
    assert not out.exists()


@pytest.mark.parametrize("strict", [("--strict",), ()], ids=["begun with", "begun without"])
def test_strict_is_the_job_s_from_its_beginning(
    strict: tuple[str, ...], source: Path, want: Trees, tmp_path: Path
) -> None:
    """What was made before the source was hashed is not proved to come of it: w4pack.json would lie."""
    out = tmp_path / "out"
    half_done(source, out, *strict)
    other = () if strict else ("--strict",)
    error = convert(source, out, "marlin", *SHARDS, "--resume", *other).expect(3).error
    assert error["what"] == "the interrupted run had other options"
    assert {error["expected"], error["found"]} == {"--strict", "without --strict"}
    assert error["expected"] == (strict or ("without --strict",))[0]
    convert(source, out, "marlin", *SHARDS, "--resume", *strict).expect(0)
    assert weights(tree(out)) == weights(want["marlin"])


def test_a_strict_run_goes_on_with_strict(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(source, tmp_path / "whole", "marlin", *SHARDS, "--strict").expect(0)
    half_done(source, out, "--strict")
    convert(source, out, "marlin", *SHARDS, "--strict", "--resume").expect(0)
    assert tree(out) == tree(tmp_path / "whole")
    recorded = json.loads((out / "w4pack.json").read_text())["source"]["files"]
    for entry in recorded:
        assert entry["sha256"] == hashlib.sha256((source / entry["name"]).read_bytes()).hexdigest()


def test_a_changed_byte_is_not_seen_without_strict_but_a_changed_header_is(
    source: Path, want: Trees, tmp_path: Path
) -> None:
    changed, out = copied(source, tmp_path / "src"), tmp_path / "out"
    half_done(changed, out)
    shard = changed / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes().replace(b'"format": "pt"', b'"format": "np"'))
    done = convert(changed, out, "marlin", *SHARDS, "--resume").expect(3, shard.name)
    assert done.error["code"] == "resume-differs"
    shard.write_bytes((source / shard.name).read_bytes())
    convert(changed, out, "marlin", *SHARDS, "--resume").expect(0)
    assert tree(out) == want["marlin"]


@pytest.mark.parametrize("published", [False, True], ids=["interrupted", "complete"])
def test_other_settings_are_another_source(published: bool, source: Path, tmp_path: Path) -> None:
    changed, out = copied(source, tmp_path / "src"), tmp_path / "out"
    if published:
        convert(changed, out, "marlin", *SHARDS).expect(0)
    else:
        half_done(changed, out)
    config = changed / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "rms_norm_eps": 0.001}))
    done = convert(changed, out, "marlin", *SHARDS, "--resume").expect(3)
    assert (done.error["code"], done.error["where"]) == ("resume-differs", "config.json")
    assert out.exists() == published


def weights(files: dict[str, str]) -> dict[str, str]:
    """Return the weight files of a tree and their index."""
    return {name: digest for name, digest in files.items() if name.startswith("model")}


@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_damaged_finished_shard_is_made_again(damage: str, source: Path, want: Trees, tmp_path: Path) -> None:
    out = tmp_path / "out"
    staging = half_done(source, out)
    for path in staging.rglob("*.safetensors"):
        data = bytearray(path.read_bytes())
        if damage == "cut":
            del data[-1:]
        else:
            data[-1] ^= 0xFF
        path.write_bytes(data)
    convert(source, out, "marlin", *SHARDS, "--resume").expect(0)
    assert tree(out) == want["marlin"]


def test_torn_journal_line_counts_as_absent(source: Path, want: Trees, tmp_path: Path) -> None:
    out = tmp_path / "out"
    staging = half_done(source, out)
    logs = [
        p for p in staging.iterdir() if p.is_file() and p.suffix in (".jsonl", ".log", ".journal", ".json")
    ]
    assert logs, list(staging.iterdir())
    for path in logs:
        if path.suffix == ".jsonl" or "journal" in path.name:
            path.write_bytes(path.read_bytes()[:-7])
    convert(source, out, "marlin", *SHARDS, "--resume").expect(0)
    assert tree(out) == want["marlin"]


def journaled(source: Path, out: Path, *options: str) -> Path:
    """Stop a conversion by a signal once a step is finished and journaled; return its staging folder."""
    finish = execute.Executor._finish

    def stopping(self: execute.Executor, running: Any) -> None:
        finish(self, running)
        self.stop.signum = signal.SIGTERM

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(execute.Executor, "_finish", stopping)
        convert(source, out, "marlin", *SHARDS, *options).expect(143)
    staging = out.with_name(out.name + ".w4pack-staging")
    assert len((staging / "journal.jsonl").read_text().splitlines()) > 1
    return staging


@pytest.mark.parametrize("more", [(), ("--dry-run",), ("--max-shard-size", "30KB")], ids=str)
def test_the_work_of_an_unfinished_run_is_not_lost_by_a_forgotten_option(
    more: tuple[str, ...], source: Path, want: Trees, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    staging = journaled(source, out)
    before = {p: p.read_bytes() for p in staging.rglob("*") if p.is_file()}
    done = convert(source, out, "marlin", *SHARDS, *more).expect(1, "--resume", "--overwrite", staging)
    assert done.error["code"] == "unfinished"
    assert {p: p.read_bytes() for p in staging.rglob("*") if p.is_file()} == before
    convert(source, out, "marlin", *SHARDS, "--resume").expect(0)
    assert tree(out) == want["marlin"]


def test_an_unfinished_run_is_discarded_on_request_and_that_is_said_before(
    source: Path, want: Trees, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    staging, said = journaled(source, out), []
    tell = JsonLines.event

    def event(self: JsonLines, kind: str, **fields: Any) -> None:
        if "discarded" in str(fields.get("text")):
            said.append(len((staging / "journal.jsonl").read_text().splitlines()))
        tell(self, kind, **fields)

    monkeypatch.setattr(JsonLines, "event", event)
    convert(source, out, "marlin", *SHARDS, "--overwrite", "--dry-run").expect(0, "discarded", "--resume")
    convert(source, out, "marlin", *SHARDS, "--overwrite").expect(0, "discarded", "--resume")
    assert len(said) == 2 and min(said) > 1  # its work was still there
    assert tree(out) == want["marlin"]
    assert not list(tmp_path.glob("out.w4pack*"))
    assert "discarded" not in run("convert", source, out, "--overwrite", *SHARDS).expect(0).err


def test_a_run_that_has_finished_nothing_is_in_nobody_s_way(
    source: Path, want: Trees, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    staging = journaled(source, out)
    log = staging / "journal.jsonl"
    log.write_text(log.read_text().splitlines(keepends=True)[0])
    convert(source, out, "marlin", *SHARDS).expect(0)
    assert tree(out) == want["marlin"]


def test_unpack_keeps_the_work_of_an_unfinished_run_too(source: Path, tmp_path: Path) -> None:
    packed, out = tmp_path / "packed", tmp_path / "out"
    convert(source, packed, "marlin", *SHARDS).expect(0)
    journaled(source, out)
    error = run("unpack", packed, out, "--json").expect(1).error
    assert error["code"] == "unfinished"
    error = run("unpack", packed, out, "--resume", "--json").expect(3).error
    assert (error["expected"], error["found"]) == ("marlin", "unpack")
    run("unpack", packed, out, "--overwrite").expect(0)


# --- OUT is a link ----------------------------------------------------------------------------------------


@pytest.fixture(params=["absolute", "relative"])
def linked(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, Path]:
    """A link to an empty folder elsewhere, and that folder."""
    target, link = tmp_path / "disk" / "real", tmp_path / "here" / "out"
    target.mkdir(parents=True)
    link.parent.mkdir()
    link.symlink_to(target if request.param == "absolute" else "../disk/real")
    return link, target


def still_linked(link: Path, target: Path, want: dict[str, str]) -> None:
    """Check that the output lies where the link leads, the link is a link, and nothing else is there."""
    assert link.is_symlink()
    assert link.resolve() == target
    assert not target.is_symlink()
    assert tree(target) == want
    assert [p.name for p in link.parent.iterdir()] == ["out"]
    assert [p.name for p in target.parent.iterdir()] == ["real"]


def test_out_may_be_a_link_to_an_empty_folder(linked: tuple[Path, Path], source: Path, want: Trees) -> None:
    link, target = linked
    convert(source, link, "marlin", *SHARDS).expect(0)
    still_linked(link, target, want["marlin"])
    convert(source, link, "gptq", *SHARDS).expect(1, "--overwrite")
    still_linked(link, target, want["marlin"])


def test_overwrite_replaces_what_the_link_leads_to(
    linked: tuple[Path, Path], source: Path, want: Trees
) -> None:
    link, target = linked
    convert(source, link, "gptq", *SHARDS).expect(0)
    (target / "stray.txt").write_text("x")
    convert(source, link, "marlin", *SHARDS, "--overwrite").expect(0)
    still_linked(link, target, want["marlin"])


def test_resume_through_a_link(linked: tuple[Path, Path], source: Path, want: Trees) -> None:
    link, target = linked
    for step in range(8, 48, 9):
        assert not stopped_child(step, "convert", source, link, "--to", "marlin", *SHARDS, "-q")
        convert(source, link, "marlin", *SHARDS, "--resume").expect(0)
        still_linked(link, target, want["marlin"])
        for path in target.iterdir():
            path.unlink()


def test_unpack_through_a_link(linked: tuple[Path, Path], source: Path, tmp_path: Path) -> None:
    link, target = linked
    convert(source, tmp_path / "art", "marlin", *SHARDS).expect(0)
    run("unpack", tmp_path / "art", link).expect(0)
    assert oracle.read_folder(target) == oracle.read_folder(source)
    assert link.is_symlink()


def test_a_link_to_nothing_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to("nowhere")
    convert(source, tmp_path / "out", "marlin").expect(1, str(tmp_path / "out"))
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


# --- threads ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("writer", ["gptq", "awq", "compressed"])
@pytest.mark.parametrize("target", ["marlin", "gptq", "awq", "compressed-tensors", "dense"])
def test_any_number_of_threads_gives_equal_bytes(writer: str, target: str, tmp_path: Path) -> None:
    config = b.llama_config(vocab_size=64, num_key_value_heads=1)
    makers = {
        "gptq": (b.gptq_v2, b.gptq_config(sym=False, group=64, checkpoint_format="gptq_v2")),
        "awq": (b.awq_gemm, b.awq_config(group=64)),
        "compressed": (b.compressed, b.compressed_config(sym=False, group=64)),
    }
    source = b.write(tmp_path / "src", b.model(5, config, group=64, sym=False), *makers[writer], shards=2)
    trees = []
    for threads in (1, 2, 5):
        out = tmp_path / f"out{threads}"
        convert(source, out, target, "--threads", threads, *SHARDS).expect(0)
        trees.append(tree(out))
    assert trees[0] == trees[1] == trees[2]


# --- real signals -----------------------------------------------------------------------------------------


def larger_source(path: Path) -> Path:
    """Write about 35 MB, so that a kill can land inside the work."""
    config = b.llama_config(
        hidden_size=1024, intermediate_size=4096, num_attention_heads=8, num_key_value_heads=8
    )
    config.update(head_dim=128, num_hidden_layers=4)
    first = b.model(34, {**config, "num_hidden_layers": 1})
    made = b.Model(config, b.skeleton(np.random.default_rng(0), config))
    for i in range(4):
        made.linears.update({n.replace("layers.0", f"layers.{i}"): x for n, x in first.linears.items()})
    return b.write(path, made, b.gptq, b.gptq_config(), shards=4)


FOUR = ("--max-shard-size", "8MB")


@pytest.mark.slow
def test_kill_9_at_random_moments_then_resume(tmp_path: Path) -> None:
    source = larger_source(tmp_path / "src")
    start = time.monotonic()
    run_process("convert", source, tmp_path / "want", "--to", "marlin", *FOUR, "-q").expect(0)
    whole = time.monotonic() - start
    expected, rng, cut = tree(tmp_path / "want"), random.Random(20), 0
    for i in range(20):
        out = tmp_path / f"out{i % 2}"
        words = command("convert", str(source), str(out), "--to", "marlin", *FOUR, "-q")
        child = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(rng.uniform(0.1, 1.0) * whole)
        child.kill()
        cut += child.wait() == -signal.SIGKILL
        convert(source, out, "marlin", *FOUR, "--resume").expect(0)
        assert tree(out) == expected, i
        assert not list(tmp_path.glob("out*.w4pack*")), i
        for path in out.iterdir():
            path.unlink()
        out.rmdir()
    assert cut >= 5, "the kills came too late to prove anything"


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_stops_cleanly_and_resume_goes_on(number: signal.Signals, code: int, tmp_path: Path) -> None:
    source, out = larger_source(tmp_path / "src"), tmp_path / "out"
    for _ in range(10):  # on a busy machine the work may be done before the signal is sent
        done = signalled(number, "convert", str(source), str(out), "--to", "marlin", *FOUR, "--json")
        if done.code != 0:
            break
        shutil.rmtree(out)
    done.expect(code)
    assert done.events[-1]["event"] == "error"
    assert done.events[-1]["exit"] == code
    assert not out.exists()
    convert(source, out, "marlin", *FOUR, "--resume").expect(0)
    run("verify", out, "--against", source).expect(0)


def signalled(number: signal.Signals, *args: str) -> Run:
    """Run a command and send it the signal as soon as its first line is there: the work begins."""
    words = command(*args)
    child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    first = child.stdout.readline()
    child.send_signal(number)
    rest, err = child.communicate(timeout=60)
    return Run(tuple(words), child.returncode, first + rest, err)


def test_events_of_a_resumed_run_end_with_done(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    half_done(source, out)
    events = convert(source, out, "marlin", *SHARDS, "--resume").expect(0).events
    assert events[-1]["event"] == "done"
    assert json.dumps(events[-1])
