"""The plan is plain data: to JSON and back, one digest for one job, every tensor accounted for once."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import builders as b
from w4pack.convert.errors import UsageError
from w4pack.convert.files.checkpoint import open_checkpoint
from w4pack.convert.files.local import LocalStore
from w4pack.convert.planning.making import make_plan
from w4pack.convert.planning.options import ConvertOptions
from w4pack.convert.planning.plan import Plan
from w4pack.convert.planning.record import from_plain
from w4pack.convert.planning.targets import TARGETS, common_group, fitting_group
from w4pack.convert.source.detect import Source, read_source
from w4pack.convert.source.reading import DetectOptions


@pytest.fixture
def source(tmp_path: Path) -> Any:
    config = b.llama_config(intermediate_size=256, num_key_value_heads=1, vocab_size=64)
    b.write(tmp_path / "src", b.model(5, config), b.gptq, b.gptq_config(), shards=2)
    with open_checkpoint(LocalStore(tmp_path / "src")) as checkpoint:
        yield read_source(checkpoint, DetectOptions())


def planned(source: Source, **options: Any) -> Plan:
    return make_plan(source, ConvertOptions(**options), {"id": "org/name"}, ())[0]


@pytest.mark.parametrize("to", sorted(set(TARGETS) - {"marlin-legacy"}))
def test_a_plan_comes_back_from_json(source: Source, to: str) -> None:
    plan = planned(source, to=to)
    again = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again == plan
    assert again.digest == plan.digest


@pytest.mark.parametrize("to", sorted(set(TARGETS) - {"marlin-legacy"}))
def test_every_source_tensor_is_used_once_and_every_output_is_made_once(source: Source, to: str) -> None:
    plan = planned(source, to=to)
    made = Counter(name for op in plan.ops for name in op.outputs)
    assert made == Counter(t.name for t in plan.tensors)
    assert set(made.values()) == {1}
    layers = {layer.name: layer for layer in source.layers}
    used = [op.source for op in plan.ops if op.kind != "layer"]
    used += [t.name for op in plan.ops if op.kind == "layer" for t in layers[op.source].tensors.values()]
    assert Counter([*used, *plan.dropped]) == Counter(list(source.checkpoint.tensors))


def test_what_decides_bytes_decides_the_digest(source: Source) -> None:
    digests = {
        planned(source, **o).digest
        for o in ({}, {"to": "gptq"}, {"pad_for_tp": 8}, {"max_shard_size": 100_000})
    }
    assert len(digests) == 4
    assert planned(source).digest == planned(source).digest


@pytest.mark.parametrize(
    "change",
    [
        {"lossless": "yes"},
        {"extra": 1},
        {"tensors": [{}]},
        {"layers": None},
        {"version": 3},
        {"ops": [{"kind": "melt", "source": "a", "outputs": []}]},
    ],
)
def test_json_that_is_no_plan_is_refused(source: Source, change: dict[str, Any]) -> None:
    value = planned(source).to_json() | change
    with pytest.raises(ValueError, match="expected"):
        from_plain(Plan, value)


@pytest.mark.parametrize(
    ("target", "group", "rows", "fits"),
    [
        ("marlin", 128, 4096, 128),
        ("marlin", 128, 192, 128),  # the artifact keeps a short last group
        ("gptq", 128, 192, 64),  # 192 = 3 * 64: exact
        ("gptq", 128, 200, None),
        ("marlin", 256, 1024, 128),
        ("marlin", 16, 1024, None),
        ("gptq", 16, 1024, 16),
        ("marlin", 96, 960, 32),
        ("marlin", -1, 77, -1),
        ("marlin-legacy", 64, 1024, None),
        ("marlin-legacy", 256, 1024, 128),
        ("awq", 1024, 4096, 128),
    ],
)
def test_group_sizes_that_fit(target: str, group: int, rows: int, fits: int | None) -> None:
    assert fitting_group(TARGETS[target], group, rows) == fits


@pytest.mark.parametrize(
    ("pairs", "size"),
    [
        ([(256, 128), (512, 128)], 128),
        ([(256, 128), (512, 64)], 64),
        ([(256, -1), (512, 128)], 128),
        ([(256, -1), (512, -1)], -1),
        ([(80, -1), (512, 128)], None),
        ([(80, 16), (512, 128)], 16),
    ],
)
def test_one_group_size_for_all(pairs: list[tuple[int, int]], size: int | None) -> None:
    assert common_group(pairs) == size


@pytest.mark.parametrize(
    "options",
    [
        {"to": "gguf"},
        {"to": "gptq", "dtype": "float16"},
        {"max_shard_size": 1},
        {"pad_for_tp": 0},
        {"zero_reading": "byte"},
        {"source_format": "awq"},
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        ConvertOptions(**options).check()


def test_only_what_differs_from_the_defaults_is_recorded() -> None:
    options = ConvertOptions(to="gptq", regroup=True, ignore_key=("rotation",))
    assert options.chosen() == {"to": "gptq", "regroup": True, "ignore_key": ("rotation",)}
    assert ConvertOptions.from_chosen(json.loads(json.dumps(options.chosen()))) == options
    with pytest.raises(UsageError):
        ConvertOptions.from_chosen({"to": "gptq", "from_the_future": 1})
