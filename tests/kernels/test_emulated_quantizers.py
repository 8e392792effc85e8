"""Quantizers and transforms run on a CPU from their own source, against their definition in fp64."""

import itertools

import pytest

torch = pytest.importorskip("torch")

import emulated  # noqa: E402

from w4pack.kernels.quarot import calls, orders_int, quantize_ops, quantize_reference  # noqa: E402
from w4pack.kernels.quarot.transform import Transform, apply  # noqa: E402

pytestmark = pytest.mark.skipif(emulated.COMPILER is None, reason="needs a C++ compiler")

# Sums in another order differ by some ulp of fp32: codes differ at ties. Behind an activation a few values
# are rounded the other way, by a step of 16 bit, which the transform spreads over the row.
TIES, SCALE = 1e-4, 4e-6
ACTIVATED_TIES, ACTIVATED_SCALE = 2e-3, 2.0**-9
MODES = ((4, 0.9, orders_int.P32), (8, 1.0, orders_int.Q32), (4, 0.8, orders_int.S64), (16, 1.0, 0))
HEADS = [*itertools.product((8, 12, 28, 32, 40, 64), (64, 128)), (16, 256)]


def normal(m: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(m + k))
    x[:, :: max(1, k // 7)] *= 20  # outliers, as activations have them
    return emulated.aligned(x.to(dtype))


def compare(
    found: quantize_ops.Made, y: torch.Tensor, dtype: torch.dtype, form: calls.Form, loose: bool
) -> None:
    """Check codes and scales against those of y."""
    wanted = quantize_reference.codes(y.float(), dtype, *form)
    if form.bits == 16:
        step = (4 if loose else 2) * torch.finfo(dtype).eps
        torch.testing.assert_close(found[0].float(), wanted[0].float(), rtol=step, atol=step)
        return
    torch.testing.assert_close(found[1], wanted[1], rtol=ACTIVATED_SCALE if loose else SCALE, atol=0)
    a, b = (orders_int.natural(codes, form.order).int() for codes in (found[0], wanted[0]))
    assert int((a - b).abs().max()) <= 1
    off = int((a != b).sum())
    assert off <= max((ACTIVATED_TIES if loose else TIES) * a.numel(), 2), off


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("k", [72, 1000, 4104, 5120, 7176, 12288, 16384])
def test_rows_without_a_transform(arch: str, k: int) -> None:
    width = -(-k // 64) * 64
    for seed, mode in enumerate(MODES):
        dtype = (torch.float16, torch.bfloat16)[seed % 2]
        x, form = normal(9, 2 * k, dtype), calls.Form(*mode, width)
        gain = (
            None
            if seed == 0
            else emulated.aligned(torch.rand(k).add(0.5).to((dtype, torch.float32)[seed % 2]))
        )
        with emulated.machine(arch, late=bool(seed // 2), seed=seed, multiprocessors=1) as card:
            normed = quantize_ops._norm_cuda(x[:, :k], gain, 1e-6, "", form)
            activated = quantize_ops._act_cuda(x, "silu", "", form)
        assert all(name.startswith("quantize_") for name in card.started), card.started
        y = quantize_reference.norm(x[:, :k].double(), None, 1e-6, Transform.of(""))
        compare(normed, y if gain is None else y * gain.double(), dtype, form, False)
        compare(activated, quantize_reference.activation(x, "silu").double(), dtype, form, True)


@pytest.mark.parametrize("arch", ["sm_80", "sm_120"])  # a block's shared memory differs
@pytest.mark.parametrize("n", [1536, 4096, 5120, 8192, 11008, 14336, 18944, 576, 896, 13824])
def test_transforms(arch: str, n: int) -> None:
    """Dense forms, and the general kernel for what has none."""
    transform = Transform.planned(n)
    for seed, mode in enumerate(MODES[:3]):
        dtype, form = (torch.float16, torch.bfloat16)[seed % 2], calls.Form(*mode, n)
        x = normal(7 if seed == 0 else 2, 2 * n, dtype)
        with emulated.machine(arch, late=seed != 1, seed=seed, multiprocessors=1) as card:
            plain = quantize_ops._act_cuda(emulated.aligned(x[:, :n]), "none", transform.key, form)
            activated = quantize_ops._act_cuda(x, "gelu_tanh", transform.key, form)
            normed = quantize_ops._norm_cuda(emulated.aligned(x[:, :n]), None, 1e-5, transform.key, form)
        assert all(name.startswith("hadamard_") for name in card.started), card.started
        compare(plain, apply(x[:, :n].double(), transform), dtype, form, False)
        d = quantize_reference.activation(x, "gelu_tanh").double()
        compare(activated, apply(d, transform), dtype, form, True)
        rms = (x[:, :n].double().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        compare(normed, apply(x[:, :n].double() * rms, transform), dtype, form, False)


@pytest.mark.parametrize(("heads", "size"), HEADS)
def test_transforms_across_heads(heads: int, size: int) -> None:
    transform, k = Transform.planned(heads), heads * size
    for seed, mode in enumerate(MODES[:2]):
        dtype, form = (torch.float16, torch.bfloat16)[seed % 2], calls.Form(*mode, k)
        x = normal(3, k, dtype)
        with emulated.machine("sm_80", late=bool(seed % 2), seed=seed):
            found = quantize_ops._heads_cuda(x, heads, transform.key, form)
        y = apply(x.double().reshape(3, heads, size), transform, 1).reshape(3, k)
        compare(found, y, dtype, form, False)
