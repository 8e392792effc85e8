"""The W4A16 kernels on a card: against fp64, bit for bit where that is defined, and at every odd shape."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from gpu import cases  # noqa: E402
from w4pack.kernels import layout, tiles  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

MS = (1, 2, 3, 7, 15, 16, 17, 31, 33, 63, 65, 127, 129, 257, 1023)
KS = (64, 128, 192, 320, 384, 2752, 7424)
NS = (64, 192, 320)
GROUPS = (-1, 32, 64, 128)
TYPES = (torch.float16, torch.bfloat16)


def _poisoned(m: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((m + 2, n + 128), float("nan"), dtype=dtype, device="cuda")


def _run(case: cases.Case, chosen: tiles.Launch | None = None) -> torch.Tensor:
    """Run into the middle of a poisoned buffer; check that nothing else was touched."""
    from w4pack.kernels import gemm_launch

    m, n = case.x.shape[0], case.dense.shape[1]
    buffer = _poisoned(m, n, case.x.dtype)
    out = buffer[1 : m + 1, 64 : 64 + n]
    gemm_launch.run_gemm(case.x, case.packed, case.bias, out, case.dense.shape[0], n, chosen)
    found = out.clone()
    out.fill_(float("nan"))
    assert torch.isnan(buffer).all(), "wrote outside the output"
    return found


def _card() -> tuple[str, int]:
    from w4pack.kernels import launch

    card = launch.device(0)
    return launch.table_arch(card.arch), card.multiprocessors


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_every_shape_is_right_and_stays_inside(bits: int, zeros: bool, dtype: torch.dtype) -> None:
    worst = 0.0
    for k, n, group in itertools.product(KS, NS, GROUPS):
        whole = cases.make(max(MS), k, n, bits, group, zeros=zeros, dtype=dtype, bias=n == 192, seed=k + n)
        for m in MS:
            case = whole.with_x(whole.x[:m])
            err = cases.error(_run(case), case.exact)
            assert err < cases.BOUND[dtype], (m, k, n, group, err)
            worst = max(worst, err)
    print(f"worst relative error {worst:.2e}")


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("bits", [4, 8])
def test_every_tile_serves_every_m(bits: int, dtype: torch.dtype) -> None:
    arch, sms = _card()
    for tile in tiles.all_tiles(arch, bits):
        for k, n, group in (
            (64, 64, 32),
            (320, 192, 128),
            (1024, 640, -1),
            (2752, 320, 64),
            (4096, 1024, 128),
        ):
            whole = cases.make(300, k, n, bits, group, zeros=n == 192, dtype=dtype, seed=n)
            for m in (1, 8, 13, 33, 64, 130, 300) if k % tile.unit == 0 else ():
                case = whole.with_x(whole.x[:m])
                chosen = tiles.Launch(tile, tiles.grid(tile, sms, m, n, k))
                err = cases.error(_run(case, chosen), case.exact)
                assert err < cases.BOUND[dtype], (tile, m, k, n, group, err)


@pytest.mark.parametrize("pair", list(itertools.product(TYPES, TYPES)))
def test_either_scale_dtype_goes_with_either_activation(pair: tuple[torch.dtype, torch.dtype]) -> None:
    dtype, scale_dtype = pair
    for m in (1, 16, 32, 64, 200):
        case = cases.make(m, 512, 256, zeros=m == 16, dtype=dtype, scale_dtype=scale_dtype, seed=m)
        assert cases.error(_run(case), case.exact) < cases.BOUND[dtype], m


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_identity_gives_the_weight_bit_for_bit(bits: int, zeros: bool, dtype: torch.dtype) -> None:
    arch, sms = _card()
    for k, group in ((64, 32), (192, 128), (256, 32), (256, 64), (256, -1), (384, 128)):
        case = cases.make(1, k, 320, bits, group, zeros=zeros, dtype=dtype, seed=k)
        case = case.with_x(torch.eye(k, dtype=dtype, device="cuda"))
        wanted = case.dense.float().to(dtype)  # q - z and s are exact in fp32, their product needs 20 bits
        for tile in (t for t in tiles.all_tiles(arch, bits) if k % t.unit == 0):
            found = _run(case, tiles.Launch(tile, tiles.grid(tile, sms, k, 320, k)))
            assert torch.equal(found, wanted), (tile, k, group)


@pytest.mark.parametrize("m", [1, 4097, 32768, 70000])
def test_large_m(m: int) -> None:
    case = cases.make(m, 1024, 1024, seed=m)
    found = _run(case)
    for begin in range(0, m, 8192):
        rows = slice(begin, begin + 8192)
        exact = case.with_x(case.x[rows]).exact
        assert cases.error(found[rows], exact) < cases.BOUND[torch.float16]


def test_the_same_input_gives_the_same_bits() -> None:
    for m, n, k in ((1, 4096, 4096), (16, 6144, 4096), (32, 4096, 4096), (64, 1024, 8192), (200, 1024, 4096)):
        case = cases.make(m, k, n, seed=m, dense=False)
        case = cases.Case(*case.arguments, dense=torch.empty(k, n, device="meta"))  # type: ignore[arg-type]
        first = _run(case)
        assert all(torch.equal(_run(case), first) for _ in range(100)), (m, n, k)


def test_shared_sums_are_right_at_any_cut_and_leave_counts_and_marks_as_they_were() -> None:
    from w4pack.kernels import launch

    arch, sms = _card()
    case = cases.make(150, 4096, 1088, bias=True, seed=4)
    for tile in (t for t in tiles.all_tiles(arch, 4) if t.sharing):
        most = sms * tile.blocks
        even = (tiles.grid(tile, sms, 150, 1088, 4096),)
        for grid in even if tile.evenly else (most, most - 5, 7):
            chosen = tiles.Launch(tile, grid)
            first = _run(case, chosen)
            assert cases.error(first, case.exact) < cases.BOUND[torch.float16], chosen
            assert all(torch.equal(_run(case, chosen), first) for _ in range(50)), chosen
    torch.cuda.synchronize()
    card = launch.device(0)
    made = [space.memory for space in (*card.workspaces.values(), *card.spare) if space.memory]
    assert made and all((marked == -1).all() and not flags.any() for _, marked, flags in made)


def test_no_sum_is_taken_for_a_mark() -> None:
    """NaNs of every kind and infinities go from block to block; a mark is a NaN too."""
    arch, sms = _card()
    case = cases.make(20, 4096, 1088, seed=5)
    x = case.x.clone()
    for row, bits in enumerate((0x7FFF, -1, 0x7C01, -0x3FF, 0x7C00, -0x400)):  # quiet, signalling; inf, -inf
        x.view(torch.int16)[row, row * 700 : row * 700 + 3] = bits
    for tile in (t for t in tiles.all_tiles(arch, 4) if t.marked):
        chosen = tiles.Launch(tile, tiles.grid(tile, sms, 20, 1088, 4096))
        found = _run(case.with_x(x), chosen)
        assert not found[:4].isfinite().any() and not found[4:6].isfinite().any(), tile
        assert torch.equal(found[6:], _run(case, chosen)[6:]), tile


def test_a_row_does_not_depend_on_others_within_one_tile_class() -> None:
    from w4pack.kernels import launch

    card = launch.device(0)
    whole = cases.make(257, 1024, 512, seed=3)
    by_tile: dict[tiles.Tile, torch.Tensor] = {}
    for m in range(1, 258, 4):
        arch = launch.table_arch(card.arch)
        tile = tiles.choose(arch, card.multiprocessors, card.shared, m, 512, 1024, 4).tile
        if m > tile.tokens:
            continue  # another grid, so K is cut elsewhere
        row = _run(whole.with_x(whole.x[:m]))[0]
        assert torch.equal(row, by_tile.setdefault(tile, row)), m
    exact = whole.exact[0]
    for row in by_tile.values():
        assert cases.error(row, exact) < cases.BOUND[torch.float16]


def test_zero_weights_give_the_bias_exactly() -> None:
    case = cases.make(5, 128, 192, bias=True)
    scales = torch.zeros_like(case.scales)
    found = _run(cases.Case(case.x, case.weight, scales, None, case.bias, 4, 128, case.dense))
    assert case.bias is not None
    assert torch.equal(found, case.bias.expand(5, -1))


# ---- golden outputs of an engine --------------------------------------------------------------------------


def _golden(shared: Path) -> tuple[dict[str, object], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    from safetensors.torch import load_file

    folder = shared / "fixtures" / "golden"
    meta = json.loads((folder / "golden.json").read_text())
    return meta, load_file(folder / "repack.safetensors"), load_file(folder / "gemm.safetensors")


def _artifact(meta: dict[str, object], tensors: dict[str, torch.Tensor], name: str) -> cases.Case:
    """Return a golden case in the artifact's form, its dense weight computed from natural codes."""
    bits, k, n, groups = (int(str(meta[key])) for key in ("bits", "K", "N", "groups"))
    group_size = -1 if groups == 1 else k // groups
    scales = tensors[f"{name}.scales"].reshape(groups, n)
    zeros = tensors.get(f"{name}.zeros")
    packed = (
        None if zeros is None else torch.from_numpy(layout.pack_zeros(zeros.reshape(groups, n).numpy(), bits))
    )
    order = torch.from_numpy(layout.grouped_order(n))
    words = tensors[f"{name}.gptq_qweight"]
    shifts = torch.arange(0, 32, bits).view(1, -1, 1)
    q = (words[:, None, :].long() >> shifts & (2**bits - 1)).reshape(k, n).double()
    perm = tensors.get(f"{name}.act_perm")
    group = tensors[f"{name}.g_idx"].long() if perm is not None else torch.arange(k) // (k // groups)
    z = 2.0 ** (bits - 1) if zeros is None else zeros.reshape(groups, n).double()[group]
    dense = (q - z) * scales.double()[group]
    dense = dense if perm is None else dense[perm.long()]
    cuda = [
        None if t is None else t.contiguous().cuda()
        for t in (tensors[f"{name}.marlin_qweight"], scales[:, order], packed)
    ]
    return cases.Case(torch.empty(0), cuda[0], cuda[1], cuda[2], None, bits, group_size, dense.cuda())  # type: ignore[arg-type]


@pytest.mark.shared
def test_error_is_at_most_a_tenth_above_the_engines(shared: Path) -> None:
    meta, packed, gemm = _golden(shared)
    for name, about in meta.items():
        if f"{name}.x" not in gemm:
            continue
        case = _artifact(about, packed, name)  # type: ignore[arg-type]
        dtype = gemm[f"{name}.x"].dtype
        perm = packed.get(f"{name}.act_perm")
        for m in (1, 8, 16, 31):
            x = gemm[f"{name}.x"][:m]
            product = case.with_x((x if perm is None else x[:, perm.long()]).contiguous().cuda())
            ours = cases.error(_run(product), product.exact)
            theirs = cases.error(gemm[f"{name}.y_m{m}"].cuda(), product.exact)
            worst = {torch.float16: 3.7e-4, torch.bfloat16: 2.4e-3}[dtype]
            assert ours <= 1.1 * max(theirs, worst), (name, m, ours, theirs)


@pytest.mark.shared
def test_the_engines_weight_bit_for_bit(shared: Path) -> None:
    meta, packed, gemm = _golden(shared)
    seen = 0
    for name, about in meta.items():
        wanted = gemm.get(f"{name}.w_identity")
        if wanted is None:
            continue
        case = _artifact(about, packed, name)  # type: ignore[arg-type]
        eye = torch.eye(case.dense.shape[0], dtype=wanted.dtype, device="cuda")
        perm = packed.get(f"{name}.act_perm")  # the engine gathers the columns of the identity too
        x = eye if perm is None else eye[:, perm.long().cuda()].contiguous()
        assert torch.equal(_run(case.with_x(x)).cpu(), wanted), name
        seen += 1
    assert seen > 5


def test_numpy_is_the_oracle_of_the_lane_arithmetic() -> None:
    """One code at a time: a weight with a single non-zero code lands in the right output element."""
    for k, n in ((0, 0), (9, 13), (27, 77), (37, 5), (63, 127)):
        codes = np.full((64, 128), 8, np.uint8)
        codes[k, n] = 9
        weight = torch.from_numpy(layout.pack_codes(codes, 4)).cuda()
        scales = torch.ones((1, 128), dtype=torch.float16, device="cuda")
        dense = torch.from_numpy(codes.astype(np.float64) - 8).cuda()
        case = cases.Case(
            torch.eye(64, dtype=torch.float16, device="cuda"), weight, scales, None, None, 4, -1, dense
        )
        assert torch.equal(_run(case).double(), dense), (k, n)


@pytest.mark.parametrize("m", [5, 40, 130])
@pytest.mark.parametrize("offset", [2, 6, 64])
def test_rows_that_start_at_any_pair(m: int, offset: int) -> None:
    """Results leave in 16-byte pieces where rows allow it, in pairs where they do not."""
    from w4pack.kernels import gemm_launch

    case = cases.make(m, 512, 320, bias=True, seed=m)
    buffer = torch.full((m, 320 + 74), float("nan"), dtype=case.x.dtype, device="cuda")
    out = buffer[:, offset : offset + 320]
    gemm_launch.run_gemm(case.x, case.packed, case.bias, out, 512, 320)
    assert cases.error(out, case.exact) < cases.BOUND[case.x.dtype]
    out.fill_(float("nan"))
    assert torch.isnan(buffer).all(), "wrote outside the output"


def test_activations_at_an_odd_address_are_refused() -> None:
    from w4pack.convert.errors import UsageError
    from w4pack.kernels import ops

    case = cases.make(3, 512, 320, seed=1)
    flat = torch.zeros(3 * 512 + 4, dtype=case.x.dtype, device="cuda")
    _, weight, scales, zeros, bias, bits, group = case.arguments
    with pytest.raises(UsageError, match="odd address"):
        ops.gemm(flat[4:].view(3, 512), weight, scales, zeros, bias, bits, group)
