"""Quantizing on a card: one graph chooses what single operations do, words are the CPU's, sums are exact."""

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from w4pack.convert.core.scheme import QuantScheme  # noqa: E402
from w4pack.convert.quantize import gptq, grids, linears  # noqa: E402
from w4pack.convert.quantize.hessian import Statistics  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def drawn(features: int, outputs: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights (K, N) and inputs (2048, K) with a few large channels, on the card."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(2048, features, generator=generator)
    inputs[:, ::17] *= 8
    inputs += 0.5 * inputs.roll(1, 1)
    return torch.randn(features, outputs, generator=generator).cuda() * 0.02, inputs.cuda()


def solved(features: int, outputs: int, group: int) -> torch.Tensor:
    weights, inputs = drawn(features, outputs)
    found = gptq.factored(inputs.T @ inputs / 2048, 0.03)
    assert found is not None
    scheme = QuantScheme(4, group, True, False, features, outputs, "F16")
    grid = grids.search(weights, scheme, found.importance())
    return gptq.solve(weights, found, grid, scheme).codes


@pytest.mark.parametrize(("features", "outputs", "group"), [(256, 96, 64), (200, 33, -1), (1536, 576, 64)])
def test_a_block_as_a_graph_chooses_what_single_operations_do(
    features: int, outputs: int, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Plainly:
        def run(self, block: Any, codes: torch.Tensor, errors: torch.Tensor) -> None:
            block.choose(codes, errors, 15)

    graph = solved(features, outputs, group)
    again = solved(features, outputs, group)  # the graph is replayed, its buffers hold the last block
    monkeypatch.setattr(gptq, "captured", lambda *shape: Plainly())
    assert torch.equal(graph, solved(features, outputs, group))
    assert torch.equal(graph, again)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [64, 100])
def test_words_are_those_of_the_cpu(bits: int, rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    codes = torch.randint(0, 1 << bits, (rows, 48), generator=generator).to(torch.uint8)
    assert np.array_equal(linears.words_of(codes.cuda(), bits), linears.words_of(codes, bits))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_of_16_bit_inputs_are_those_of_float64(dtype: torch.dtype) -> None:
    _, inputs = drawn(384, 8)
    source = inputs.to(dtype)
    seen = (inputs + 0.01 * drawn(384, 8, seed=1)[1]).to(dtype)
    statistics = Statistics(384, inputs.device, shifted=True)
    for part in range(0, 2048, 512):
        statistics.add(seen[part : part + 512], source[part : part + 512])
    wanted = seen.double().T @ seen.double() / 2048
    assert torch.allclose(statistics.hessian().double(), wanted, rtol=1e-4, atol=1e-4 * float(wanted.max()))
    shift, exact = statistics.mean_shift(), (source.double() - seen.double()).T @ seen.double() / 2048
    assert shift is not None  # its factor on the left is rounded to 16 bit
    assert float((shift - exact).abs().max()) < 4e-3 * float(exact.abs().max())
