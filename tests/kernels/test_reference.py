"""The reference operators on the CPU: against slow loops in fp64, the packer, an engine's golden outputs."""

import json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from w4pack.convert.errors import UsageError  # noqa: E402
from w4pack.kernels import checks, layout, ops, reference  # noqa: E402
from w4pack.kernels.quarot import quantize_checks  # noqa: E402
from w4pack.kernels.quarot.calls import Form  # noqa: E402


def _problem(
    k: int, n: int, bits: int, group: int, zeros: bool, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray, tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """Codes, scales and zeros in natural order, and the artifact's tensors of them."""
    rng = np.random.default_rng(seed)
    groups = 1 if group == -1 else -(-k // group)
    codes = rng.integers(0, 2**bits, (k, n), dtype=np.uint8)
    scales = (rng.random((groups, n)) * 0.01 + 0.005).astype(np.float16)
    z = rng.integers(0, 2**bits, (groups, n), dtype=np.uint8) if zeros else None
    packed = (
        torch.from_numpy(layout.pack_codes(codes, bits)),
        torch.from_numpy(np.ascontiguousarray(scales[:, layout.grouped_order(n)])),
        None if z is None else torch.from_numpy(layout.pack_zeros(z, bits)),
    )
    return codes, scales, z if z is not None else np.full((groups, n), 2 ** (bits - 1)), packed


def _loop(codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray, group: int) -> np.ndarray:
    out = np.empty(codes.shape)
    for k in range(codes.shape[0]):
        g = 0 if group == -1 else k // group
        for n in range(codes.shape[1]):
            out[k, n] = (int(codes[k, n]) - int(zeros[g, n])) * float(scales[g, n])
    return out


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 64), (4, 128), (4, -1), (8, 32), (8, 128), (8, -1)])
def test_dense_and_gemm_equal_the_loop(bits: int, group: int, zeros: bool) -> None:
    codes, scales, z, packed = _problem(192, 64, bits, group, zeros)
    wanted = _loop(codes, scales, z, group)
    found = reference.dense(*packed, bits, group, torch.float64)
    np.testing.assert_array_equal(found.numpy(), wanted)
    dense = ops.dequantize(*packed, bits, group, torch.float16)
    np.testing.assert_array_equal(dense.numpy(), wanted.astype(np.float32).astype(np.float16).T)
    x = torch.randn(5, 192).half()
    bias = torch.randn(64).half()
    y = ops.gemm(x, *packed, bias, bits, group)
    exact = x.double().numpy() @ wanted + bias.double().numpy()
    assert np.linalg.norm(y.double().numpy() - exact) < 4e-4 * np.linalg.norm(exact)
    out = torch.full((5, 64), float("nan"), dtype=torch.float16)
    ops.gemm_out(x, *packed, bias, bits, group, out)
    assert torch.equal(out, y)


@pytest.mark.shared
def test_repack_equals_the_engines_bytes(shared: Path) -> None:
    from safetensors.torch import load_file

    golden = load_file(shared / "fixtures" / "golden" / "repack.safetensors")
    meta = json.loads((shared / "fixtures" / "golden" / "golden.json").read_text())
    for name, about in meta.items():
        perm = golden.get(f"{name}.act_perm")
        order = None if perm is None else perm.int()
        found = ops.repack(golden[f"{name}.gptq_qweight"], order, about["bits"])
        assert torch.equal(found, golden[f"{name}.marlin_qweight"]), name
    assert len(meta) > 20


@pytest.mark.parametrize("shape", [(0, 64), (8, 0)])
def test_words_of_nothing_make_no_launch(shape: tuple[int, int]) -> None:
    words = torch.zeros(shape, dtype=torch.int32)
    for repack in (ops.repack, ops._repack_cuda):  # a grid may not be empty
        assert repack(words, None, 4).shape == (shape[0] // 2, shape[1] * 2)


def test_gather_takes_columns_and_pads() -> None:
    x = torch.arange(12).reshape(2, 6).half()
    perm = torch.tensor([5, 0, 3, 1, 2, 4], dtype=torch.int32)
    wanted = torch.tensor([[5, 0, 3, 1, 2, 4, 0, 0], [11, 6, 9, 7, 8, 10, 0, 0]]).half()
    assert torch.equal(ops.gather(x, perm, 8), wanted)


def test_shapes_without_data() -> None:
    """The fake versions agree with the real ones: ``torch.compile`` and exporters rely on them."""
    _, _, _, packed = _problem(128, 64, 4, 64, True)
    tests = ("test_schema", "test_faketensor")
    x = torch.randn(3, 128).half()
    torch.library.opcheck(ops.gemm, (x, *packed, None, 4, 64), test_utils=tests)
    torch.library.opcheck(ops.gather, (x, torch.randperm(128).int(), 128), test_utils=tests)
    torch.library.opcheck(ops.dequantize, (*packed, 4, 64, torch.bfloat16), test_utils=tests)
    words = torch.zeros((16, 64), dtype=torch.int32)
    torch.library.opcheck(ops.repack, (words, None, 4), test_utils=tests)


def test_wrong_arguments_name_what_is_wrong() -> None:
    _, _, _, (weight, scales, _) = _problem(128, 64, 4, 64, False)
    x = torch.randn(3, 128).half()
    bad = [
        ((x, weight, scales, None, None, 4, 48), "48"),
        ((x, weight, scales, None, None, 4, 96), "96"),
        ((x, weight, scales, None, None, 4, 256), "256"),
        ((x, weight, scales, None, None, 3, 64), "code width"),
        ((x, weight, scales[:1], None, None, 4, 64), "scales has the wrong shape"),
        ((x, weight, scales, None, None, 4, 32), "scales has the wrong shape"),
        ((x.float(), weight, scales, None, None, 4, 64), "float32"),
        ((x[:, :64], weight, scales, None, None, 4, 64), "128"),
        ((x.t().contiguous().t(), weight, scales, None, None, 4, 64), "stride"),
        ((x, weight.short(), scales, None, None, 4, 64), "int16"),
        ((x, weight[:3], scales, None, None, 4, 64), "multiple of 64"),
        ((x, weight, scales, None, torch.zeros(64), 4, 64), "bias"),
        ((x, weight, scales, scales, None, 4, 64), "zeros"),
    ]
    for arguments, text in bad:
        with pytest.raises(UsageError) as caught:
            ops.gemm(*arguments)
        assert text in str(caught.value), (text, str(caught.value))
    with pytest.raises(UsageError, match="perm"):
        ops.gather(x, torch.arange(64), 128)
    with pytest.raises(UsageError, match="tile"):
        ops.repack(torch.zeros((16, 48), dtype=torch.int32), None, 4)


@pytest.mark.parametrize(("at", "value"), [(0, -1), (3, 64), (5, 2**31 - 1), (63, -(2**31))])
def test_a_perm_that_is_none_is_an_error_and_never_an_index(at: int, value: int) -> None:
    """Torch would take -1 as the last column; the card would read wherever it points."""
    x, words = torch.randn(2, 64).half(), torch.zeros((8, 64), dtype=torch.int32)
    right = torch.randperm(64).int()
    ops.gather(x, right, 64)
    ops.repack(words, right, 4)
    twice = right.clone()
    twice[0] = twice[1]
    wrong = right.clone()
    wrong[at] = value
    for perm in (wrong, twice):
        for call in (lambda p=perm: ops.gather(x, p, 64), lambda p=perm: ops.repack(words, p, 4)):
            with pytest.raises(UsageError) as told:
                call()
            assert (told.value.what, told.value.where) == ("perm is no permutation", "perm")


@pytest.mark.parametrize(("bits", "words"), [(4, 129), (8, 257), (8, 259)])
def test_a_weight_that_ends_inside_a_column_is_an_error(bits: int, words: int) -> None:
    weight = torch.zeros((4, words), dtype=torch.int32)
    scales = torch.ones((1, 64), dtype=torch.float16)
    for call in (
        lambda: ops.gemm(torch.zeros((1, 64), dtype=torch.float16), weight, scales, None, None, bits, -1),
        lambda: ops.dequantize(weight, scales, None, bits, -1, torch.float16),
    ):
        with pytest.raises(UsageError) as told:
            call()
        assert (told.value.where, told.value.found) == ("weight", str(words))


def test_a_weight_past_the_reach_of_an_offset_is_an_error() -> None:
    packed = torch.empty((16384, 65536), dtype=torch.int32, device="meta")  # 4 GiB
    scales = torch.empty((1, 32768), dtype=torch.float16, device="meta")
    with pytest.raises(UsageError, match="too large"):
        checks.weight(packed, scales, None, 4, -1)


def test_a_stride_past_what_a_launch_hands_over_is_an_error() -> None:
    """Two long sequences' last tokens are so far apart: 262144 tokens of 8192 values."""

    def last(step: int) -> torch.Tensor:
        return torch.empty_strided((2, 64), (step, 1), dtype=torch.float16, device="meta")

    weight = torch.empty((4, 128), dtype=torch.int32, device="meta")
    checks.activations(last(2**31 - 8), 64, weight)
    with pytest.raises(UsageError, match="x has a stride") as told:
        checks.activations(last(2**31), 64, weight)
    assert told.value.expected == "(a multiple of 8 below 2147483648, 1)"
    checks.output(last(2**27 - 2), last(64), 64)
    with pytest.raises(UsageError, match="out has a stride"):
        checks.output(last(2**27), last(64), 64)
    quantize_checks.act(last(2**31), "none", "", Form(8, 1.0, 0, 64))  # its kernels take 64 bits


def test_a_dense_weight_is_half_or_bfloat16() -> None:
    checks.dense_dtype(torch.bfloat16)
    with pytest.raises(UsageError, match="dtype"):
        checks.dense_dtype(torch.float32)


def test_a_meta_tensor_among_others_is_refused() -> None:
    """Else the operator's shape function would answer, with memory that nobody wrote."""

    w = torch.zeros((4, 128), dtype=torch.int32)
    s, x = torch.ones((1, 64), dtype=torch.float16), torch.ones((1, 64), dtype=torch.float16)
    for given in ((x, w.to("meta"), s), (x, w, s.to("meta")), (x.to("meta"), w, s)):
        with pytest.raises(UsageError, match="different devices"):
            ops.gemm(*given, None, None, 4, 64)
    assert ops.gemm(x.to("meta"), w.to("meta"), s.to("meta"), None, None, 4, 64).shape == (1, 64)


def test_operators_on_a_cpu_refuse_what_those_on_a_card_do() -> None:

    w, s = torch.zeros((4, 128), dtype=torch.int32), torch.ones((1, 64), dtype=torch.float16)
    for dtype in (torch.int32, torch.float32):
        with pytest.raises(UsageError):
            ops.dequantize(w, s, None, 4, 64, dtype)
    with pytest.raises(UsageError, match="two-dimensional"):
        ops.gather(torch.ones(64, dtype=torch.float16), torch.arange(64, dtype=torch.int32), 64)
