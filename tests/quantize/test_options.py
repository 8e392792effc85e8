"""Every option of quantization does what it says, is seen in what is recorded, or is refused (F83)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quantize.test_outputs import manifest, quantize
from runner import run

# option -> the scheme of layer 1's up_proj, where it is not that of the others
BASE = {"--quantize": "gptq", "--group-size": 32, "--samples": 8, "--seqlen": 64}
PLAIN = "4 bit g32 sym"
CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "bits": ({"--bits": 8}, "8 bit g32 sym"),
    "group": ({"--group-size": 64}, "4 bit g64 sym"),
    "channel": ({"--group-size": -1}, "4 bit per channel sym"),
    "asym": ({"--asym": ""}, "4 bit g32 asym"),
    "plain": ({"--no-gptaq": ""}, PLAIN),
    "module-bits": ({"--module-bits": "re:.*up_proj=8"}, "8 bit g32 sym"),
    "left": ({"--module-bits": "re:.*up_proj=16"}, "16 bit"),
    "ignore": ({"--ignore": "model.layers.1.mlp.up_proj"}, "16 bit"),
    "samples": ({"--samples": 4}, PLAIN),
    "seqlen": ({"--seqlen": 32}, PLAIN),
    "seed": ({"--seed": 1}, PLAIN),
    "damp": ({"--damp": 0.2}, PLAIN),
    "sample-text": ({"--calibration": None}, PLAIN),
    "bpw": ({"--bpw": 8.5, "--group-size": None}, "8 bit g128 sym"),
    "act-bits": ({"--act-bits": 4}, PLAIN),
    "kv-bits": ({"--kv-bits": 4}, PLAIN),
    "offline": ({"--rotate": "offline"}, PLAIN),
    "full": ({"--rotate": "full"}, PLAIN),
}


def flat(words: dict[str, Any]) -> list[Any]:
    """Return the words of options; None: left out, "": a flag."""
    return [w for key, v in words.items() if v is not None for w in ((key, v) if v != "" else (key,))]


def hashes(folder: Path) -> dict[str, str]:
    return {name: entry["sha256"] for name, entry in manifest(folder)["tensors"].items()}


@pytest.fixture(scope="module")
def plain(llama: Path, book: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("plain") / "out"
    quantize(llama, out, text=book).expect(0)
    return out


@pytest.mark.parametrize("name", CHANGES)
def test_every_option_changes_what_is_recorded_and_what_is_written(
    name: str, plain: Path, llama: Path, book: Path, tmp_path: Path
) -> None:
    changes, scheme = CHANGES[name]
    out = tmp_path / "out"
    run("convert", llama, out, *flat({**BASE, "--calibration": book, **changes}), "--threads", 1).expect(0)
    one, two = manifest(plain), manifest(out)
    assert one["options"] != two["options"]
    layer = two["layers"].get("model.layers.1.mlp.up_proj", {"scheme": "16 bit"})
    assert layer["scheme"] == scheme
    changed = hashes(plain).items() ^ hashes(out).items()
    assert any(".layers.1." in tensor for tensor, _ in changed)


ROTATED = {"--quantize": "rtn", "--rotate": "full", "--group-size": -1}
ONLINE: dict[str, dict[str, Any]] = {
    "tp": {"--tp": 2},
    "signs": {"--seed": 1},
    "act-bits": {"--act-bits": 8},
    "kv-bits": {"--kv-bits": 8},
    "offline": {"--rotate": "offline"},
}


def test_options_of_a_rotation_change_weights_or_what_runs_online(llama: Path, tmp_path: Path) -> None:
    found = {}
    for name, changes in {"plain": {}, **ONLINE}.items():
        out = tmp_path / name
        run("convert", llama, out, *flat({**ROTATED, **changes}), "--threads", 1).expect(0)
        online = json.loads((out / "config.json").read_text())["quantization_config"].get("online")
        found[name] = (manifest(out)["options"], hashes(out), online)
    base = found.pop("plain")
    for name, other in found.items():
        assert other[0] != base[0], name
        assert (other[1] != base[1]) is (name in ("tp", "signs", "offline")), name
        assert (other[2] != base[2]) is (name != "signs"), name


@pytest.mark.parametrize(
    ("changes", "shown", "hidden"),
    [
        (
            {"--damp": 0.2, "--seed": 3, "--rotate": "offline", "--calibration": "BOOK"},
            ["damp: 0.2 (default 0.03)", "seed: 3 (default 0)", "rotate: offline (default none)",
             "group size: 32 (default 128)", "samples: 8 (default 128)", "ignore: none (default)",
             "calibration: book.txt (default none)", "gptaq: yes (default)", "sym: yes (default)",
             "act bits: 16 (default)"],
            ["tp"],
        ),
        (
            {"--quantize": "rtn", "--samples": None, "--seqlen": None, "--asym": ""},
            ["method: rtn (default gptq)", "sym: no (default yes)", "bits: 4 (default)"],
            ["samples", "seqlen", "damp", "gptaq", "calibration", "seed"],
        ),
        (
            {"--quantize": "rtn", "--samples": None, "--seqlen": None, "--group-size": None, "--bpw": 5},
            ["bpw: 5.0 (default none)"],
            ["bits", "group size"],
        ),
    ],
    ids=["gptq", "rtn", "bpw"],
)  # fmt: skip
def test_the_card_lists_what_acts_beside_its_default_and_nothing_else(
    changes: dict[str, Any], shown: list[str], hidden: list[str], llama: Path, book: Path, tmp_path: Path
) -> None:
    words = [book if w == "BOOK" else w for w in flat({**BASE, **changes})]
    run("convert", llama, tmp_path / "out", *words, "--threads", 1).expect(0)
    lines = (tmp_path / "out" / "README.md").read_text().splitlines()
    assert [line for line in shown if f"- {line}" not in lines] == []
    assert [name for name in hidden if any(line.startswith(f"- {name}: ") for line in lines)] == []
    calibrated = changes.get("--quantize") != "rtn"  # without text there are no outputs to measure
    of = ("outputs", "weights") if calibrated else ("weights", "outputs")
    assert f"Relative squared error of {of[0]}:" in lines
    picture = (tmp_path / "out" / "quantization-errors.svg").read_text()
    assert f"error of {of[0]}" in picture and f"error of {of[1]}" not in "".join([picture, *lines])


IDLE = (
    ("--gptaq",), ("--no-gptaq",), ("--calibration", "x.txt"), ("--samples", 128), ("--seqlen", 32),
    ("--damp", 0.03), ("--seed", 1), ("--max-kl", 2),
)  # fmt: skip


@pytest.mark.parametrize("option", IDLE, ids=lambda o: str(o[0]))
def test_rounding_to_nearest_takes_no_option_of_calibration(
    option: tuple[Any, ...], llama: Path, tmp_path: Path
) -> None:
    done = run("convert", llama, tmp_path / "out", "--quantize", "rtn", *option, "--json").expect(2)
    assert done.error["where"] == option[0] and f"`{option[0]}`" in done.error["what"]
    assert not (tmp_path / "out").exists()


def test_bits_that_are_given_count_in_the_bits_per_weight(llama: Path, tmp_path: Path) -> None:
    words = ("--quantize", "rtn", "--bpw", 6, "--module-bits", "re:.*down_proj=8", "--threads", 1)
    run("convert", llama, tmp_path / "out", *words).expect(0)
    value = manifest(tmp_path / "out")
    assert 5 < value["quantization"]["bits_per_weight"] <= 6
    downs = {e["scheme"] for n, e in value["layers"].items() if n.endswith("down_proj")}
    assert downs == {"8 bit g128 sym"}
    done = run("convert", llama, tmp_path / "no", *words[:2], "--bpw", 5, *words[4:], "--json").expect(3)
    assert done.error["where"] == "--bpw" and done.error["found"] == "5.0"


@pytest.mark.parametrize(
    ("options", "where"),
    [
        (("--bits", 8), "--bits"),
        (("--gptaq",), "--gptaq"),
        (("--calibration", "x.txt"), "--calibration"),
        (("--device", "cuda", "--to", "gptq"), "--device"),
        (("--quantize", "gptq", "--regroup"), "--regroup"),
        (("--quantize", "gptq", "--widen"), "--widen"),
        (("--quantize", "gptq", "--ignore-key", "rotation"), "--ignore-key"),
        (("--quantize", "gptq", "--to", "dense"), "--quantize"),
        (("--quantize", "gptq", "--damp", 0), "--damp"),
        (("--quantize", "gptq", "--module-bits", "x=5"), "--module-bits"),
        (("--quantize", "gptq", "--module-bits", "nobody=8"), "--module-bits"),
        (("--quantize", "gptq", "--ignore", "nobody"), "--ignore"),
        (("--quantize", "rtn", "--device", "tpu"), "--device"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_options_that_cannot_act_are_usage_errors(
    options: tuple[Any, ...], where: str, llama: Path, tmp_path: Path
) -> None:
    done = run("convert", llama, tmp_path / "out", "--json", *options)
    done.expect(2)
    assert done.error["where"] == where
    assert not (tmp_path / "out").exists()
