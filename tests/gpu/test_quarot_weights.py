"""On a card: what reaches a norm's weight or a guide of keys is in the next pass, and in the next replay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import StaticCache  # noqa: E402

import w4pack  # noqa: E402
from gpu.graphs import captured  # noqa: E402
from runtime import quarot_models as models  # noqa: E402
from runtime import quarot_reference as fake  # noqa: E402
from w4pack.convert.source.online_places import GUIDE  # noqa: E402
from w4pack.kernels.quarot import quantize_ops  # noqa: E402
from w4pack.kernels.quarot.norms import FusedNorm  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

K = 4096


def values(seed: int) -> Any:
    return torch.rand(K, generator=torch.Generator().manual_seed(seed)) + 0.5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("plus_one", [False, True])
def test_a_graph_reads_what_a_norm_s_weight_has_become(plus_one: bool, dtype: Any) -> None:
    norm = FusedNorm(torch.nn.Parameter(values(0).to(dtype), requires_grad=False), 1e-6, plus_one=plus_one)
    norm.cuda()
    x = torch.randn(3, K, device="cuda", dtype=dtype)

    def codes(gain: Any) -> Any:
        return quantize_ops.norm_quantize(x, gain, norm.eps, "", 8, 0.9, 1, K)

    graph, found = captured(lambda: codes(norm.gain()))
    for seed in (1, 2):
        if seed == 1:
            norm.load_state_dict({"weight": values(seed).to(dtype)})
        else:
            with torch.no_grad():
                norm.weight.copy_(values(seed))
            norm.gain()  # a pass
        graph.replay()
        wanted = codes(norm.weight.float() + float(plus_one))
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(codes(norm.gain()), wanted, strict=True))


@pytest.mark.parametrize("plus_one", [False, True])
def test_ones_are_left_out_of_a_launch_and_nothing_else_is(plus_one: bool) -> None:
    ones = torch.full((K,), 1.0 - plus_one).half()
    norm = FusedNorm(torch.nn.Parameter(ones, requires_grad=False), 1e-6, plus_one=plus_one).cuda()
    assert norm.gain() is None and norm.bfloat16().gain() is None
    with torch.no_grad():
        norm.weight.copy_(values(1))
    assert torch.equal(norm.gain().float(), norm.weight.float() + float(plus_one))


def test_a_capture_that_follows_a_change_at_once_is_right() -> None:
    norm = FusedNorm(torch.nn.Parameter(values(0).half(), requires_grad=False), 1e-6, plus_one=True).cuda()
    with torch.no_grad():
        norm.weight.copy_(values(1))
    graph, found = captured(norm.gain, warm_ups=0)
    graph.replay()
    assert torch.equal(found, norm.weight.float() + 1)


def test_a_graph_reads_what_a_guide_has_become(tmp_path: Path) -> None:
    model = w4pack.load(models.artifact("qwen3", tmp_path, offset=1.0), "cuda")
    tokens = torch.randint(3, 256, (2, 20), generator=torch.Generator().manual_seed(0)).cuda()
    token = torch.full((2, 1), 9, device="cuda")

    def step(cache: Any, given: Any = token) -> Any:
        with torch.no_grad():
            return model(given, use_cache=True, **{fake.CACHE: cache}).logits

    def prefilled() -> Any:
        cache = StaticCache(model.config, 64)
        step(cache, tokens)
        return cache

    before, eager, cache, warm = (prefilled() for _ in range(4))
    step(before)
    graph, found = captured(lambda: step(cache), warm=lambda: step(warm))
    changed = {n: t * 3 + 0.5 for n, t in model.state_dict().items() if n.endswith(GUIDE)}
    model.load_state_dict({**model.state_dict(), **changed})
    graph.replay()
    assert torch.equal(found, step(eager))
    for one, other, old in zip(cache.layers, eager.layers, before.layers, strict=True):
        keys, wanted, others = (layer.store.codes[:, 0, :, :21] for layer in (one, other, old))
        assert torch.equal(keys, wanted) and not torch.equal(keys, others)
