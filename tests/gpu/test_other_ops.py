"""Gather, dequantize, repack on a card; ways of calling: graphs, streams, compile, wrong arguments."""

import threading
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from gpu import cases  # noqa: E402
from gpu.graphs import captured  # noqa: E402
from w4pack.convert.errors import UsageError  # noqa: E402
from w4pack.kernels import reference  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_dequantize_equals_the_reference_bit_for_bit(bits: int, zeros: bool, dtype: torch.dtype) -> None:
    from w4pack.kernels import ops

    for k, n, group in ((64, 64, 32), (192, 320, 128), (320, 64, 64), (2752, 192, -1)):
        c = cases.make(1, k, n, bits, group, zeros=zeros, dtype=dtype, seed=k)
        found = ops.dequantize(c.weight, c.scales, c.zeros, bits, group, dtype)
        assert torch.equal(found, reference.dequantize(c.weight, c.scales, c.zeros, bits, group, dtype)), (
            k,
            n,
        )


@pytest.mark.parametrize("m", [1, 5, 4100])
def test_gather_takes_columns_and_pads_with_zeros(m: int) -> None:
    from w4pack.kernels import ops

    for k, width in ((64, 64), (200, 256), (4096, 4096), (11000, 11008)):
        x = torch.randn(m, k, device="cuda").half()
        perm = torch.randperm(k, device="cuda").int()
        assert torch.equal(ops.gather(x, perm, width), reference.gather(x, perm, width)), (m, k)


@pytest.mark.parametrize("m", [3, 200])
def test_the_first_work_of_a_thread_may_be_a_product(m: int) -> None:
    from w4pack.kernels import ops

    c, found = cases.make(m, 512, 256), []
    thread = threading.Thread(target=lambda: found.append(ops.gemm(*c.arguments)))
    thread.start()
    thread.join()
    assert torch.equal(found[0], ops.gemm(*c.arguments))


@pytest.mark.parametrize("bits", [4, 8])
def test_repack_equals_the_reference(bits: int) -> None:
    from w4pack.kernels import ops

    g = torch.Generator(device="cuda").manual_seed(bits)
    for k, n in ((16, 64), (512, 320), (2048, 1024)):
        words = cases.random_words((k * bits // 32, n), "cuda", g)
        perm = torch.randperm(k, device="cuda").int()
        for order in (None, perm):
            assert torch.equal(ops.repack(words, order, bits), reference.repack(words, order, bits)), (k, n)


@pytest.mark.shared
def test_repack_equals_the_engines(shared: Path) -> None:
    from safetensors.torch import load_file

    from w4pack.kernels import ops

    golden = load_file(shared / "fixtures" / "golden" / "repack.safetensors")
    names = [key.removesuffix(".gptq_qweight") for key in golden if key.endswith(".gptq_qweight")]
    for name in names:
        words, perm = golden[f"{name}.gptq_qweight"], golden.get(f"{name}.act_perm")
        wanted = golden[f"{name}.marlin_qweight"]
        bits = wanted.shape[1] * 2 // words.shape[1]
        found = ops.repack(words.cuda(), None if perm is None else perm.int().cuda(), bits)
        assert torch.equal(found.cpu(), wanted), name
    assert len(names) > 20


def test_a_graph_replays_what_eager_computes() -> None:
    from w4pack.kernels import ops

    ops.prepare(0)
    for m in (1, 16, 64, 300):
        case = cases.make(m, 1024, 4096, seed=m, bias=True)
        eager = ops.gemm(*case.arguments)
        graph, (out, again) = captured(lambda given=case.arguments: [ops.gemm(*given) for _ in range(2)])
        for _ in range(50):
            case.x.normal_()
            wanted = ops.gemm(*case.arguments)
            torch.empty(1 << 20, device="cuda").fill_(float("nan"))
            graph.replay()
            assert torch.equal(out, wanted) and torch.equal(again, wanted), m
        assert eager.shape == out.shape


def test_any_stream() -> None:
    from w4pack.kernels import ops

    case = cases.make(16, 2048, 1024)
    wanted = ops.gemm(*case.arguments)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        found = ops.gemm(*case.arguments)
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(found, wanted)


def test_compile_without_a_graph_break() -> None:
    from w4pack.kernels import ops

    case = cases.make(4, 512, 256)

    def model(x: torch.Tensor) -> torch.Tensor:
        return ops.gemm(x * 2, *case.arguments[1:]) + 1

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(case.x), model(case.x))


def test_opcheck() -> None:
    from w4pack.kernels import ops

    case = cases.make(4, 512, 256, zeros=True, bias=True)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.gemm, case.arguments, test_utils=tests)
    out = torch.empty(4, 256, dtype=torch.float16, device="cuda")
    torch.library.opcheck(ops.gemm_out, (*case.arguments, out), test_utils=tests)
    torch.library.opcheck(
        ops.gather, (case.x, torch.randperm(512, device="cuda").int(), 512), test_utils=tests
    )
    dense = (case.weight, case.scales, case.zeros, 4, 128, torch.float16)
    torch.library.opcheck(ops.dequantize, dense, test_utils=tests)


def test_wrong_arguments_never_reach_the_card() -> None:
    from w4pack.kernels import ops

    case = cases.make(4, 512, 256)
    with pytest.raises(UsageError, match="different devices"):
        ops.gemm(case.x, case.weight, case.scales.cpu(), None, None, 4, 128)
    with pytest.raises(UsageError, match="group size"):
        ops.gemm(case.x, case.weight, case.scales, None, None, 4, 96)
    with pytest.raises(UsageError, match="dtype"):
        ops.gemm(case.x.float(), case.weight, case.scales, None, None, 4, 128)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
def test_a_second_card() -> None:
    from w4pack.kernels import ops

    case = cases.make(16, 512, 256, device="cuda:1")
    assert cases.error(ops.gemm(*case.arguments), case.exact) < cases.BOUND[torch.float16]
    assert torch.cuda.current_device() == 0
