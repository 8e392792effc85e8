"""The placement plan as arithmetic: carried out here on bytes in memory, without a file and without torch."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import pytest
from artifacts import write_artifact
from hypothesis import given
from hypothesis import strategies as st

from w4pack.convert.errors import Refused
from w4pack.convert.files.shards import new_tensor, plan_shards
from w4pack.convert.files.tensorfile import TensorInfo
from w4pack.kernels import linears
from w4pack.kernels.artifact import open_artifact
from w4pack.kernels.linears import Cut
from w4pack.kernels.placement import ALIGN, KEPT_ALIGN, Plan, Target, concat, make_plan, rest, stack, take
from w4pack.kernels.spec import LinearSpec

NUMPY = {"U8": "u1", "F16": "f2", "I32": "i4", "F64": "f8"}
Arrays = dict[str, np.ndarray]


def files_of(
    arrays: Mapping[str, tuple[str, np.ndarray]], limit: int
) -> tuple[dict[str, TensorInfo], dict[str, bytes]]:
    """Lay arrays out in files of at most ``limit`` bytes of data each."""
    shards = plan_shards([new_tensor(n, tag, a.shape) for n, (tag, a) in arrays.items()], limit)
    infos = {info.name: info for s in shards for info in s.tensors}
    data = {s.name: s.header + b"".join(arrays[i.name][1].tobytes() for i in s.tensors) for s in shards}
    return infos, data


def carry_out(plan: Plan, files: Mapping[str, bytes], chunk: int) -> Arrays:
    """Do what the plan says, in any order of chunks; every byte that is not written stays 0xEE."""
    arenas = [np.full(size, 0xEE, np.uint8) for size in plan.arenas]
    for piece in reversed(plan.chunks):
        buffer = np.full(chunk, 0xDD, np.uint8)
        for r in piece.reads:
            for row in range(r.rows):
                begin = r.offset + row * r.pitch
                got = np.frombuffer(files[piece.file][begin : begin + r.nbytes], np.uint8)
                buffer[r.at + row * r.nbytes : r.at + (row + 1) * r.nbytes] = got
        for c in piece.copies:
            for row in range(c.rows):
                at, to = c.at + row * c.pitch, c.to + row * c.step
                assert at + c.width <= chunk
                arenas[c.arena][to : to + c.width] = buffer[at : at + c.width]
    found = {}
    for key, place in plan.places.items():
        dtype = np.dtype(NUMPY[place.dtype])
        size = prod(place.shape) * dtype.itemsize
        flat = arenas[place.arena][place.offset : place.offset + size]
        found[key] = flat.view(dtype).reshape(place.shape)
    return found


def random_arrays(
    seed: int, shapes: Mapping[str, tuple[str, Sequence[int]]]
) -> dict[str, tuple[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    made = {}
    for name, (tag, shape) in shapes.items():
        dtype = np.dtype(NUMPY[tag])
        made[name] = tag, np.frombuffer(rng.bytes(prod(shape) * dtype.itemsize), dtype).reshape(shape)
    return made


def same(found: np.ndarray, wanted: np.ndarray) -> bool:
    return found.shape == wanted.shape and found.tobytes() == wanted.tobytes()


SHAPES = st.dictionaries(
    st.text("abc0123.", min_size=1, max_size=6),
    st.tuples(st.sampled_from(sorted(NUMPY)), st.lists(st.integers(0, 9), max_size=3)),
    min_size=1,
    max_size=8,
)
CHUNKS = st.sampled_from([1, 7, 16, 300, 1000, 1 << 20])
GAPS = st.sampled_from([0, 3, 40, 1 << 20])


@given(shapes=SHAPES, limit=st.sampled_from([1, 200, 1 << 30]), chunk=CHUNKS, seed=st.integers(0, 99))
def test_whole_tensors_arrive(shapes: Any, limit: int, chunk: int, seed: int) -> None:
    arrays = random_arrays(seed, shapes)
    infos, files = files_of(arrays, limit)
    plan = make_plan(rest(infos, ()), chunk=chunk)
    found = carry_out(plan, files, chunk)
    assert all(same(found[name], array) for name, (_, array) in arrays.items())
    total = sum(array.nbytes for _, array in arrays.values())
    assert plan.bytes_needed == plan.bytes_read == total
    for place in plan.places.values():
        if prod(place.shape):
            assert place.offset % KEPT_ALIGN == 0


@given(
    st.data(),
    st.sampled_from(sorted(NUMPY)),
    st.lists(st.integers(1, 6), min_size=1, max_size=3),
    CHUNKS,
    GAPS,
    st.integers(0, 99),
)
def test_slices_side_by_side_and_stacked_arrive(
    data: st.DataObject, tag: str, shape: list[int], chunk: int, gap: int, seed: int
) -> None:
    """Random cuts of tensors, put together along a dimension, twice, and stacked."""
    dim = data.draw(st.integers(0, min(len(shape), 2) - 1))
    sizes = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    grids = {}
    for e in range(2):
        for i, size in enumerate(sizes):
            grids[f"e{e}.t{i}"] = (tag, [*shape[:dim], size, *shape[dim + 1 :]])
    arrays = random_arrays(seed, grids)
    infos, files = files_of(arrays, data.draw(st.sampled_from([100, 1 << 30])))
    cuts = []
    for size in sizes:
        start = data.draw(st.integers(0, size))
        cuts.append((start, data.draw(st.integers(start, size))))
    targets, wanted = [], []
    for e in range(2):
        names = [f"e{e}.t{i}" for i in range(len(sizes))]
        parts = [take(infos[n], {dim: cut}) for n, cut in zip(names, cuts, strict=True)]
        index = [tuple([slice(None)] * dim + [slice(*cut)]) for cut in cuts]
        one = np.concatenate([arrays[n][1][i] for n, i in zip(names, index, strict=True)], dim)
        fused = concat(parts, dim)
        targets.append(concat([fused, fused], dim))
        wanted.append(np.concatenate([one, one], dim))
    plan = make_plan({"all": stack(targets), "first": targets[0]}, chunk=chunk, gap=gap)
    found = carry_out(plan, files, chunk)
    assert same(found["all"], np.stack(wanted))
    assert same(found["first"], wanted[0])


@given(
    rows=st.tuples(st.integers(0, 8), st.integers(0, 8)).map(sorted),
    cols=st.tuples(st.integers(0, 30), st.integers(0, 30)).map(sorted),
    chunk=CHUNKS,
    gap=GAPS,
)
def test_a_rectangle_arrives(rows: list[int], cols: list[int], chunk: int, gap: int) -> None:
    arrays = random_arrays(1, {"x": ("I32", (8, 30)), "y": ("F16", (4, 5))})
    infos, files = files_of(arrays, 1 << 30)
    target = take(infos["x"], {0: (rows[0], rows[1]), 1: (cols[0], cols[1])})
    plan = make_plan({"x": target, "y": take(infos["y"])}, chunk=chunk, gap=gap)
    found = carry_out(plan, files, chunk)
    assert same(found["x"], arrays["x"][1][slice(*rows), slice(*cols)])
    assert same(found["y"], arrays["y"][1])


def test_stacked_experts_with_gate_and_up_side_by_side_arrive() -> None:
    shapes = {f"{e}.{n}": ("I32", (4, 6)) for e in range(5) for n in ("gate", "up")}
    arrays = random_arrays(2, shapes)
    infos, files = files_of(arrays, 150)
    target = stack([concat([take(infos[f"{e}.gate"]), take(infos[f"{e}.up"])], 1) for e in range(5)])
    found = carry_out(make_plan({"x": target}, chunk=64), files, 64)
    wanted = np.stack([np.concatenate([arrays[f"{e}.gate"][1], arrays[f"{e}.up"][1]], 1) for e in range(5)])
    assert same(found["x"], wanted)


def test_experts_fused_in_the_file_go_side_by_side() -> None:
    arrays = random_arrays(3, {"a": ("F16", (3, 4, 5)), "b": ("F16", (3, 4, 5))})
    infos, files = files_of(arrays, 1 << 30)
    for dim in range(3):
        plan = make_plan({"x": concat([take(infos["a"]), take(infos["b"])], dim)}, chunk=50)
        assert same(carry_out(plan, files, 50)["x"], np.concatenate([arrays["a"][1], arrays["b"][1]], dim))


@given(
    cut_at=st.integers(0, 1),
    joined_at=st.integers(0, 1),
    cut=st.tuples(st.integers(0, 6), st.integers(0, 6)).map(sorted),
    chunk=CHUNKS,
    gap=GAPS,
)
def test_a_cut_along_one_dimension_joins_along_another(
    cut_at: int, joined_at: int, cut: list[int], chunk: int, gap: int
) -> None:
    arrays = random_arrays(5, {"a": ("F16", (6, 6)), "b": ("F16", (6, 6))})
    infos, files = files_of(arrays, 1 << 30)
    parts = [take(infos[name], {cut_at: (cut[0], cut[1])}) for name in "ab"]
    found = carry_out(make_plan({"x": concat(parts, joined_at)}, chunk=chunk, gap=gap), files, chunk)
    index = (slice(*cut), slice(None)) if cut_at == 0 else (slice(None), slice(*cut))
    assert same(found["x"], np.concatenate([arrays[name][1][index] for name in "ab"], joined_at))


def test_rows_between_rows_go_side_by_side() -> None:
    """Two tensors row by row in turn, then columns of a third beside them."""
    shapes = {"a": ("F16", (3, 1, 5)), "b": ("F16", (3, 1, 5)), "c": ("F16", (3, 2, 4))}
    arrays = random_arrays(4, shapes)
    infos, files = files_of(arrays, 1 << 30)
    a, b, c = (take(infos[name]) for name in "abc")
    found = carry_out(make_plan({"x": concat([concat([a, b], 1), c], 2)}, chunk=30), files, 30)
    turns = np.concatenate([arrays["a"][1], arrays["b"][1]], 1)
    assert same(found["x"], np.concatenate([turns, arrays["c"][1]], 2))


# ---- what a plan costs ------------------------------------------------------------------------------------


def test_whole_tensors_of_a_file_are_one_copy() -> None:
    """However many tensors there are, a chunk of a whole file is one read and one copy."""
    infos, _ = files_of(random_arrays(0, {f"t{i}": ("I32", (64, 64)) for i in range(20)}), 1 << 30)
    plan = make_plan(rest(infos, ()), chunk=1 << 18)
    assert len(plan.arenas) == 1
    assert [(len(c.reads), len(c.copies)) for c in plan.chunks] == [(1, 1)] * 2
    assert plan.arenas[0] == 20 * 64 * 64 * 4


def test_fused_tensors_do_not_break_the_order_of_reads() -> None:
    """A file is read front to back, each byte once, whatever is fused."""
    infos, _ = files_of(random_arrays(0, {f"t{i}": ("I32", (64, 64)) for i in range(6)}), 1 << 30)
    fused = {"x": concat([take(infos["t1"]), take(infos["t4"])], 1)}
    plan = make_plan(fused | rest(infos, fused.values()), chunk=1 << 30)
    (chunk,) = plan.chunks
    assert len(chunk.reads) == 1
    assert chunk.reads[0].nbytes == 6 * 64 * 64 * 4
    assert sum(plan.arenas) == 6 * 64 * 64 * 4


@pytest.mark.parametrize(("gap", "read"), [(0, 64 * 40), (7 * 40 - 1, 64 * 40), (7 * 40, 63 * 320 + 40)])
def test_short_gaps_are_read_along_and_long_ones_skipped(gap: int, read: int) -> None:
    infos, _ = files_of(random_arrays(0, {"x": ("I32", (64, 80))}), 1 << 30)
    plan = make_plan({"x": take(infos["x"], {1: (10, 20)})}, gap=gap)
    assert plan.bytes_needed == 64 * 40
    assert plan.bytes_read == read


def test_tied_names_share_one_place() -> None:
    infos, _ = files_of(random_arrays(0, {"embed": ("F16", (50, 8))}), 1 << 30)
    plan = make_plan({"embed": take(infos["embed"]), "head": take(infos["embed"])})
    assert plan.places["embed"] == plan.places["head"]
    assert plan.bytes_needed == 800


def test_odd_tensors_of_a_file_start_aligned() -> None:
    """A file of another writer may put a tensor anywhere; torch and kernels may not."""
    infos = {
        "a": TensorInfo("a", "U8", (3,), "f", 100, 3),
        "b": TensorInfo("b", "F64", (2,), "f", 103, 16),
        "c": TensorInfo("c", "F64", (2,), "f", 119, 16),
    }
    plan = make_plan(rest(infos, ()))
    assert {key: place.offset for key, place in plan.places.items()} == {"a": 0, "b": ALIGN, "c": ALIGN + 16}


def test_no_targets_and_empty_targets_are_plans() -> None:
    assert make_plan({}).chunks == ()
    empty = TensorInfo("a", "F16", (0, 4), "f", 100, 0)
    plan = make_plan({"a": take(empty), "b": concat([take(empty), take(empty)], 1)})
    assert plan.chunks == ()
    assert plan.places["b"].shape == (0, 8)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda a, b: take(a, {0: (0, 9)}),
        lambda a, b: take(a, {1: (3, 2)}),
        lambda a, b: take(TensorInfo("f", "F4", (6,), "f", 0, 3), {0: (1, 4)}),
        lambda a, b: take(TensorInfo("f", "U8", (2, 2, 2), "f", 0, 8), {1: (0, 1), 2: (0, 1)}),
        lambda a, b: concat([take(a), take(b)], 1),
        lambda a, b: stack([take(a), take(b)]),
    ],
)
def test_what_cannot_be_is_a_value_error(wrong: Any) -> None:
    a, b = TensorInfo("a", "F16", (4, 4), "f", 0, 32), TensorInfo("b", "F16", (5, 4), "f", 32, 40)
    with pytest.raises(ValueError, match=r".+"):
        wrong(a, b)


# ---- packed layers, whole and on ranks --------------------------------------------------------------------


def layer_arrays(data: Mapping[str, bytes], infos: Mapping[str, TensorInfo]) -> Arrays:
    return {n: np.frombuffer(raw, NUMPY[infos[n].dtype]).reshape(infos[n].shape) for n, raw in data.items()}


def load(targets: Mapping[str, Target], folder: Any, chunk: int = 5000) -> Arrays:
    files = {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
    return carry_out(make_plan(targets, chunk=chunk, gap=100), files, chunk)


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("group", [-1, 32, 64, 128])
@pytest.mark.parametrize("bits", [4, 8])
def test_ranks_hold_slices(tmp_path: Any, size: int, group: int, bits: int) -> None:
    """Columns: words, scales, zeros, bias. Rows: tile rows and groups. Written out here in numbers."""
    unit = 128 if group == 128 else 64
    n, k = 64 * size, unit * size
    specs = {
        "col": LinearSpec(256, n, bits, group, sym=False, bias=True),
        "row": LinearSpec(k, 128, bits, group, sym=False, bias=True),
    }
    data = write_artifact(tmp_path, specs, seed=size)
    artifact = open_artifact(tmp_path)
    whole = layer_arrays(data, artifact.tensors)
    for rank in range(size):
        found = load(linears.alone(artifact, "col", Cut("out", rank, size)), tmp_path)
        word = 64 * bits // 2
        assert same(found["weight"], whole["col.weight"][:, rank * word : (rank + 1) * word])
        assert same(found["weight_scale"], whole["col.weight_scale"][:, rank * 64 : (rank + 1) * 64])
        zero = 2 * bits
        assert same(
            found["weight_zero_point"], whole["col.weight_zero_point"][:, rank * zero : (rank + 1) * zero]
        )
        assert same(found["bias"], whole["col.bias"][rank * 64 : (rank + 1) * 64])

        found = load(linears.alone(artifact, "row", Cut("in", rank, size)), tmp_path)
        rows, groups = unit // 16, 1 if group == -1 else unit // group
        first = 0 if group == -1 else rank * groups
        assert same(found["weight"], whole["row.weight"][rank * rows : (rank + 1) * rows])
        for suffix in ("weight_scale", "weight_zero_point"):
            assert same(found[suffix], whole[f"row.{suffix}"][first : first + groups])
        assert same(found["bias"], whole["row.bias"])
        for module, axis in (("col", "out"), ("row", "in")):
            cut = Cut(axis, rank, size)
            held = linears.cut_spec(module, artifact.specs[module], cut)
            shapes = {
                s: t.shape
                for s, t in linears.alone(artifact, module, cut).items()
                if s != "bias" or axis == "out"
            }
            assert shapes == {s: shape for s, shape in held.shapes().items() if s in shapes}


def test_padding_lies_with_the_last_rank(tmp_path: Any) -> None:
    spec = LinearSpec(100, 200, 4, 32, sym=True, bias=True, stored_in=128, stored_out=256)
    data = write_artifact(tmp_path, {"m": spec})
    artifact = open_artifact(tmp_path)
    bias = np.frombuffer(data["m.bias"], "f2")
    sizes = []
    for rank in range(4):
        cut = Cut("out", rank, 4)
        held = linears.cut_spec("m", artifact.specs["m"], cut)
        sizes.append((held.out_features, held.n, held.in_features, held.k))
        assert same(
            load(linears.alone(artifact, "m", cut), tmp_path)["bias"], bias[64 * rank : 64 * rank + 64]
        )
    assert sizes == [(64, 64, 100, 128)] * 3 + [(8, 64, 100, 128)]
    held = linears.cut_spec("m", artifact.specs["m"], Cut("in", 1, 2))
    assert (held.in_features, held.k) == (36, 64)


def test_fused_ranks_are_cut_before_they_are_joined(tmp_path: Any) -> None:
    specs = {"q": LinearSpec(128, 256, bias=True), "k": LinearSpec(128, 128, bias=True)}
    data = write_artifact(tmp_path, specs)
    artifact = open_artifact(tmp_path)
    whole = layer_arrays(data, artifact.tensors)
    found = load(linears.side_by_side(artifact, ["q", "k"], Cut("out", 1, 2)), tmp_path)
    assert same(found["weight"], np.concatenate([whole["q.weight"][:, 256:], whole["k.weight"][:, 128:]], 1))
    assert same(found["bias"], np.concatenate([whole["q.bias"][128:], whole["k.bias"][64:]]))


def test_experts_are_stacked(tmp_path: Any) -> None:
    specs = {f"{e}.{n}": LinearSpec(64, 64, 4, 32, sym=False) for e in range(3) for n in ("gate", "up")}
    data = write_artifact(tmp_path, specs, shard=9000)
    artifact = open_artifact(tmp_path)
    whole = layer_arrays(data, artifact.tensors)
    experts = [linears.side_by_side(artifact, [f"{e}.gate", f"{e}.up"]) for e in range(3)]
    targets = linears.named("experts", linears.stacked(experts))
    left = linears.others(artifact, specs, targets)
    assert list(left) == ["model.norm.weight"]
    found = load(targets | left, tmp_path)
    for suffix in ("weight", "weight_scale", "weight_zero_point"):
        pairs = [np.concatenate([whole[f"{e}.{n}.{suffix}"] for n in ("gate", "up")], 1) for e in range(3)]
        assert same(found[f"experts.{suffix}"], np.stack(pairs))


@pytest.mark.parametrize(
    ("spec", "cut", "where"),
    [
        (LinearSpec(128, 128, act_order=True), Cut("in", 0, 2), "act-order"),
        (LinearSpec(128, 192), Cut("out", 0, 2), "192 columns on 2 ranks"),
        (LinearSpec(128, 64), Cut("out", 0, 2), "64 columns on 2 ranks"),
        (LinearSpec(128, 64), Cut("in", 0, 2), "128 rows on 2 ranks"),  # half a group
        (LinearSpec(192, 64), Cut("in", 0, 3), "192 rows on 3 ranks"),  # a short last group
    ],
)
def test_cuts_through_tiles_groups_or_orders_name_the_layer(
    tmp_path: Any, spec: LinearSpec, cut: Cut, where: str
) -> None:
    write_artifact(tmp_path, {"m.layer": spec})
    artifact = open_artifact(tmp_path)
    with pytest.raises(Refused, match=where) as caught:
        linears.alone(artifact, "m.layer", cut)
    assert (caught.value.where, caught.value.code) == ("m.layer", "tensor-parallel")
    assert linears.alone(artifact, "m.layer", Cut(cut.axis, 0, 1)) == linears.alone(artifact, "m.layer")


def test_columns_of_an_act_order_layer_keep_its_order(tmp_path: Any) -> None:
    data = write_artifact(tmp_path, {"m": LinearSpec(128, 128, act_order=True)})
    found = load(linears.alone(open_artifact(tmp_path), "m", Cut("out", 1, 2)), tmp_path)
    assert found["act_perm"].tobytes() == data["m.act_perm"]


def test_layers_that_do_not_fit_are_refused(tmp_path: Any) -> None:
    write_artifact(tmp_path, {"a": LinearSpec(128, 64), "b": LinearSpec(128, 64, bits=8)})
    with pytest.raises(Refused) as caught:
        linears.side_by_side(open_artifact(tmp_path), ["a", "b"])
    assert (caught.value.code, caught.value.where) == ("fuse", "a, b")
