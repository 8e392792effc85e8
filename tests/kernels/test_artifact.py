"""What the loader says of a folder before it reads a byte of a tensor."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from artifacts import quant_block, shapes_of, write_artifact

from checkpoints import lay_out
from w4pack.convert.dialects import reading
from w4pack.convert.errors import SourceError, W4PackError
from w4pack.kernels.artifact import compare_names, open_artifact
from w4pack.kernels.spec import LinearSpec, fuse

SPECS = {
    "model.layers.0.q": LinearSpec(128, 192, group_size=64),
    "model.layers.0.k": LinearSpec(128, 64, group_size=64),
    "model.layers.0.d": LinearSpec(
        100, 72, bits=8, group_size=32, sym=False, act_order=True, bias=True, stored_in=128, stored_out=128
    ),
}


def fails(folder: Path) -> W4PackError:
    with pytest.raises(W4PackError) as caught:
        open_artifact(folder)
    return caught.value


def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))


def test_listed_and_unlisted_modules_become_specs(tmp_path: Path) -> None:
    """A module outside the list has the global scheme and the sizes of its weight."""
    plain = LinearSpec(256, 128, bias=True)
    write_artifact(tmp_path, {**SPECS, "model.layers.0.o": plain}, quant=quant_block(SPECS), shard=20_000)
    found = open_artifact(tmp_path)
    stored = LinearSpec(256, 128, bias=True, stored_in=256, stored_out=128)
    assert found.specs["model.layers.0.o"] == stored
    assert found.specs["model.layers.0.d"] == SPECS["model.layers.0.d"]
    assert found.dense == ("model.norm.weight",)
    assert len(found.files) > 1
    assert {name: (info.dtype, info.shape) for name, info in found.tensors.items()} == shapes_of(
        {**SPECS, "model.layers.0.o": plain}
    )


def test_each_entry_of_the_list_is_looked_at_a_few_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of padded experts lists 20,000 of them."""
    seen: list[int] = []
    real = reading.table
    monkeypatch.setattr(
        reading, "table", lambda config, *keys: seen.append(len(config)) or real(config, *keys)
    )
    steps = {}
    for count in (8, 80):
        folder = tmp_path / str(count)
        write_artifact(folder, {f"model.layers.{i}.q": SPECS["model.layers.0.q"] for i in range(count)})
        seen.clear()
        open_artifact(folder)
        steps[count] = len(seen)
    assert steps[80] <= 10 * steps[8]


def test_offsets_are_those_of_the_bytes(tmp_path: Path) -> None:
    data = write_artifact(tmp_path, SPECS, shard=20_000)
    found = open_artifact(tmp_path)
    for name, info in found.tensors.items():
        path, size = found.files[info.file]
        raw = path.read_bytes()
        assert len(raw) == size
        assert raw[info.offset : info.offset + info.nbytes] == data[name]


def test_no_torch_and_no_numpy(tmp_path: Path) -> None:
    write_artifact(tmp_path, SPECS)
    code = (
        "import sys; from w4pack.kernels.artifact import open_artifact; open_artifact(sys.argv[1]);"
        "print({'torch', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_no_byte_of_a_tensor_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_artifact(tmp_path, SPECS)
    start = 8 + int.from_bytes((tmp_path / "model.safetensors").read_bytes()[:8], "little")
    ends: list[int] = []
    real = os.preadv

    def watched(fd: int, buffers: Any, offset: int) -> int:
        if Path(f"/proc/self/fd/{fd}").readlink().suffix == ".safetensors":
            ends.append(offset + sum(len(b) for b in buffers))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", watched)
    open_artifact(tmp_path)
    assert max(ends) == start


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("artifact_version", 2),
        ("artifact_version", True),
        ("layout", "marlin-32x64"),
        ("surprise", 1),
        ("artifact_version", 1.0),
        ("bits", 3),
        ("bits", 4.0),
        ("group_size", 128.0),
        ("sym", 1),
        ("modules", []),
        ("modules_to_not_convert", "lm_head"),
    ],
)
def test_unknown_settings_are_refused(tmp_path: Path, key: str, value: Any) -> None:
    write_artifact(tmp_path, SPECS)
    edit(tmp_path, lambda quant: quant.update({key: value}))
    err = fails(tmp_path)
    assert (err.code, err.exit_code) == ("artifact-unknown", 3)
    assert err.where == f"{tmp_path}/config.json: quantization_config.{key}"
    assert err.hint is not None


@pytest.mark.parametrize("record", [{"kind": "hadamard", "site": "mlp_mid"}, {"kind": "new"}, "words"])
def test_online_records_are_refused(tmp_path: Path, record: Any) -> None:
    write_artifact(tmp_path, SPECS)
    edit(tmp_path, lambda quant: quant.update(online=[record]))
    err = fails(tmp_path)
    assert (err.code, err.exit_code) == ("artifact-online", 3)


def test_several_unknown_settings_come_together(tmp_path: Path) -> None:
    write_artifact(tmp_path, SPECS)
    edit(tmp_path, lambda quant: quant.update(layout="x", extra=1))
    assert len(fails(tmp_path).problems) == 2


def test_other_checkpoints_are_named_with_the_command(tmp_path: Path, demo: Path) -> None:
    err = fails(demo)
    assert (err.code, err.exit_code) == ("no-artifact", 3)
    assert err.found == "a checkpoint with quant_method 'gptq'"
    assert err.hint == f"w4pack convert {demo} OUT"
    (tmp_path / "config.json").write_text("{}")
    assert fails(tmp_path).found == "a checkpoint without quantization_config"
    (tmp_path / "config.json").unlink()
    assert fails(tmp_path).found == "a folder without config.json"
    assert fails(tmp_path / "nowhere").code == "no-such-folder"


@pytest.mark.shared
@pytest.mark.parametrize("name", ["autoawq-gemm-w4g128-llama", "legacymarlin-w4g128-llama"])
def test_fixtures_of_other_tools_are_no_artifacts(name: str, tmp_path: Path) -> None:
    assert fails(lay_out(name, tmp_path / name)).code == "no-artifact"


def test_every_wrong_tensor_is_listed(tmp_path: Path) -> None:
    shapes = shapes_of(SPECS)
    del shapes["model.layers.0.q.weight_scale"]
    shapes["model.layers.0.k.weight"] = ("I32", (8, 256))
    shapes["model.layers.0.d.bias"] = ("I32", (72,))
    shapes["model.layers.0.d.qweight"] = ("I32", (2, 2))
    write_artifact(tmp_path, SPECS, shapes=shapes)
    err = fails(tmp_path)
    assert isinstance(err, SourceError)
    assert [(p.code, p.where, p.found) for p in err.problems] == [
        ("tensor-mismatch", "model.layers.0.d.bias", "I32 [72]"),
        ("extra-tensor", "model.layers.0.d.qweight", "I32 [2, 2]"),
        ("tensor-mismatch", "model.layers.0.k.weight", "I32 [8, 256]"),
        ("missing-tensor", "model.layers.0.q.weight_scale", None),
    ]
    assert err.problems[3].expected == "F16 or BF16 [2, 192]"


def test_a_module_listed_without_tensors_is_missing(tmp_path: Path) -> None:
    write_artifact(tmp_path, SPECS, quant=quant_block({**SPECS, "model.gone": LinearSpec(64, 64)}))
    found = {(p.code, p.where) for p in fails(tmp_path).problems}
    assert found == {("missing-tensor", "model.gone.weight"), ("missing-tensor", "model.gone.weight_scale")}


@pytest.mark.parametrize(
    ("shapes", "code"),
    [
        ({"m.weight": ("I32", (4, 128))}, "missing-tensor"),  # packed words without scales
        ({"m.weight_scale": ("F16", (1, 64))}, "tensor-mismatch"),  # scales without words
        ({"m.weight": ("I32", (0, 128)), "m.weight_scale": ("F16", (1, 64))}, "tensor-mismatch"),
        ({"m.weight": ("I32", (3, 128)), "m.weight_scale": ("F16", (1, 64))}, "tensor-mismatch"),  # K = 48
        ({"m.weight": ("F16", (64, 64))}, "no-artifact"),  # nothing is packed
    ],
)
def test_unlisted_modules_must_be_whole(tmp_path: Path, shapes: dict[str, Any], code: str) -> None:
    write_artifact(tmp_path, {}, shapes=shapes)
    assert fails(tmp_path).code == code


def test_a_layer_cannot_be_packed_and_left_out(tmp_path: Path) -> None:
    write_artifact(tmp_path, SPECS, quant=quant_block(SPECS, modules_to_not_convert=["model.layers.0.q"]))
    assert fails(tmp_path).where == "model.layers.0.q"


@pytest.mark.parametrize("change", [{"stored_in": 192}, {"stored_out": 256}, {"in_features": 129}])
def test_padding_is_to_the_next_tile_only(tmp_path: Path, change: dict[str, int]) -> None:
    write_artifact(tmp_path, SPECS)
    edit(tmp_path, lambda quant: quant["modules"]["model.layers.0.q"].update(change))
    assert fails(tmp_path).code == "tensor-mismatch"


def test_a_group_size_without_kernel_is_refused(tmp_path: Path) -> None:
    write_artifact(tmp_path, {"m": LinearSpec(128, 64, group_size=16)})
    assert fails(tmp_path).code == "group-size"


def test_an_index_that_disagrees_is_refused(tmp_path: Path) -> None:
    write_artifact(tmp_path, SPECS, shard=20_000)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())

    def with_index(change: Callable[[dict[str, Any]], object]) -> str:
        edited = json.loads(json.dumps(index))
        change(edited)
        path.write_text(json.dumps(edited))
        return fails(tmp_path).code

    name = "model.layers.0.q.weight"
    other = next(f for f in index["weight_map"].values() if f != index["weight_map"][name])
    assert with_index(lambda i: i["weight_map"].pop(name)) == "bad-index"
    assert with_index(lambda i: i["weight_map"].update({name: other})) == "missing-tensor"
    assert with_index(lambda i: i["weight_map"].update({"new": other})) == "missing-tensor"
    assert with_index(lambda i: i["weight_map"].update({name: "../x"})) == "path-escape"
    assert with_index(lambda i: i["metadata"].update(total_size=1)) == "bad-index"


def test_stray_weights_beside_shards_are_refused(tmp_path: Path) -> None:
    """Loaders that do not follow the index would take them."""
    write_artifact(tmp_path, SPECS, shard=20_000)
    write_artifact(tmp_path / "other", SPECS)
    (tmp_path / "other" / "model.safetensors").rename(tmp_path / "model.safetensors")
    assert fails(tmp_path).where == "model.safetensors"


@pytest.mark.parametrize("size", [0, 7, 100, -1])
def test_a_truncated_file_is_refused(tmp_path: Path, size: int) -> None:
    write_artifact(tmp_path, SPECS)
    path = tmp_path / "model.safetensors"
    os.truncate(path, size if size >= 0 else path.stat().st_size - 1)
    err = fails(tmp_path)
    assert err.exit_code == 1
    assert "model.safetensors" in str(err)


# ---- what a model expects ---------------------------------------------------------------------------------


def test_names_of_a_model(tmp_path: Path) -> None:
    write_artifact(tmp_path, SPECS)
    found = open_artifact(tmp_path)
    expected = {name: (info.dtype, info.shape) for name, info in found.tensors.items()}
    compare_names(found, expected)
    compare_names(found, {**expected, "model.norm.weight": (None, (64,))})
    wrong = {**expected, "model.norm.weight": ("BF16", (64,)), "model.layers.1.q.weight": ("I32", (8, 8))}
    del wrong["model.layers.0.k.weight"]
    wrong["model.layers.0.q.weight"] = ("I32", (8, 128))
    with pytest.raises(SourceError) as caught:
        compare_names(found, wrong)
    assert sorted((p.code, p.where) for p in caught.value.problems) == [
        ("extra-tensor", "model.layers.0.k.weight"),
        ("missing-tensor", "model.layers.1.q.weight"),
        ("tensor-mismatch", "model.layers.0.q.weight"),
        ("tensor-mismatch", "model.norm.weight"),
    ]


def test_tied_names_may_be_there_or_not(tmp_path: Path) -> None:
    both = {"head.weight": ("F16", (8, 4)), "embed.weight": ("F16", (8, 4))}
    for held in (["head.weight"], ["embed.weight"], list(both)):
        folder = tmp_path / "_".join(held)
        write_artifact(folder, SPECS, dense={name: both[name] for name in held})
        found = open_artifact(folder)
        packed = {n: (i.dtype, i.shape) for n, i in found.tensors.items() if n not in both}
        tied = {"head.weight": "embed.weight"}
        compare_names(found, {**packed, **both}, tied=tied)
        compare_names(found, {**packed, "embed.weight": ("F16", (8, 4))}, tied=tied)
        if len(held) == 1:
            with pytest.raises(SourceError):
                compare_names(found, {**packed, **both})


# ---- fusing -----------------------------------------------------------------------------------------------


def test_layers_that_fit_are_fused() -> None:
    a, b = LinearSpec(128, 192, bias=True), LinearSpec(128, 64, bias=True)
    fused = fuse([a, b])
    assert fused == LinearSpec(128, 256, bias=True, stored_in=128, stored_out=256)
    padded = LinearSpec(128, 40, stored_in=128, stored_out=64, bias=True)
    last = fuse([a, padded])
    assert last is not None
    assert (last.out_features, last.n) == (232, 256)


@pytest.mark.parametrize(
    "other",
    [
        LinearSpec(192, 64),
        LinearSpec(128, 64, bits=8),
        LinearSpec(128, 64, group_size=64),
        LinearSpec(128, 64, sym=False),
        LinearSpec(128, 64, act_order=True),
        LinearSpec(128, 64, bias=True),
        LinearSpec(100, 64, stored_in=128, stored_out=64),
    ],
)
def test_layers_that_differ_are_not_fused(other: LinearSpec) -> None:
    assert fuse([LinearSpec(128, 64), other]) is None


def test_padding_in_the_middle_and_unknown_orders_are_not_fused() -> None:
    padded = LinearSpec(128, 40, stored_in=128, stored_out=64)
    assert fuse([padded, LinearSpec(128, 64)]) is None
    ordered = [LinearSpec(128, 64, act_order=True)] * 2
    assert fuse(ordered) is None
    assert fuse(ordered, same_order=True) is not None


def test_scales_of_two_dtypes_are_not_fused(tmp_path: Path) -> None:
    shapes = shapes_of(SPECS)
    shapes["model.layers.0.k.weight_scale"] = ("BF16", (2, 64))
    write_artifact(tmp_path / "two", SPECS, shapes=shapes)
    write_artifact(tmp_path / "one", SPECS)
    pair = ("model.layers.0.q", "model.layers.0.k")
    assert open_artifact(tmp_path / "one").fused(pair) is not None
    assert open_artifact(tmp_path / "two").fused(pair) is None
