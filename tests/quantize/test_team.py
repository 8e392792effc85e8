"""Two processes that share the calibration text make what one makes, to the byte."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quantize.test_outputs import FEW, manifest, quantize, tree
from runner import run
from w4pack.convert.dialects.online import ACT_SITES
from w4pack.convert.dialects.online_reading import parse
from w4pack.convert.errors import UsageError, W4PackError
from w4pack.convert.files.checkpoint import open_checkpoint
from w4pack.convert.files.local import LocalStore
from w4pack.convert.jobs.running import Running
from w4pack.convert.modeljobs import follow, measuring
from w4pack.convert.modeljobs.measuring import Measured
from w4pack.convert.modeljobs.prepared import prepare
from w4pack.convert.modeljobs.quantized import planned
from w4pack.convert.planning.options import ConvertOptions
from w4pack.convert.planning.quantize_options import QuantizeOptions
from w4pack.convert.quantize import whole
from w4pack.convert.quantize.clips import Clips
from w4pack.convert.quantize.hessian import Statistics
from w4pack.convert.quantize.team import Team
from w4pack.convert.source.detect import read_source
from w4pack.convert.source.reading import DetectOptions

WORDS = ("--quantize", "gptq", "--group-size", 32, "--to", "marlin", *FEW)


def together(*words: Any, launcher: tuple[str, ...] = ("-m", "w4pack")) -> subprocess.CompletedProcess[str]:
    """Run ``w4pack`` in two processes, as torchrun starts them."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    return subprocess.run(
        [sys.executable, *map(str, (*torchrun, *launcher, *words))],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.fixture
def halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process runs batches of four windows, as each of two processes does with its half of eight."""
    monkeypatch.setattr(whole, "BATCH_TOKENS", {"cpu": 4 * 64, "cuda": 4 * 64})


@pytest.mark.slow
@pytest.mark.usefixtures("halves")
@pytest.mark.parametrize(
    ("model", "online"),
    [("llama", ("--rotate", "full", "--act-bits", 4, "--kv-bits", 4)), ("mixtral", ())],
    ids=["llama", "mixtral"],
)
def test_two_processes_write_what_one_writes(
    model: str, online: tuple[Any, ...], book: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    source = request.getfixturevalue(model)
    quantize(source, tmp_path / "one", *online, text=book).expect(0)
    done = together("convert", source, tmp_path / "two", "--calibration", book, *WORDS, *online)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.count("target    marlin artifact") == 1  # one of them speaks
    one, two = tree(tmp_path / "one"), tree(tmp_path / "two")
    assert one == two
    if model == "mixtral":
        counts = manifest(tmp_path / "two")["quantization"]["expert_tokens"]
        assert all(sum(c) == 2 * 8 * 64 for c in counts.values())


KILLED = """
import sys
from w4pack.convert.quantize import whole
original = whole.ModelRun.quantize
def stop(self, index):
    if index == 1 and self.team.leads:
        import os
        os._exit(9)
    return original(self, index)
whole.ModelRun.quantize = stop
from w4pack.cli import main
main()
"""


@pytest.mark.slow
@pytest.mark.usefixtures("halves")
def test_a_team_that_lost_its_leader_ends_and_resumes_to_the_same_bytes(
    llama: Path, book: Path, tmp_path: Path
) -> None:
    quantize(llama, tmp_path / "one", text=book).expect(0)
    (tmp_path / "killed.py").write_text(KILLED)
    words = ("convert", llama, tmp_path / "two", "--calibration", book, *WORDS)
    done = together(*words, launcher=(str(tmp_path / "killed.py"),))
    assert done.returncode != 0 and not (tmp_path / "two").exists()
    assert "Traceback (most recent call last)\n  File" not in done.stderr.partition("the leading process")[2]
    again = together(*words, "--resume")
    assert again.returncode == 0, again.stderr[-3000:]
    assert tree(tmp_path / "one") == tree(tmp_path / "two")


def test_rounding_to_nearest_is_not_shared(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("w4pack.convert.quantize.team.team_of", lambda device: Team(0, 2, device))
    monkeypatch.setattr(Team, "leave", lambda self: None)
    done = run("convert", llama, tmp_path / "out", "--quantize", "rtn", "--threads", 1, "--json").expect(2)
    assert done.error["where"] == "--quantize" and done.error["found"] == "rtn, 2 processes"
    assert not (tmp_path / "out").exists()


def test_windows_are_cut_into_neighbours_and_every_process_needs_one() -> None:
    windows = torch.arange(7).unsqueeze(1)
    parts = [Team(rank, 3, "cpu").part(windows).flatten().tolist() for rank in range(3)]
    assert parts == [[0, 1, 2], [3, 4], [5, 6]]
    with pytest.raises(UsageError) as caught:
        Team(0, 8, "cpu").part(windows)
    assert caught.value.where == "--samples"


def test_merged_sums_are_those_of_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collective calls replaced by their definition, on two processes' statistics side by side."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(2, 32, 16, generator=generator)
    both = Statistics(16, torch.device("cpu"), shifted=True)
    parts = [Statistics(16, torch.device("cpu"), shifted=True) for _ in range(2)]
    for part, x in zip(parts, inputs, strict=True):
        part.add(x, x + 1)
        both.add(x, x + 1)
    other = [parts[1].sum, parts[1].shift, torch.tensor([parts[1].tokens])]
    monkeypatch.setattr("torch.distributed.all_reduce", lambda t: t.add_(other.pop(0)))
    Team(0, 2, "cpu").merge(parts[0])
    assert parts[0].tokens == both.tokens == 64
    assert torch.equal(parts[0].hessian(), both.hessian())
    assert torch.equal(parts[0].mean_shift(), both.mean_shift())


def test_only_the_leader_measures_ratios_and_guides(
    llama: Path, book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What runs online of a follower is what the leader says, although it would have found something else."""
    asked = QuantizeOptions(method="gptq", group_size=32, samples=8, seqlen=64, calibration=str(book))
    options = ConvertOptions(rotate="full", quantize=replace(asked, act_bits=4, kv_bits=4))
    monkeypatch.setattr(measuring, "measure", lambda *_: pytest.fail("a follower ran the model"))
    begun: list[Any] = []

    def begin(*given: Any) -> Any:
        begun.extend(given)
        raise W4PackError("far enough")

    monkeypatch.setattr(follow, "model_run", begin)
    with open_checkpoint(LocalStore(llama)) as checkpoint:
        source = read_source(checkpoint, DetectOptions())
        found, running = prepare(source, options, None, Running(threads=1)), Running(threads=1)
        plan, _ = planned(found)
        guides = {name: torch.full(info.shape, 2.0) for name, info in found.guides.items()}
        odd = {4: 0.61, 8: 0.97}  # no trial has these
        told = [plan.digest, Measured(Clips(dict.fromkeys(ACT_SITES, odd), odd, odd), guides)]
        monkeypatch.setattr(Team, "told", lambda team: told.pop(0))
        with pytest.raises(W4PackError, match="far enough"):
            follow.follow(found, tmp_path / "out", running, Team(1, 2, "cpu"))
    prepared, plan = begun[:2]
    online = parse(plan.quant_config["online"])
    assert [quant.clip for quant in online.acts.values()] == [odd] * 4
    assert online.kv is not None and (online.kv.clip_k, online.kv.clip_v) == (odd, odd)
    assert len(guides) == 2 and all(torch.equal(prepared.provider.get(n), g) for n, g in guides.items())


def test_a_follower_whose_leader_is_gone_says_so(
    llama: Path, book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(team: Team) -> None:
        raise RuntimeError("connection closed by peer\nmore")

    monkeypatch.setattr(Team, "told", gone)
    asked = QuantizeOptions(method="gptq", samples=2, seqlen=64, calibration=str(book))
    running = Running(threads=1)
    with open_checkpoint(LocalStore(llama)) as checkpoint:
        source = read_source(checkpoint, DetectOptions())
        found = prepare(source, ConvertOptions(quantize=asked), None, running)
        with pytest.raises(W4PackError) as caught:
            follow.follow(found, tmp_path / "out", running, Team(1, 2, "cpu"))
    assert (caught.value.code, caught.value.found) == ("team-lost", "connection closed by peer")
