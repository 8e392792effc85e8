"""Thousands of damaged settings and manifests through whole commands: each is used or refused, nothing else.

Weights are sound here; what lies is `quantization_config` in each dialect, the rest of config.json, the
artifact's config and its manifest. The seeds are fixed; ``W4PACK_FUZZ`` multiplies the number of cases.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import re
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from damage import ROUNDS, STEPS, TIMES, Rng, spots

import builders as b
from runner import Run, convert, run

PATIENCE = 5.0  # seconds for one command, on a busy machine
CODES = {0, 1, 2, 3, 4}
SHOWN = 8  # different bugs that a failed test names


def nested(depth: int, leaf: Any = 1) -> Any:
    """Return lists and objects in each other."""
    for i in range(depth):
        leaf = [leaf] if i % 2 else {"a": leaf}
    return leaf


ODD: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 3, 4, 5, 7, 8, 16, 31, 32, 33, 63, 64, 65, 128, 1000, 2**31, 2**63,
    2**64, -(2**63), 10**30, 10**400, 0.5, -0.0, 4.0, 64.0, 1e308, float("inf"), float("nan"), "", " ",
    "4", "64", "-1", "true", "None", "gptq", "gptq_v2", "marlin", "awq", "gemm", "gemv", "gemv_fast",
    "compressed-tensors", "pack-quantized", "int-quantized", "auto-round", "auto_round:auto_awq",
    "auto_round:gptqmodel", "w4pack", "group", "channel", "tensor", "float16", "bfloat16", "F16", "I3",
    "../x", "/etc/passwd", "a\0b", "\u202e", "\ud800", "x" * 5000, "model.layers.0.mlp.down_proj",
    "lm_head", "Linear", "LlamaForCausalLM", "MixtralForCausalLM", "re:", "re:(", "re:.*", "re:[",
    "re:(?P<a>.*)(?P=a)", "re:(a+)+$", r"re:(\w+\.?)+!", r"re:(.*)*x", "-:", "+:", "-:(", "+:*", "-:.*",
    "+:.*down.*", "*", "(?i)Q", "\\", "[", "{1,99999999}", [], {}, [[]], [None], [1], ["re:("],
    ["lm_head"], [0] * 300, {"a": 1}, {"bits": 8}, {"bits": "x"}, {"group_size": 2**70}, {"": {}},
    {"-:(": {}}, {"+:.*": None}, {".*": {"bits": 16}}, {"kind": "hadamard"}, [{"kind": "act_quant"}],
    nested(20), nested(400),
)  # fmt: skip
KEYS = (
    "bits", "num_bits", "group_size", "sym", "desc_act", "dynamic", "quant_method", "checkpoint_format",
    "format", "config_groups", "targets", "weights", "ignore", "strategy", "actorder", "modules",
    "extra_config", "online", "x", "transform_config", "rotation", "input_activations", "packing_format",
    "act_bits", "super_bits", "meta", "tensors", "layers", "in_features", "stored_in", "act_order", "name",
    "file", "sha256", "shape", "dtype", "",
)  # fmt: skip


# ---- damage ----------------------------------------------------------------------------------------------


def damaged(value: Any, rng: Rng) -> Any:
    """Change one to three parts of a JSON value; shallow ones as often as deep ones."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice(ROUNDS)):
        places = spots(value)
        if not places:
            return rng.choice(ODD)
        if rng.random() < 0.4 and isinstance(value, dict) and value:
            container, key = value, rng.choice(list(value))
        else:
            container, key = rng.choice(places)
        kind = rng.randrange(8)
        if kind == 0:
            del container[key]
        elif kind == 1 and isinstance(container, dict):
            container[rng.choice(KEYS)] = copy.deepcopy(rng.choice(ODD))
        elif kind == 2 and isinstance(container, dict):
            container[rng.choice((*KEYS, *(x for x in ODD if isinstance(x, str))))] = container.pop(key)
        elif kind == 3 and type(container[key]) is int:
            container[key] += rng.choice(STEPS)
        elif kind == 4:
            other, at = rng.choice(places)
            with contextlib.suppress(KeyError, IndexError):
                container[key] = copy.deepcopy(other[at])
        elif kind == 5 and isinstance(container, dict):
            container[f"{rng.choice(ODD)!s:.40}"] = copy.deepcopy(container[key])
        else:
            container[key] = copy.deepcopy(rng.choice(ODD))
    return value


# ---- what is damaged -------------------------------------------------------------------------------------


def tiny(seed: int, *, group: int = 32, sym: bool = False, ordered: bool = False) -> b.Model:
    """Return a model of four linears with one or two tiles each."""
    config = b.llama_config(
        hidden_size=64, intermediate_size=96, num_attention_heads=1, num_key_value_heads=1, vocab_size=8
    )
    model = b.Model(config, b.skeleton(np.random.default_rng(seed), config))
    rng = np.random.default_rng(seed + 1)
    for name in ("self_attn.q_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"):
        k, n = b.sizes(config, name)
        order = rng.permutation(k) if ordered and name.endswith("down_proj") else None
        linear = b.layer(rng, k, n, group=group, sym=sym, order=order)
        linear.zeros = np.clip(linear.zeros, 1, 14).astype(np.uint8)
        model.linears[f"model.layers.0.{name}"] = linear
    return model


SCHEME = {"bits": 4, "group_size": 32, "sym": False, "data_type": "int"}
KV = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
TRANSFORM = {
    "config_groups": {
        "R1": {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": "weight_input"}]}
    }
}
SETTINGS: dict[str, tuple[b.Writer, dict[str, Any]]] = {
    "gptq": (
        b.gptq,
        b.gptq_config(
            sym=False, group=32, desc=True, damp_percent=0.01, true_sequential=True,
            dynamic={r"+:.*down_proj$": {"bits": 4, "group_size": 32, "sym": False}, r"-:.*lm_head.*": {}},
            meta={"quantizer": ["gptqmodel:7.7.0"], "act_group_aware": False},
        ),
    ),
    "gptq_v2": (
        b.gptq_v2,
        b.gptq_config(sym=False, group=32, checkpoint_format="gptq_v2", static_groups=True),
    ),
    "awq": (b.awq_gemm, b.awq_config(group=32, modules_to_not_convert=["lm_head", "norm"])),
    "compressed": (
        b.compressed,
        b.compressed_config(
            sym=False, group=32, kv_cache_scheme=KV, transform_config=TRANSFORM, sparsity_config={}
        ),
    ),
    "autoround": (
        b.gptq_bare,
        {
            **SCHEME, "quant_method": "auto-round", "packing_format": "auto_round:auto_gptq",
            "autoround_version": "0.16", "block_name_to_quantize": "model.layers", "act_bits": 16,
            "extra_config": {"model.layers.0.mlp.up_proj": dict(SCHEME)}, "super_bits": None,
        },
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One sound checkpoint for each dialect, and an artifact with padding, an order and its manifest."""
    root = tmp_path_factory.mktemp("settings")
    for name, (writer, settings) in SETTINGS.items():
        b.write(root / name, tiny(len(name)), writer, settings)
        run("inspect", root / name, "--json").expect(0)
        convert(root / name, root / f"{name}-out", "marlin").expect(0)
    ordered = b.write(
        root / "ordered", tiny(9, ordered=True), b.gptq_v2, SETTINGS["gptq_v2"][1] | {"desc_act": True}
    )
    (ordered / "tokenizer.json").write_text("{}")
    convert(ordered, root / "artifact", "marlin").expect(0)
    return root


# ---- one case --------------------------------------------------------------------------------------------


class Hung(BaseException):
    """A command took longer than it may; no handler of errors may swallow this."""


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Interrupt what hangs, patterns that backtrack for ever included."""

    def stop(*_: object) -> None:
        raise Hung

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def state(folder: Path) -> dict[str, tuple[int, str]]:
    """Return size and hash of every file below a folder, by its relative name."""
    return {
        str(p.relative_to(folder)): (p.stat().st_size, hashlib.sha1(p.read_bytes()).hexdigest())
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }


def fault(done: Run) -> str | None:
    """Return what is wrong with how a command ended, short enough to compare."""
    trace = done.saved_traceback()
    if trace or '"code": "bug"' in done.out or "which is a bug" in done.text or "Traceback" in done.text:
        lines = [x.strip() for x in trace.splitlines() if x.strip()]
        places = [
            re.sub(r'^File ".*/(w4pack/.*)", (line \d+), in (.*)$', r"\1 \2 \3", x)
            for x in lines
            if "File" in x
        ]
        return f"bug: {places[-1] if places else '?'}: {lines[-1][:200] if lines else done.text[-300:]}"
    if done.code not in CODES:
        return f"exit code {done.code}"
    if "--json" in done.args:
        try:
            last = json.loads(done.out.strip().splitlines()[-1])
        except (ValueError, IndexError):
            return f"exit {done.code} and no JSON at the end: {done.out[-200:]!r}"
        if done.code in (1, 2) and last.get("event") != "error":
            return f"exit {done.code} without an error event"
    elif done.code in (1, 2) and not done.err.startswith(("error:", "warning:", "source", "reading")):
        return f"exit {done.code}, but stderr begins {done.err[:80]!r}"
    return None


class Campaign:
    """Runs cases in one folder that holds SRC, and OUT where a command writes; gathers what went wrong."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.source = folder / "src"
        self.faults: dict[str, str] = {}
        self.outcomes: Counter[str] = Counter()

    def source_from(self, base: Path) -> None:
        """Make SRC a copy of a sound folder."""
        shutil.rmtree(self.source, ignore_errors=True)
        shutil.copytree(base, self.source)

    def case(self, label: str, *words: str | Path) -> None:
        """Run one command and look at everything that it left."""
        before = state(self.folder)
        try:
            with limited():
                done = run(*words)
            wrong = fault(done)
            self.outcomes[str(done.code)] += 1
        except Hung:
            wrong = f"hangs: {words[0]}"
        now = state(self.folder)
        kept = {k: v for k, v in now.items() if not k.startswith(("out/", "out.w4pack-staging/"))}
        if kept != before:
            changed = {k for k in kept.keys() | before.keys() if kept.get(k) != before.get(k)}
            wrong = f"files outside OUT changed: {sorted(changed)[:4]}"
        if wrong is not None:
            self.faults.setdefault(wrong, f"{label}: {' '.join(map(str, words))}")
        for name in ("out", "out.w4pack-staging", "out.w4pack-old"):
            shutil.rmtree(self.folder / name, ignore_errors=True)

    def verdict(self) -> None:
        """Fail with every different bug, each with one case that shows it."""
        lines = [f"{wrong}\n    {case}" for wrong, case in list(self.faults.items())[:SHOWN]]
        assert not self.faults, (
            f"{len(self.faults)} different faults; outcomes {dict(self.outcomes)}\n" + "\n".join(lines)
        )


ENGINES = ("vllm", "sglang", "transformers", "w4pack")
TARGETS = ("marlin", "marlin", "gptq", "awq", "compressed-tensors", "dense", "marlin-legacy")
OPTIONS: tuple[tuple[str, ...], ...] = (
    (), (), (), ("--dry-run",), ("--widen",), ("--regroup",), ("--pad-for-tp", "2"), ("--fold-act-order",),
    ("--verify",), ("--ignore-key", "rotation"), ("--ignore", "re:.*down_proj"),
    ("--zero-reading", "word"), ("--strict",),
)  # fmt: skip


def questions(source: Path, rng: Rng) -> tuple[str | Path, ...]:
    """Draw a command for a source."""
    form = () if rng.random() < 0.15 else ("--json",)
    kind = rng.randrange(10)
    if kind < 3:
        return ("inspect", source, *form)
    if kind < 6:
        return (
            "check",
            source,
            "--engine",
            rng.choice(ENGINES),
            "--tp",
            rng.choice(("1", "1,2", "8")),
            *form,
        )
    out = source.parent / "out"
    return (
        "convert",
        source,
        out,
        "--to",
        rng.choice(TARGETS),
        *rng.choice(OPTIONS),
        "--threads",
        "1",
        *form,
    )


def dumped(value: Any) -> str:
    """Write JSON as a tool would, odd numbers and lone surrogates included."""
    return json.dumps(value)


def campaign(base: Path, folder: Path, file: str, inside: str | None, count: int) -> Campaign:
    """Damage ``file`` (below key ``inside``) again and again, and ask something each time."""
    work = Campaign(folder)
    work.source_from(base)
    path = work.source / file
    sound = json.loads(path.read_text())
    for seed in range(count):
        rng = Rng(f"{base.name} {file} {inside} {seed}")
        if inside is None:
            value = damaged(sound, rng)
        else:
            value = dict(sound)
            value[inside] = damaged(sound[inside], rng) if rng.random() < 0.97 else rng.choice(ODD)
        path.write_text(dumped(value))
        work.case(f"{base.name} seed {seed}", *questions(work.source, rng))
    return work


# ---- campaigns -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", SETTINGS)
def test_damaged_quantization_config(dialect: str, bases: Path, tmp_path: Path) -> None:
    work = campaign(bases / dialect, tmp_path, "config.json", "quantization_config", 250 * TIMES)
    work.verdict()
    assert min(work.outcomes["0"], work.outcomes["3"]) > 20, work.outcomes


def test_damaged_settings_in_a_second_file(bases: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(bases / "gptq", base)
    b.write_json(base / "quantize_config.json", SETTINGS["gptq"][1])
    folder = tmp_path / "work"
    folder.mkdir()
    campaign(base, folder, "quantize_config.json", None, 120 * TIMES).verdict()


@pytest.mark.parametrize("dialect", ["gptq", "compressed", "artifact"])
def test_damaged_model_config(dialect: str, bases: Path, tmp_path: Path) -> None:
    campaign(bases / dialect, tmp_path, "config.json", None, 120 * TIMES).verdict()


def of_an_output(out: Path, rng: Rng, bases: Path) -> tuple[str | Path, ...]:
    """Draw a command for an output of ours."""
    form = () if rng.random() < 0.15 else ("--json",)
    kind = rng.randrange(8)
    if kind < 2:
        return ("verify", out, *form)
    if kind == 2:
        return ("verify", out, "--against", bases / "ordered", *form)
    if kind < 6:
        return ("unpack", out, out.parent / "out", "--threads", "1", *form)
    return questions(out, rng)


@pytest.mark.parametrize(
    ("file", "inside", "count"), [("config.json", "quantization_config", 500), ("w4pack.json", None, 600)]
)
def test_damaged_artifact(file: str, inside: str | None, count: int, bases: Path, tmp_path: Path) -> None:
    work = Campaign(tmp_path)
    work.source_from(bases / "artifact")
    path = work.source / file
    sound = json.loads(path.read_text())
    for seed in range(count * TIMES):
        rng = Rng(f"{file} {seed}")
        value = damaged(sound, rng) if inside is None else sound | {inside: damaged(sound[inside], rng)}
        path.write_text(dumped(value))
        work.case(f"{file} seed {seed}", *of_an_output(work.source, rng, bases))
    work.verdict()
    assert work.outcomes["0"] > 20, work.outcomes
    assert work.outcomes["1"] + work.outcomes["3"] + work.outcomes["4"] > 50, work.outcomes


PATTERNS = (
    r"(\w+\.?)+!",
    r"(.*)*x",
    r"(a|a)*$",
    r"(.*.*)*=",
    r"((model|layers|\d|\.)*)*z",
    "(" * 400,
    "a{1,9999}" * 9,
)


@pytest.mark.parametrize("place", ["dynamic", "ignore", "targets"])
@pytest.mark.parametrize("pattern", PATTERNS, ids=range(len(PATTERNS)))
def test_patterns_made_to_hang(pattern: str, place: str, bases: Path, tmp_path: Path) -> None:
    """A pattern of a stranger is tried on every module name: it must end, or be refused."""
    work = Campaign(tmp_path)
    work.source_from(bases / ("gptq" if place == "dynamic" else "compressed"))
    path = work.source / "config.json"
    config = json.loads(path.read_text())
    settings = config["quantization_config"]
    if place == "dynamic":
        settings["dynamic"] = {f"+:{pattern}": {"bits": 8}}
    elif place == "ignore":
        settings["ignore"] = [f"re:{pattern}"]
    else:
        settings["config_groups"]["group_0"]["targets"] = [f"re:{pattern}"]
    b.write_json(path, config)
    work.case(pattern, "inspect", work.source, "--json")
    work.case(pattern, "check", work.source, "--engine", "vllm", "--json")
    work.case(pattern, "convert", work.source, tmp_path / "out", "--to", "marlin", "--threads", "1", "--json")
    work.verdict()


def test_the_campaign_notices_what_it_is_for(
    bases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that fails by a bug, hangs or writes elsewhere is found."""
    from w4pack.convert import answers

    work = Campaign(tmp_path)
    work.source_from(bases / "gptq")

    def raises(given: dict[str, Any]) -> None:
        raise KeyError("group_size")

    def writes(given: dict[str, Any]) -> None:
        (tmp_path / "stray").write_text("x")
        print("{}")

    def hangs(given: dict[str, Any]) -> None:
        raise Hung

    expected: dict[str, Callable[[dict[str, Any]], None]] = {
        "bug": raises,
        "outside OUT": writes,
        "hangs": hangs,
    }
    for word, instead in expected.items():
        monkeypatch.setattr(answers, "run_inspect", instead)
        work.faults.clear()
        work.case("planted", "inspect", work.source, "--json")
        assert [w for w in work.faults if word in w], (word, work.faults)
        (tmp_path / "stray").unlink(missing_ok=True)
