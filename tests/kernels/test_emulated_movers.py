"""Gather, dequantize and repack run on a CPU from their own source: the bits of their definition."""

import itertools

import pytest

torch = pytest.importorskip("torch")

import emulated  # noqa: E402

from w4pack.kernels import gather_launch, ops, reference  # noqa: E402
from w4pack.kernels.arguments import Packed  # noqa: E402

pytestmark = pytest.mark.skipif(emulated.COMPILER is None, reason="needs a C++ compiler")


def random_words(*shape: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(sum(shape))
    return emulated.aligned(torch.randint(-(2**31), 2**31, shape, generator=g).to(torch.int32))


@pytest.mark.parametrize(
    ("m", "k", "width"), [(5, 200, 256), (40, 136, 136), (3, 5000, 5056), (2, 60000, 60032)]
)
def test_gather(m: int, k: int, width: int) -> None:
    """Rows that shared memory holds, and longer ones; one order for all rows, and one for each expert's."""
    g = torch.Generator().manual_seed(k)
    x = emulated.aligned(torch.randn((m, k), generator=g).half())
    perms = emulated.aligned(torch.stack([torch.randperm(k, generator=g) for _ in range(3)]).int())
    rows = emulated.aligned(torch.randint(0, m, (m + 1,), generator=g).int())
    offsets = emulated.aligned(torch.tensor([0, 2, 2, m + 1], dtype=torch.int32))
    one, each = (torch.full((count, width), float("nan")).half() for count in (m, m + 1))
    with emulated.machine("sm_80", late=True, seed=m) as card:
        gather_launch.run(card, 0, x, perms[0], one)  # type: ignore[arg-type]
        gather_launch.run(card, 0, x, perms, each, rows, offsets)  # type: ignore[arg-type]
    assert torch.equal(one, reference.gather(x, perms[0], width))
    for e, (begin, end) in enumerate(itertools.pairwise(offsets.tolist())):
        assert torch.equal(each[begin:end], reference.gather(x[rows[begin:end].long()], perms[e], width))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64, 128, -1])
def test_dequantize(bits: int, group: int) -> None:
    """The weight, rounded once, with zero points and without."""
    k, n = 320, 192
    groups = 1 if group == -1 else -(-k // group)
    words, zeros = random_words(k // 16, n * bits // 2), random_words(groups, n * bits // 32)
    for dtype, scale_dtype in itertools.product((torch.float16, torch.bfloat16), repeat=2):
        scales = emulated.aligned(
            torch.rand((groups, n), generator=torch.Generator().manual_seed(groups))
            .mul(0.01)
            .add(0.005)
            .to(scale_dtype)
        )
        for given in (None, zeros):
            packed = Packed(words, scales, given, bits, group)
            with emulated.machine("sm_80", late=False, seed=group):
                found = ops._dequantize_cuda(packed, dtype)
            assert torch.equal(found, reference.dequantize(*packed, dtype))


@pytest.mark.parametrize("bits", [4, 8])
def test_repack(bits: int) -> None:
    k, n = 96, 128
    words = random_words(k * bits // 32, n)
    perm = emulated.aligned(torch.randperm(k, generator=torch.Generator().manual_seed(bits)).int())
    for order in (None, perm):
        with emulated.machine("sm_80", late=False, seed=bits):
            found = ops._repack_cuda(words, order, bits)
        assert torch.equal(found, reference.repack(words, order, bits))
