"""Tensors of files that are read late, on a card: large ones, two devices at once, changed as soon as copied.

``tests/plugin/test_lazy.py`` has every kind of view, on a card too.
"""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import save_file  # noqa: E402

from w4pack.kernels import transfer  # noqa: E402
from w4pack.kernels.chunks import CHUNK  # noqa: E402
from w4pack.kernels.vllm import lazy  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

ROWS, COLUMNS = 6000, 4096  # int32: 94 MiB, many staging buffers
Opened = tuple[lazy.Ledger, dict[str, lazy.FileTensor], dict[str, torch.Tensor]]


@pytest.fixture
def opened(tmp_path: Path) -> Opened:
    generator = torch.Generator().manual_seed(11)
    words = torch.randint(-(2**31), 2**31 - 1, (ROWS, COLUMNS), generator=generator)
    real = {"words": words.to(torch.int32), "half": torch.randn(512, 64, generator=generator).half()}
    save_file(real, tmp_path / "model.safetensors")
    tensors, files = transfer.file_tensors(tmp_path / "model.safetensors")
    ledger = lazy.Ledger(files)
    return ledger, dict(lazy.names(tensors, ledger)), real


@pytest.mark.parametrize("threads", [1, 4])
def test_slices_of_a_rank_arrive_in_fused_rows(opened: Opened, threads: int) -> None:
    """Columns beside columns of another part, as a rank fills a fused weight: many staging buffers."""
    ledger, files, real = opened
    assert ROWS * COLUMNS // 2 * 4 > CHUNK
    target = torch.full((ROWS, COLUMNS), 7, dtype=torch.int32, device="cuda")
    target[:, : COLUMNS // 2].copy_(files["words"].narrow(1, COLUMNS // 2, COLUMNS // 2))
    target[:100, COLUMNS // 2 :].copy_(files["words"][200:300, : COLUMNS // 2])
    torch.cuda.synchronize()
    assert bool((target == 7).all())  # nothing was read
    ledger.execute(threads)
    expected = torch.full((ROWS, COLUMNS), 7, dtype=torch.int32)
    expected[:, : COLUMNS // 2] = real["words"][:, COLUMNS // 2 :]
    expected[:100, COLUMNS // 2 :] = real["words"][200:300, : COLUMNS // 2]
    assert torch.equal(target.cpu(), expected)


def test_a_card_and_main_memory_are_filled_by_one_ledger(opened: Opened) -> None:
    ledger, files, real = opened
    card = torch.empty(ROWS // 2, COLUMNS, dtype=torch.int32, device="cuda")
    host = torch.empty(512, 64, dtype=torch.float16)
    card.copy_(files["words"][: ROWS // 2])
    host.copy_(files["half"])
    assert ledger.execute() == card.numel() * 4 + host.numel() * 2
    assert torch.equal(card.cpu(), real["words"][: ROWS // 2]) and torch.equal(host, real["half"])


def test_a_weight_that_is_changed_at_once_has_its_bytes_first(opened: Opened) -> None:
    """On a stream of its own: what was copied must be seen there."""
    ledger, files, real = opened
    target = torch.zeros(512, 64, dtype=torch.float16, device="cuda")
    torch.cuda.synchronize()  # the zeros are of another stream, which the one below does not wait for
    with torch.cuda.stream(torch.cuda.Stream()), lazy.Watch(ledger):
        target.copy_(files["half"])
        target.mul_(2)
    torch.cuda.synchronize()
    assert torch.equal(target.cpu(), real["half"] * 2)
    assert ledger.execute() == 0  # done


def test_a_copy_that_is_no_rectangle_is_read_at_once(opened: Opened) -> None:
    _, files, real = opened
    target = torch.empty(64, 512, dtype=torch.float32, device="cuda")
    target.copy_(files["half"].t())
    assert torch.equal(target.cpu(), real["half"].t().float())
