"""What a grouped product is launched with: seen where the launch would begin."""

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from w4pack.kernels import launch, moe_launch  # noqa: E402
from w4pack.kernels.arguments import Packed  # noqa: E402


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Entries in the order of their launches, on a card of sm_90a that is not there."""
    entries: list[str] = []
    space = SimpleNamespace(sums=0, flags=0)
    card = SimpleNamespace(arch="sm_90a", multiprocessors=132, workspace=lambda stream: space, index=-1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    monkeypatch.setattr(launch, "device", lambda index: card)
    monkeypatch.setattr(launch, "start", lambda card, entry, *rest: entries.append(entry))
    monkeypatch.setattr(moe_launch, "current_stream", lambda index: 0)
    return entries


@pytest.mark.parametrize(("zeros", "tile"), [(False, "sym_wgmma_t80w12"), (True, "zp_wgmma_t80w8")])
def test_weights_with_zero_points_have_their_own_tiles(zeros: bool, tile: str, launched: list[str]) -> None:
    experts, k, n, pairs = 2, 128, 256, 128
    words: Any = torch.zeros((experts, k // 16, n * 2), dtype=torch.int32)
    scales = torch.ones((experts, 1, n), dtype=torch.float16)
    points = torch.zeros((experts, 1, n // 8), dtype=torch.int32) if zeros else None
    x, out = torch.ones((4, k), dtype=torch.float16), torch.empty((pairs, n), dtype=torch.float16)
    rows, offsets = torch.zeros(pairs, dtype=torch.int32), torch.tensor([0, 64, 128], dtype=torch.int32)
    moe_launch.run_gemm(x, Packed(words, scales, points, 4, 128), rows, offsets, out)
    assert len(launched) == 1 and launched[0].startswith(f"moe_fp16_b4_{tile}")
