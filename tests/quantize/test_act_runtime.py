"""What runs between the linears, as hooks: transforms, quantizers, cache; jobs that run with it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from rotate import tiny

from quantize import sources
from runner import Run, run
from w4pack.convert.dialects.online_reading import parse
from w4pack.convert.errors import Refused, UsageError
from w4pack.convert.files.provider import CheckpointProvider
from w4pack.convert.modeljobs import prepared, quantizerun
from w4pack.convert.modeljobs.online import NOTHING, Cache, Runtime, rotation_of, runtime_of
from w4pack.convert.quantize import evaluation, skeleton
from w4pack.convert.quantize.activations import fake_cache, fake_tokens
from w4pack.convert.quantize.clips import RATIOS
from w4pack.convert.rotate.constructions import matrix
from w4pack.convert.rotate.rotated import Rotated
from w4pack.convert.source.online_places import GUIDE

CPU = torch.device("cpu")
RUN = sorted(n for n in tiny.CONFIGS if n != "opt" and not n.startswith("deepseek"))
QUANTIZERS = [
    *(
        {"kind": "act_quant", "site": site, "bits": 4, "clip": {"4": clip, "8": 1.0}, "symmetric": True}
        for site, clip in (("attn_in", 0.9), ("attn_out", 0.85), ("mlp_in", 0.8), ("mlp_mid", 0.75))
    ),
    {
        "kind": "kv_quant",
        "bits": {"k": 4, "v": 4},
        "clip": {"k": {"4": 0.95, "8": 1.0}, "v": {"4": 0.9, "8": 1.0}},
        "group": 16,
    },
]


def hadamard(order: int, factors: Any, block: int) -> torch.Tensor:
    """Return the dense matrix of a record."""
    made = np.eye(1)
    for size, construction in factors:
        made = np.kron(made, matrix(size, construction))
    return torch.from_numpy(np.kron(np.eye(order // block), made) / block**0.5)


def through(checkpoint: Any, provider: Any, config: Any, between: Runtime) -> torch.Tensor:
    stream = evaluation.through(
        config, provider, tiny.TOKENS, CPU, torch.float32, per_batch=2, between=between
    )
    with torch.no_grad():
        return stream.logits(0)


@pytest.mark.parametrize("name", RUN)
def test_transforms_alone_leave_the_model_what_it_is(name: str, tmp_path: Path) -> None:
    """Weights hold the other halves: heads, R4 of every width, R1 in front of readers of post-norm models."""
    with tiny.opened(tiny.save(name, tmp_path / "src", torch.float32)) as checkpoint:
        source = CheckpointProvider(checkpoint)
        plan = tiny.planned(checkpoint, "full", seed=3)
        changed = {**checkpoint.config, **plan.config_changes}
        rotated = Rotated(source, plan)
        infos = {n: rotated.info(n) for n in rotated.names()}
        between = runtime_of(changed, infos, list(plan.online), [])
        wanted = through(checkpoint, source, checkpoint.config, NOTHING)
        assert tiny.relative(through(checkpoint, rotated, changed, between), wanted) < 2e-4
        assert tiny.relative(through(checkpoint, rotated, changed, NOTHING), wanted) > 1e-2


def test_logits_of_a_window_and_of_its_first_tokens_are_those_of_all(tmp_path: Path) -> None:
    with tiny.opened(tiny.save("llama", tmp_path / "src", torch.float32)) as checkpoint, torch.no_grad():
        stream = evaluation.through(
            checkpoint.config, CheckpointProvider(checkpoint), tiny.TOKENS, CPU, torch.float32, per_batch=2
        )
        whole = stream.logits(0)
        assert torch.allclose(stream.logits(0, 1), whole[1], atol=1e-5)
        assert torch.allclose(stream.logits(0, 1, 5), whole[1, :5], atol=1e-5)


def test_a_transform_of_a_width_that_no_linear_has_is_refused(tmp_path: Path) -> None:
    with tiny.opened(tiny.save("llama", tmp_path / "src", torch.float32)) as checkpoint:
        plan = tiny.planned(checkpoint, "full")
        records = [dict(record) for record in plan.online]
        (last,) = (record for record in records if record["site"] == "mlp_mid")
        runtime_of(checkpoint.config, checkpoint.tensors, records, [])
        last["order"], last["block"] = 2 * last["order"], 2 * last["block"]
        last["factors"] = [[2, "sylvester"], *last["factors"]]
        with pytest.raises(Refused) as caught:
            runtime_of(checkpoint.config, checkpoint.tensors, records, [])
        assert caught.value.where == "quantization_config.online: mlp_mid"
        assert caught.value.found == str(last["order"])


@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral"])
def test_linears_are_given_what_the_records_say(name: str, tmp_path: Path) -> None:
    """Against dense matrices in float64 and the quantizer of a token; codes at a tie may differ by one."""
    with tiny.opened(tiny.save(name, tmp_path / "src", torch.float32)) as checkpoint:
        plan = tiny.planned(checkpoint, "full")
        infos = dict(checkpoint.tensors)
        packed = [n.removesuffix(".weight") for n in infos if n.endswith("_proj.weight") or ".w" in n]
        between = runtime_of(checkpoint.config, infos, [*plan.online, *QUANTIZERS], packed)
        made = skeleton.build(checkpoint.config, CheckpointProvider(checkpoint), CPU, torch.float32)
        layer = made.layers[0]
        made.fill(layer, made.prefix(0))
        generator = torch.Generator().manual_seed(0)
        seen: list[str] = []
        for path, module in layer.named_modules():
            own = made.names.get(f"{made.prefix(0)}{path}.weight", "").removesuffix(".weight")
            if not isinstance(module, torch.nn.Linear) or own not in between.sites:
                continue
            x = torch.randn(5, module.in_features, generator=generator)
            given: list[torch.Tensor] = []
            with between.around(made, layer, 0):
                handle = module.register_forward_pre_hook(lambda m, args, given=given: given.append(args[0]))
                module(x)
                handle.remove()
            site = between.sites[own]
            wanted = turned(x, site, plan.online, 4)
            if own in packed:
                clip = {"attn_in": 0.9, "attn_out": 0.85, "mlp_in": 0.8, "mlp_mid": 0.75}[site]
                wanted = fake_tokens(wanted.float(), 4, clip).double()
            step = wanted.abs().amax(-1, keepdim=True) / 7
            off = (given[0].double() - wanted).abs() > 1e-4 * step
            assert int(off.sum()) <= 1, own
            seen.append(site)
        assert set(seen) == {"attn_in", "attn_out", "mlp_in", "mlp_mid"}


def turned(x: torch.Tensor, site: str, online: Any, heads: int) -> torch.Tensor:
    wanted = {"attn_in": "residual_read", "mlp_in": "residual_read"}.get(site, site)
    wide = x.double()
    for record in online:
        if record["site"] != wanted or (site != "attn_out" and record["order"] != x.shape[-1]):
            continue
        h = hadamard(record["order"], record["factors"], record["block"])
        if site == "attn_out":
            h = torch.from_numpy(np.kron(h.numpy(), np.eye(x.shape[-1] // heads)))
        wide = wide @ h
    return wide


@pytest.mark.parametrize("heads", [12, 16, 20])
def test_a_loud_head_drowns_the_others_unless_they_are_mixed(heads: int) -> None:
    """Attention outputs of which one head is twenty times as large: the relative error of 4 bits."""
    from w4pack.convert.rotate.rotation import make_rotation

    made = make_rotation("heads", heads)
    assert made is not None
    record = {
        "kind": "hadamard", "site": "attn_out", "order": heads, "factors": [list(f) for f in made.factors],
        "block": heads, "signs": None,
    }  # fmt: skip
    generator = torch.Generator().manual_seed(heads)
    x = torch.randn(64, heads, 64, generator=generator)
    x[:, 1] *= 20
    x = x.flatten(-2)
    errors, small = [], []
    for records in (QUANTIZERS, [record, *QUANTIZERS]):
        between = replace(NOTHING, online=parse(records), heads=heads, act_bits=4)
        exact, found = between.transformed("attn_out", x), between.input("attn_out", x)
        back = (found - exact).double()
        if len(records) > len(QUANTIZERS):  # read the error in the heads themselves
            h = hadamard(heads, record["factors"], heads)
            back = torch.einsum("gh,tgc->thc", h.T, back.unflatten(-1, (heads, 64))).flatten(-2)
        errors.append(float(back.square().sum() / x.double().square().sum()))
        quiet = torch.ones(heads, dtype=torch.bool)
        quiet[1] = False
        part = back.unflatten(-1, (heads, 64))[:, quiet]
        whole = x.unflatten(-1, (heads, 64))[:, quiet].double()
        small.append(float(part.square().sum() / whole.square().sum()))
    assert small[0] > 0.9  # nearly every value of the quiet heads is rounded to 0
    assert small[1] < 0.4 and errors[1] < errors[0] / 3


@pytest.mark.parametrize("size", [16, 64, 80, 96, 128])
def test_keys_are_quantized_turned_and_come_back_unturned(size: int) -> None:
    from w4pack.convert.rotate.rotation import make_rotation

    rotation = make_rotation("qk", size)
    assert rotation is not None
    record = {
        "kind": "hadamard", "site": "qk", "order": size, "factors": [list(f) for f in rotation.factors],
        "block": size, "signs": None,
    }  # fmt: skip
    online = parse([record, {**QUANTIZERS[-1], "group": size}])
    assert online.kv is not None
    cache = Cache(4, online.kv, rotation_of(online.hadamard[0]))
    generator = torch.Generator().manual_seed(size)
    keys, values = (torch.randn(2, 3, 5, size, generator=generator) for _ in range(2))
    k, v = cache.update(keys, values, 0, kwargs={})
    h = hadamard(size, record["factors"], size)
    wanted = fake_cache((keys.double() @ h).float(), 4, 0.95).double() @ h.T
    step = 3.0 / 15 * 3
    assert float(((k - wanted).abs() > 1e-4 * step).double().mean()) < 0.02  # a tie moves one head's values
    assert torch.equal(v, fake_cache(values, 4, 0.9))


def test_bits_choose_and_sixteen_is_nothing(tmp_path: Path) -> None:
    with tiny.opened(tiny.save("llama", tmp_path / "src", torch.float32)) as checkpoint:
        infos = dict(checkpoint.tensors)
        names = [n.removesuffix(".weight") for n in infos if n.endswith("_proj.weight")]
        source = CheckpointProvider(checkpoint)

        def at(act: int, kv: int) -> torch.Tensor:
            between = runtime_of(checkpoint.config, infos, QUANTIZERS, names, act_bits=act, kv_bits=kv)
            return through(checkpoint, source, checkpoint.config, between)

        exact = through(checkpoint, source, checkpoint.config, NOTHING)
        assert torch.equal(at(16, 16), exact)
        errors = [tiny.relative(at(*bits), exact) for bits in ((8, 16), (4, 16), (16, 8), (16, 4))]
        assert 0 < errors[0] < errors[1] / 4 and 0 < errors[2] < errors[3] / 4
        with pytest.raises(UsageError):
            runtime_of(checkpoint.config, infos, QUANTIZERS[:4], names, kv_bits=4)
        only = runtime_of(checkpoint.config, infos, QUANTIZERS, [], act_bits=4, kv_bits=16)
        assert torch.equal(through(checkpoint, source, checkpoint.config, only), exact)  # nothing is packed


@pytest.mark.parametrize("name", ["opt", "deepseek-v2"])
def test_architectures_without_a_runtime_are_refused(name: str, tmp_path: Path) -> None:
    with (
        tiny.opened(tiny.save(name, tmp_path / "src", torch.float32)) as checkpoint,
        pytest.raises(Refused) as caught,
    ):
        runtime_of(checkpoint.config, checkpoint.tensors, QUANTIZERS, [])
    assert caught.value.code == "online-architecture"


def test_a_layer_called_without_a_cache_is_refused() -> None:
    between = replace(NOTHING, online=parse(QUANTIZERS), kv_bits=4)
    with pytest.raises(Refused) as caught:
        between._cached(0, torch.nn.Linear(1, 1), (), {"mask": None})
    assert caught.value.found == "mask"


# ---- the commands ----------------------------------------------------------------------------------------

FEW = ("--samples", 4, "--seqlen", 64, "--threads", 1, "--group-size", 64)


def convert(source: Path, out: Path, *words: Any) -> Run:
    return run("convert", source, out, "--json", *words)


def online(folder: Path) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = json.loads((folder / "config.json").read_text())["quantization_config"][
        "online"
    ]
    return records


SIZES = {"intermediate_size": 192, "hidden_size": 96}


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of twelve heads: the transform across them is that of order 12."""
    made = sources.llama(
        num_attention_heads=12, num_key_value_heads=4, head_dim=16, intermediate_size=192, hidden_size=96
    )
    return sources.save(made, tmp_path_factory.mktemp("heads") / "src")


@pytest.fixture(scope="module")
def full(heads: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("full")
    book = sources.text(folder / "book.txt")
    words = ("--rotate", "full", "--quantize", "gptq", "--act-bits", 4, "--kv-bits", 4)
    convert(heads, folder / "out", *words, "--calibration", book, *FEW).expect(0)
    return folder / "out", book


def test_the_artifact_records_everything_that_runs_online(full: tuple[Path, Path]) -> None:
    records = online(full[0])
    made = parse(records)
    orders = {h.site: (h.order, h.factors, h.block) for h in made.hadamard}
    assert orders == {
        "qk": (16, ((16, "sylvester"),), 16),
        "attn_out": (12, ((12, "paley1"),), 12),
        "mlp_mid": (192, ((12, "paley1"), (16, "sylvester")), 192),
    }
    assert {q.bits for q in made.acts.values()} == {4} and set(made.acts) == {
        "attn_in", "attn_out", "mlp_in", "mlp_mid",
    }  # fmt: skip
    assert all(q.clip[4] in RATIOS[4] and q.clip[8] in RATIOS[8] for q in made.acts.values())
    assert made.kv is not None and (made.kv.bits, made.kv.group, made.kv.guide) == ((4, 4), 16, True)
    manifest = json.loads((full[0] / "w4pack.json").read_text())
    assert manifest["options"]["quantize"]["act_bits"] == 4
    assert manifest["rotation"]["mode"] == "full"


def guides_of(folder: Path) -> dict[str, torch.Tensor]:
    stored = safetensors.torch.load_file(folder / "model.safetensors")
    return {name: tensor for name, tensor in stored.items() if name.endswith(GUIDE)}


def test_the_artifact_has_a_guide_of_keys_for_each_layer(full: tuple[Path, Path]) -> None:
    guides = guides_of(full[0])
    assert sorted(guides) == [f"model.layers.{n}.self_attn.k_guide" for n in range(2)]
    assert {(g.dtype, g.shape) for g in guides.values()} == {(torch.float32, (2, 4, 16))}
    assert all(bool(part.any()) for guide in guides.values() for part in guide)
    assert "keys with a guide in each layer" in run("inspect", full[0]).expect(0).out
    run("verify", full[0]).expect(0)


def test_rounding_to_nearest_knows_no_text_and_so_no_guide(heads: Path, tmp_path: Path) -> None:
    words = ("--rotate", "full", "--quantize", "rtn", "--kv-bits", 4, "--group-size", 64)
    convert(heads, tmp_path / "out", *words, "--threads", 1).expect(0)
    kv = parse(online(tmp_path / "out")).kv
    assert kv is not None and not kv.guide
    assert not guides_of(tmp_path / "out")


def test_a_dry_run_plans_what_the_run_measures(
    full: tuple[Path, Path], heads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clip ratios come of running the model over the text, which may take minutes: a plan does not."""
    monkeypatch.setattr(quantizerun, "measure", lambda *_: pytest.fail("a plan ran the model"))
    words = ("--rotate", "full", "--quantize", "gptq", "--act-bits", 4, "--kv-bits", 4)
    done = run(
        "convert", heads, tmp_path / "out", *words, "--calibration", full[1], *FEW, "--dry-run", "--json"
    )
    plan = done.expect(0).plan
    assert plan["plan"]["quantization"]["clips"].startswith("searched on the calibration text")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("method", ["gptq", "rtn"])
def test_a_dry_run_prints_no_ratio_that_is_still_to_be_found(
    method: str, full: tuple[Path, Path], heads: Path, tmp_path: Path
) -> None:
    """Without a text nothing is searched: the ratios are those that the artifact gets."""
    text = () if method == "rtn" else ("--calibration", full[1], *FEW)
    words = ("--rotate", "full", "--quantize", method, "--kv-bits", 4, *text, "--dry-run")
    told = run("convert", heads, tmp_path / "out", *words).expect(0).out
    assert ("clip ratios searched on the calibration text when the run starts" in told) == (method == "gptq")
    assert ("clip ratios at 4 bit: " in told) == (method == "rtn")


def test_eval_runs_it_at_the_recorded_bits_or_others(full: tuple[Path, Path], heads: Path) -> None:
    def nats(*words: Any) -> tuple[float, int, int]:
        done = run(
            "eval", full[0], "--text", full[1], "--windows", 4, "--seqlen", 64, "--against", heads, "--json",
            *words,
        ).expect(0)  # fmt: skip
        return done.data["kl_mean"], done.data["act_bits"], done.data["kv_bits"]

    four, eight, none = nats(), nats("--act-bits", 8), nats("--act-bits", 16, "--kv-bits", 16)
    assert (four[1:], eight[1:], none[1:]) == ((4, 4), (8, 4), (16, 16))
    assert len({four[0], eight[0], none[0]}) == 3


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often the model was run for clip ratios."""
    original, seen = quantizerun.measure, []

    def counting(*given: Any) -> Any:
        seen.append(1)
        return original(*given)

    monkeypatch.setattr(quantizerun, "measure", counting)
    return seen


ONLINE = ("--rotate", "full", "--quantize", "gptq", "--act-bits", 4, "--kv-bits", 4)


def stopped(source: Path, out: Path, book: Path, at: int) -> Run:
    """Run the conversion of ``full`` until it stops before a layer."""
    original = quantizerun.ModelRun.quantize

    def stopping(self: Any, index: int) -> Any:
        if index == at:
            raise KeyboardInterrupt
        return original(self, index)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantizerun.ModelRun, "quantize", stopping)
        return convert(source, out, *ONLINE, "--calibration", book, *FEW).expect(130)


@pytest.mark.parametrize("at", [0, 1])
def test_a_stopped_run_goes_on_with_what_it_measured(
    at: int, full: tuple[Path, Path], heads: Path, tmp_path: Path, measured: list[int]
) -> None:
    """Measuring runs the whole model, which may take longer than a layer: it is done once."""
    out, words = tmp_path / "out", (*ONLINE, "--calibration", full[1], *FEW)
    told = " ".join(str(e.get("text")) for e in stopped(heads, out, full[1], at).events)
    assert [f"layer {n} of 2 measured for clip ratios" in told for n in (1, 2, 3)] == [True, True, False]
    assert "clip ratios at 4 bit: attn_in " in told and "clip ratios at 8 bit: attn_in " in told
    done = convert(heads, out, *words, "--resume").expect(0)
    assert any("as the earlier run measured them" in str(e.get("text")) for e in done.events)
    (found,) = [e for e in done.events if e["event"] == "measured"]
    assert found["online"] == run("inspect", out, "--json").expect(0).data["online"]
    assert measured == [1]
    assert {p.name: p.read_bytes() for p in out.iterdir()} == {
        p.name: p.read_bytes() for p in full[0].iterdir()
    }
    assert convert(heads, out, *words, "--resume").expect(0).events[-1]["resumed_complete"]
    assert measured == [1]


@pytest.mark.parametrize(
    ("words", "expected", "found"),
    [
        (("--kv-bits", 8), "--kv-bits 4", "--kv-bits 8"),
        (("--damp", "0.5"), "--damp 0.03", "--damp 0.5"),
        (("--max-shard-size", "1MB"), "--max-shard-size 5000000000", "--max-shard-size 1000000"),
        (("--no-gptaq", "--tp", 2), "without --tp, --gptaq", "--tp 2, --no-gptaq"),
        (("--strict",), "without --strict", "--strict"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)  # fmt: skip
def test_another_job_is_refused_before_anything_is_measured(
    words: tuple[Any, ...], expected: str, found: str, full: tuple[Path, Path], heads: Path, tmp_path: Path,
    measured: list[int],
) -> None:  # fmt: skip
    out = tmp_path / "out"
    stopped(heads, out, full[1], 0)
    error = convert(
        heads, out, *ONLINE, "--calibration", full[1], *FEW, *words, "--resume"
    ).expect(3).error  # fmt: skip
    assert (error["code"], error["what"]) == ("resume-differs", "the interrupted run had other options")
    assert (error["expected"], error["found"]) == (expected, found)
    assert "`--overwrite` in place of `--resume`" in error["hint"]
    assert measured == [1]


def test_other_options_are_refused_before_schemes_are_chosen(
    llama: Path, book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--quantize", "gptq", "--calibration", book, "--samples", 2, "--seqlen", 64, "--threads", 1)
    original = quantizerun.ModelRun.quantize
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantizerun.ModelRun, "quantize", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        convert(llama, tmp_path / "out", *words, "--group-size", 32).expect(130)
    assert quantizerun.ModelRun.quantize is original
    monkeypatch.setattr(prepared, "choose", lambda *_: pytest.fail("schemes were chosen"))
    error = convert(llama, tmp_path / "out", *words, "--bpw", "5", "--resume").expect(3).error
    assert "--bpw 5.0" in error["found"] and "without --bpw" in error["expected"]


def test_other_text_is_refused_before_anything_is_measured(
    full: tuple[Path, Path], heads: Path, tmp_path: Path, measured: list[int]
) -> None:
    out, other = tmp_path / "out", tmp_path / "other" / full[1].name
    stopped(heads, out, full[1], 0)
    other.parent.mkdir()
    other.write_text(full[1].read_text()[::-1])
    done = convert(heads, out, *ONLINE, "--calibration", other, *FEW, "--resume").expect(3)
    error = done.error
    assert not any(event["event"] == "gate" for event in done.events)  # nothing was computed at all
    assert error["what"] == "the interrupted run had another calibration text or device"
    assert error["expected"].startswith("calibration.digest ") and error["found"] != error["expected"]
    assert measured == [1]


@pytest.mark.parametrize("damage", ["guide", "ratios", "line"])
def test_what_is_damaged_is_measured_again_and_all_that_came_of_it_is_made_again(
    damage: str, full: tuple[Path, Path], heads: Path, tmp_path: Path, measured: list[int]
) -> None:
    out, staging = tmp_path / "out", tmp_path / "out.w4pack-staging"
    stopped(heads, out, full[1], 1)
    log, weights = staging / "journal.jsonl", staging / "out" / "model.safetensors"
    if damage == "guide":
        data = weights.read_bytes()
        values = guides_of(staging / "out")["model.layers.1.self_attn.k_guide"].numpy().tobytes()
        assert data.count(values) == 1
        weights.write_bytes(data.replace(values, bytes(len(values))))
    else:
        lines = log.read_text().splitlines(keepends=True)
        (at,) = (n for n, line in enumerate(lines) if line.startswith('{"measured"'))
        lines[at] = '{"measured":{"acts":{},"k":{"4":2},"v":3}}\n' if damage == "ratios" else "{}\n"
        log.write_text("".join(lines))
    done = convert(heads, out, *ONLINE, "--calibration", full[1], *FEW, "--resume").expect(0)
    assert measured == [1, 1]
    assert not any("kept" in str(e.get("text")) and "layer" in str(e.get("text")) for e in done.events)
    for name in ("model.safetensors", "config.json", "w4pack.json"):
        assert (out / name).read_bytes() == (full[0] / name).read_bytes()


def test_rounding_to_nearest_takes_the_usual_ratios_and_needs_no_text(llama: Path, tmp_path: Path) -> None:
    words = ("--quantize", "rtn", "--rotate", "full", "--tp", 2, "--act-bits", 8, "--group-size", 64)
    convert(llama, tmp_path / "out", *words).expect(0)
    made = parse(online(tmp_path / "out"))
    assert {q.clip[4] for q in made.acts.values()} == {0.9} and {q.bits for q in made.acts.values()} == {8}
    assert made.transform("mlp_mid") == replace(made.hadamard[-1], order=128, block=64)
    assert made.transform("attn_out") is None  # one head a rank


def test_quantizers_without_a_rotation_and_sixteen_bits_with_one(llama: Path, tmp_path: Path) -> None:
    plain, turned_, asym = (tmp_path / name for name in ("plain", "turned", "asym"))
    convert(llama, plain, "--quantize", "rtn", "--act-bits", 4, "--kv-bits", 4).expect(0)
    assert [r["kind"] for r in online(plain)] == ["act_quant"] * 4 + ["kv_quant"]
    convert(llama, turned_, "--quantize", "rtn", "--rotate", "full").expect(0)
    made = parse(online(turned_))
    assert made.settings() == made.settings(16, 16) and made.act_bits == (4, 8, 16) == made.kv_bits
    convert(llama, asym, "--quantize", "rtn", "--rotate", "full", "--asym", "--kv-bits", 4).expect(0)
    assert parse(online(asym)).act_bits == (16,)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("--rotate", "full", "--quantize", "rtn", "--to", "gptq"), "transforms"),
        (("--rotate", "full", "--to", "dense"), "transforms"),
        (("--quantize", "rtn", "--act-bits", 4, "--to", "compressed-tensors"), "4-bit activations"),
        (("--quantize", "rtn", "--kv-bits", 8, "--to", "awq", "--asym"), "8-bit cache"),
    ],
)
def test_other_targets_are_refused_with_what_they_lack(
    words: tuple[Any, ...], found: str, llama: Path, tmp_path: Path
) -> None:
    done = convert(llama, tmp_path / "out", *words).expect(3)
    assert done.error["code"] == "online-transforms" and found in done.error["found"]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "where"),
    [
        (("--act-bits", 4), "--act-bits"),
        (("--kv-bits", 4, "--rotate", "offline", "--to", "dense"), "--kv-bits"),
        (("--quantize", "rtn", "--asym", "--act-bits", 8), "--act-bits"),
    ],
)
def test_options_that_cannot_act_are_usage_errors(
    words: tuple[Any, ...], where: str, llama: Path, tmp_path: Path
) -> None:
    assert convert(llama, tmp_path / "out", *words).expect(2).error["where"] == where


def test_a_plain_model_has_no_other_bits_than_its_own(llama: Path, book: Path) -> None:
    words = ("eval", llama, "--text", book, "--windows", 2, "--seqlen", 32, "--json")
    assert run(*words, "--act-bits", 4).expect(2).error["where"] == "--act-bits"
    assert run(*words, "--kv-bits", 16).expect(0).data["kv_bits"] == 16


def test_f89_such_an_artifact_is_converted_to_nothing_else(full: tuple[Path, Path], tmp_path: Path) -> None:
    for words in (("--to", "gptq"), ("--to", "dense"), ()):
        done = convert(full[0], tmp_path / "out", *words).expect(3)
        assert done.error["code"] == "online-transforms"
    run("verify", full[0]).expect(0)
