"""``w4pack bench`` as a command: an artifact's shapes, the table, the object, and every wrong use."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from artifacts import write_artifact
from click.testing import CliRunner, Result

from runtime import quarot_models as models
from w4pack import cli
from w4pack.convert import convert, errors
from w4pack.convert.planning.quantize_options import QuantizeOptions
from w4pack.kernels import ops
from w4pack.kernels.bench import cards, command, products, rates, shapes, timing
from w4pack.kernels.bench.rates import Rates
from w4pack.kernels.quarot.modules import int_product
from w4pack.kernels.spec import LinearSpec

FLOATS, INTEGERS = "1024x4096x14336 float16", "8192x8192x8192 int8"
RATES = Rates(4.6e12, "sum over 4.00 GiB", 775e12, FLOATS, 1500e12, INTEGERS)


def run(*args: object) -> Result:
    return CliRunner().invoke(cli.root, ["bench", *map(str, args)])


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command with a CPU in the card's place."""
    monkeypatch.setattr(cards, "find", lambda: torch.device("cpu"))
    monkeypatch.setattr(command, "_rates", lambda device, dtype, integers: RATES)
    monkeypatch.setattr(timing, "ROTATED", 1 << 18)


def layer(i: int, **more: Any) -> dict[str, LinearSpec]:
    """A small layer: q/k/v and gate/up alike, o and down."""
    sizes = {
        "self_attn.q_proj": (128, 128), "self_attn.k_proj": (128, 64), "self_attn.v_proj": (128, 64),
        "self_attn.o_proj": (128, 128), "mlp.gate_proj": (128, 192), "mlp.up_proj": (128, 192),
        "mlp.down_proj": (192, 128),
    }  # fmt: skip
    return {f"model.layers.{i}.{name}": LinearSpec(k, n, **more) for name, (k, n) in sizes.items()}


def found(folder: Path, specs: dict[str, LinearSpec]) -> dict[str, dict[str, int]]:
    """Shapes of an artifact in words, with their layers."""
    write_artifact(folder, specs)
    return {command._title(shape)[0]: dict(shape.layers) for shape in shapes.open_shapes(folder)[1]}


# ---- shapes of an artifact --------------------------------------------------------------------------------


def test_distinct_shapes_are_those_of_the_fused_layers(tmp_path: Path) -> None:
    assert found(tmp_path, layer(0) | layer(1) | layer(12)) == {
        "384x128, 4 bit, g128": {"model.layers.*.mlp.gate_proj+up_proj": 3},
        "256x128, 4 bit, g128": {"model.layers.*.self_attn.q_proj+k_proj+v_proj": 3},
        "128x192, 4 bit, g128": {"model.layers.*.mlp.down_proj": 3},
        "128x128, 4 bit, g128": {"model.layers.*.self_attn.o_proj": 3},
    }


def test_layers_that_the_loader_keeps_apart_are_timed_apart(tmp_path: Path) -> None:
    specs = layer(0)
    specs["model.layers.0.mlp.up_proj"] = LinearSpec(128, 192, bits=8)
    shown = found(tmp_path, specs)
    assert shown["192x128, 4 bit, g128"] == {"model.layers.*.mlp.gate_proj": 1}
    assert shown["192x128, 8 bit, g128"] == {"model.layers.*.mlp.up_proj": 1}


def test_schemes_are_told_apart_and_padding_is_part_of_the_shape(tmp_path: Path) -> None:
    specs = {
        "model.layers.0.mlp.down_proj": LinearSpec(200, 100, sym=False, stored_in=256, stored_out=128),
        "model.layers.1.mlp.down_proj": LinearSpec(
            200, 100, act_order=True, bias=True, stored_in=256, stored_out=128
        ),
        "model.layers.2.mlp.down_proj": LinearSpec(256, 128, group_size=-1),
    }
    assert set(found(tmp_path, specs)) == {
        "128x256, 4 bit, g128, zero points",
        "128x256, 4 bit, g128, act-order",
        "128x256, 4 bit, one group",
    }


def test_experts_count_one_by_one_and_that_is_said(tmp_path: Path, on_cpu: None) -> None:
    experts = {
        f"model.layers.{i}.mlp.experts.{e}.{leaf}": LinearSpec(
            *(64, 128)[:: -1 if leaf == "down_proj" else 1]
        )
        for i in range(2)
        for e in range(3)
        for leaf in ("gate_proj", "up_proj", "down_proj")
    }
    write_artifact(tmp_path, experts)
    (gate_up, down) = shapes.open_shapes(tmp_path)[1]
    assert gate_up.layers == (("model.layers.*.mlp.experts.*.gate_proj+up_proj", 6),)
    assert down.layers == (("model.layers.*.mlp.experts.*.down_proj", 6),)
    assert "grouped product" in run(tmp_path, "--m", 1).stderr
    assert run(tmp_path, "--m", 1, "-q").stderr == ""


# ---- output -----------------------------------------------------------------------------------------------


def test_the_table_names_rates_shapes_and_layers(tmp_path: Path, on_cpu: None) -> None:
    write_artifact(tmp_path, layer(0))
    done = run(tmp_path, "--m", "1,5,1")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[1] == "reads     4.60 TB/s (sum over 4.00 GiB)"
    assert lines[2] == "computes  775 TFLOP/s (1024x4096x14336 float16)"
    at = lines.index("384x128, 4 bit, g128")
    assert lines[at + 1] == "  model.layers.*.mlp.gate_proj+up_proj x 1"
    assert lines[at + 2].split() == ["M", "of", "the", "floor", "time", "speed-up", "torch.mm", "error"]
    assert [line.split()[0] for line in lines[at + 3 : at + 5]] == ["1", "5"]
    assert lines[at + 5] == ""
    assert done.stderr == ""


def test_json_carries_all_that_the_table_says(on_cpu: None) -> None:
    done = run(
        "--shape", "128x192", "--shape", "64x64", "--bits", 8, "--group-size", -1, "--m", "2", "--json"
    )
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    assert data["schema"] == 1 and data["card"] == "cpu" and data["dtype"] == "float16"
    assert (data["read_bytes_per_second"], data["operations_per_second"]) == (4.6e12, 775e12)
    first, second = data["shapes"]
    assert (first["out_features"], first["in_features"], second["out_features"]) == (128, 192, 64)
    assert (first["bits"], first["group_size"], first["sym"], first["layers"]) == (8, -1, True, [])
    (point,) = first["points"]
    assert point["m"] == 2 and point["bound"] == "bytes"
    assert point["floor_seconds"] == (128 * 192 + 2 * 128 + 2 * 2 * (128 + 192)) / 4.6e12
    assert point["share_of_floor"] == point["floor_seconds"] / point["seconds"]
    assert point["speed_up"] == point["library_seconds"] / point["seconds"]


# ---- products of integers ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact with 4-bit activations and cache; down_proj reads 16-bit values."""
    place = tmp_path_factory.mktemp("quantized")
    plain = models.source("llama", place / "source", num_attention_heads=2, num_key_value_heads=1)
    options = QuantizeOptions(method="rtn", group_size=64, act_bits=4, kv_bits=4)
    convert(plain, place / "out", quantize=options)
    models.edit_online(place / "out", lambda records: [r for r in records if r.get("site") != "mlp_mid"])
    (place / "out" / "w4pack.json").unlink()  # which tells of the record
    return place / "out"


def test_an_artifact_of_4_bit_activations_is_timed_as_it_runs(quantized: Path, on_cpu: None) -> None:
    def bits(*options: object) -> dict[str, int]:
        done = run(quantized, "--m", 3, "--json", *options)
        assert done.exit_code == 0, done.output
        data = json.loads(done.stdout)
        assert data["integers_per_second"] == 1500e12
        return {layer["name"]: shape["act_bits"] for shape in data["shapes"] for layer in shape["layers"]}

    attention, mlp = "model.layers.*.self_attn.", "model.layers.*.mlp."
    names = [f"{attention}q_proj+k_proj+v_proj", f"{attention}o_proj", f"{mlp}gate_proj+up_proj"]
    assert bits() == dict.fromkeys(names, 4) | {f"{mlp}down_proj": 16}
    assert bits("--act-bits", 8) == dict.fromkeys(names, 8) | {f"{mlp}down_proj": 16}
    assert set(bits("--act-bits", 16).values()) == {16}


def test_products_of_integers_are_held_against_their_codes(
    on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for options in (("--bits", 4), ("--bits", 8), ("--group-size", -1), ("--dtype", "bfloat16")):
        for act in (4, 8):
            done = run("--shape", "128x256", "--m", "1,5", "--json", "--act-bits", act, *options)
            assert done.exit_code == 0, done.output
            (shape,) = json.loads(done.stdout)["shapes"]
            assert shape["act_bits"] == act
            floor = shape["points"][1]["floor_seconds"]
            assert shape["points"][1]["bound"] == "bytes" and floor > 0
    table = run("--shape", "128x256", "--m", 1, "--act-bits", 4).stdout
    assert "128x256, 4 bit, g128, 4-bit activations" in table
    assert "integers  1500 TOP/s (8192x8192x8192 int8)" in table

    monkeypatch.setattr(products, "int_product", off_by(1.01))
    done = run("--shape", "128x256", "--m", 1, "--act-bits", 4)
    assert done.exit_code == 1 and "a product is wrong" in done.stderr


def off_by(factor: float) -> Callable[..., Any]:
    return lambda *arguments: int_product(*arguments) * factor


def test_integers_bound_by_operations_use_their_own_rate() -> None:
    assert RATES.floor(1, 3 * 10**15, integers=True) == (2.0, "operations")
    assert RATES.floor(1, 775 * 10**12) == (1.0, "operations")


def test_the_rate_of_integers_is_measured_where_it_is_asked_for() -> None:
    sides = ((32, 64, 64),)
    found = rates.measure(torch.device("cpu"), torch.float16, integers=True, read_bytes=1 << 20, sides=sides)
    assert found.integers > 0 and found.integers_by == "32x64x64 int8"
    plain = rates.measure(torch.device("cpu"), torch.float16, read_bytes=1 << 20, sides=sides)
    assert (plain.integers, plain.integers_by) == (0.0, "")


@pytest.mark.parametrize(
    ("own", "asked", "used"),
    [
        ("bfloat16", (), "bfloat16"),
        ("float16", (), "float16"),
        ("float32", (), "bfloat16"),
        ("float16", ("--dtype", "bfloat16"), "bfloat16"),
    ],
)
def test_activations_have_the_models_dtype(
    own: str, asked: tuple[str, ...], used: str, tmp_path: Path, on_cpu: None
) -> None:
    write_artifact(tmp_path, {"model.layers.0.mlp.down_proj": LinearSpec(64, 64)})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": own}))
    assert json.loads(run(tmp_path, "--m", 1, "--json", *asked).stdout)["dtype"] == used


# ---- what goes wrong --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((), "neither"),
        ((".", "--shape", "64x64"), "both"),
        ((".", "--bits", "8"), "--bits"),
        ((".", "--group-size", "64"), "--group-size"),
        (("--shape", "100x64"), "--shape 128x64"),
        (("--shape", "64"), "NxK"),
        (("--shape", "64x64", "--m", "0"), "1 to 65536"),
        (("--shape", "64x64", "--m", "1,-1"), "1 to 65536"),
        (("--shape", "64x64", "--m", "many"), "no list of numbers"),
        (("--shape", "64x64", "--m", ""), "no list of numbers"),
        (("--shape", "64x64", "--bits", "3"), "3"),
        (("--shape", "64x64", "--group-size", "100"), "100"),
        (("--shape", "64x64", "--dtype", "float32"), "float16 or bfloat16"),
    ],
    ids=str,
)
def test_wrong_uses_are_usage_errors(args: tuple[str, ...], said: str) -> None:
    done = run(*args)
    assert done.exit_code == 2
    assert said in done.stderr and done.stdout == "" and "Traceback" not in done.stderr


def test_without_a_card_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = run("--shape", "64x64")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("error: there is no card to time")
    data = json.loads(run("--shape", "64x64", "--json").stdout)
    assert (data["event"], data["code"], data["exit"]) == ("error", "device", 2)


def test_a_missing_extra_says_what_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "find_spec", lambda name: None)
    done = run("--shape", "64x64")
    assert done.exit_code == 2 and "pip install 'w4pack[gpu]'" in done.stderr


def test_a_path_that_is_no_artifact_is_told(tmp_path: Path) -> None:
    assert run(tmp_path / "nothing").exit_code == 1
    (tmp_path / "config.json").write_text("{}")
    done = run(tmp_path)
    assert done.exit_code == 3 and "not a w4pack artifact" in done.stderr


def _zeros(*arguments: Any) -> None:
    arguments[-1].zero_()


def _no_memory(*arguments: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.\nmore")


@pytest.mark.parametrize(
    ("broken", "said"), [(_zeros, "a product is wrong"), (_no_memory, "too little free memory")]
)
def test_what_fails_on_the_card_ends_with_exit_code_1(
    broken: Callable[..., None], said: str, on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "gemm_out", broken)
    done = run("--shape", "64x64", "--m", 1)
    assert done.exit_code == 1
    assert said in done.stderr and "64x64" in done.stderr and "Traceback" not in done.stderr
