"""No option is accepted in silence: one that changed nothing, or did not get what it asked for, is told."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import builders as b
from runner import convert, run

MLP = "model.layers.0.mlp"
ATTN = "model.layers.0.self_attn"


def small(**more: Any) -> dict[str, Any]:
    """Return a config of few weights."""
    return b.llama_config(**{"intermediate_size": 256, "vocab_size": 64, **more})


def written(folder: Path, *orders: str, sym: bool = True, **more: Any) -> Path:
    """Write a model; layers named by ``orders`` have an activation order."""
    model = b.model(3, small(), group=64, sym=sym)
    for name, linear in model.linears.items():
        linear.zeros[linear.zeros == 0] = 1  # nothing is stored as 15
        if name.endswith(orders or ("none",)):
            linear.gi = linear.gi[np.random.default_rng(4).permutation(linear.k)]
    return b.write(folder, model, b.gptq, b.gptq_config(sym=sym, group=64, desc=bool(orders), **more))


def told(source: Path, out: Path, to: str, *options: str) -> set[str]:
    """Return the options that had no effect, by the run's warnings and by those of its plan."""
    events = convert(source, out, to, *options).expect(0).events
    (plan,) = [e for e in events if e["event"] == "plan"]
    found = [e for e in events if e["event"] == "warning" and e["code"] == "no-effect"]
    assert [w["where"] for w in plan["warnings"] if w["code"] == "no-effect"] == [e["where"] for e in found]
    return {e["where"] for e in found}


IDLE = (
    ("--widen",),
    ("--regroup",),
    ("--fold-act-order",),
    ("--round-scales",),
    ("--pad-for-tp", "2"),
    ("--zero-reading", "word"),
    ("--source-format", "gptq"),
    ("--ignore-key", "rotation"),
)


@pytest.mark.parametrize("to", ["marlin", "gptq"])
@pytest.mark.parametrize("option", IDLE, ids=lambda o: o[0])
def test_an_option_without_effect_is_told(option: tuple[str, ...], to: str, tmp_path: Path) -> None:
    source = written(tmp_path / "src", sym=option[0] == "--widen")
    named = " ".join(option) if option[0] == "--ignore-key" else option[0]
    assert told(source, tmp_path / "out", to, *option) == {named}
    done = run("convert", source, tmp_path / "dry", "--to", to, *option, "--dry-run").expect(0)
    assert f"warning: {named}: " in done.err
    assert "widened" not in done.out


def test_without_options_nothing_is_told(tmp_path: Path) -> None:
    assert told(written(tmp_path / "src"), tmp_path / "out", "gptq") == set()


EVERY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
BUSY: tuple[tuple[str, tuple[str, ...], dict[str, Any], tuple[str, ...]], ...] = (
    ("gptq", (), {"sym": False}, ("--widen",)),
    ("gptq", EVERY, {}, ("--regroup",)),
    ("gptq", ("down_proj",), {}, ("--fold-act-order",)),
    ("marlin", ("down_proj",), {}, ("--fold-act-order",)),
    ("marlin", ("down_proj",), {}, ("--pad-for-tp", "2")),  # even already, but the order is folded for it
    ("gptq", (), {}, ("--pad-for-tp", "4")),
    ("gptq", (), {"sym": False, "checkpoint_format": "gptq_v2"}, ("--source-format", "gptq")),
    ("gptq", (), {"rotation": "hadamard"}, ("--ignore-key", "rotation")),
)


@pytest.mark.parametrize(("to", "orders", "more", "option"), BUSY, ids=lambda v: str(v)[:24])
def test_an_option_with_effect_is_not_told(
    to: str, orders: tuple[str, ...], more: dict[str, Any], option: tuple[str, ...], tmp_path: Path
) -> None:
    source = written(tmp_path / "src", *orders, **more)
    assert told(source, tmp_path / "out", to, *option) == set()


def test_zero_reading_of_an_ambiguous_file_has_effect(tmp_path: Path) -> None:
    model = b.model(3, small(), group=64, sym=False)
    model.linears[f"{ATTN}.q_proj"].zeros[0, 0] = 0  # stored as 15 in v1
    source = b.write(tmp_path / "src", model, b.gptq, b.gptq_config(sym=False, group=64))
    assert told(source, tmp_path / "out", "gptq", "--zero-reading", "word") == set()


def test_rounded_scales_have_effect(tmp_path: Path) -> None:
    model = b.model(3, small(), group=64, tag="F32")
    source = b.write(tmp_path / "src", model, b.gptq, b.gptq_config(group=64))
    convert(source, tmp_path / "out", "gptq").expect(3)
    assert told(source, tmp_path / "out", "gptq", "--round-scales") == set()


def test_one_ignored_key_of_two(tmp_path: Path) -> None:
    source = written(tmp_path / "src", rotation="hadamard")
    options = ("--ignore-key", "rotation", "--ignore-key", "rotatoin")
    assert told(source, tmp_path / "out", "gptq", *options) == {"--ignore-key rotatoin"}


@pytest.mark.parametrize(
    "option", [("--widen",), ("--regroup",), ("--fold-act-order",), ("--ignore", f"{MLP}.up_proj")]
)
def test_options_of_packed_layers_have_no_meaning_in_a_dense_model(
    option: tuple[str, ...], tmp_path: Path
) -> None:
    source = written(tmp_path / "src")
    convert(source, tmp_path / "out", "dense", *option).expect(2, option[0], "--to dense")
    assert not (tmp_path / "out").exists()


def test_private_needs_a_repository(tmp_path: Path) -> None:
    source = written(tmp_path / "src")
    convert(source, tmp_path / "out", "gptq", "--private").expect(2, "--private", "--push-to")


# --- --pad-for-tp that does not get there -----------------------------------------------------------------


def limits(source: Path, out: Path, to: str, tp: int, *options: str) -> list[dict[str, Any]]:
    """Return the warnings about tensor parallelism."""
    events = convert(source, out, to, "--pad-for-tp", str(tp), *options).expect(0).events
    return [e for e in events if e["event"] == "warning" and e["code"] == "tp-not-reached"]


def wide(folder: Path, *, hidden: int = 512, heads: int = 8, group: int = 128, order: str = "") -> Path:
    """Write a model whose attention alone limits it; ``order``: a layer with an activation order."""
    config = small(
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=hidden // heads,
        intermediate_size=640,
    )
    model = b.model(5, config, group=group)
    for name, linear in model.linears.items():
        if order and name.endswith(order):
            linear.gi = linear.gi[np.random.default_rng(6).permutation(linear.k)]
    return b.write(folder, model, b.gptq, b.gptq_config(group=group, desc=bool(order)))


@pytest.mark.parametrize("to", ["marlin", "gptq", "compressed-tensors", "awq"])
def test_padding_that_gets_there_is_silent(to: str, tmp_path: Path) -> None:
    assert limits(wide(tmp_path / "src"), tmp_path / "out", to, 4) == []


@pytest.mark.parametrize("to", ["marlin", "gptq", "compressed-tensors", "awq"])
def test_group_borders_of_another_layer(to: str, tmp_path: Path) -> None:
    """o_proj has four groups of 128: eight ranks would halve them; the MLP is padded all the same."""
    (found,) = limits(wide(tmp_path / "src"), tmp_path / "out", to, 8)
    assert f"{ATTN}.o_proj" in found["where"]
    assert "down_proj" not in found["where"]
    asked = "a model for TP 8, as `--pad-for-tp 8` asks: "
    assert found["expected"] == f"{asked}K per rank a multiple of 128"
    assert found["found"] == "K/8 = 64; the largest that fits is TP 4"


def test_an_order_that_stays_in_the_artifact(tmp_path: Path) -> None:
    source = wide(tmp_path / "src", order="o_proj")
    (found,) = limits(source, tmp_path / "art", "marlin", 4)
    assert found["where"] == f"{ATTN}.o_proj"
    assert found["found"] == "act_perm: its rows lie on all ranks; the largest that fits is TP 1"
    assert limits(source, tmp_path / "out", "gptq", 4, "--regroup") == []


def test_heads_that_do_not_come_out_even(tmp_path: Path) -> None:
    source = wide(tmp_path / "src", hidden=768, heads=6, group=32)
    (found,) = limits(source, tmp_path / "out", "gptq", 4)
    assert "num_attention_heads" in found["where"]
    assert found["found"] == "6; the largest that fits is TP 2"  # the padded MLP has no thirds


def test_columns_of_a_rank_in_whole_tiles(tmp_path: Path) -> None:
    """A rank's 32 columns are whole words, but half a tile of the artifact."""
    source = wide(tmp_path / "src", hidden=256, group=32)
    assert limits(source, tmp_path / "out", "gptq", 8) == []
    (found,) = limits(source, tmp_path / "art", "marlin", 8)
    assert found["found"] == "N/8 = 32; the largest that fits is TP 4"


@pytest.mark.parametrize("name", ["seed", "out", "./seed", "seed/"])
def test_a_path_named_as_an_option_is_told_as_a_path(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path / "model")
    (tmp_path / name).mkdir()
    (tmp_path / name / "kept").touch()
    monkeypatch.chdir(tmp_path)
    done = run("convert", "model", name)
    assert done.code != 0 and f"where: {name.strip('./')}\n" in done.err
