"""Quantizing on a card: one graph chooses what single operations do, words are the CPU's, sums are exact."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import save_file  # noqa: E402

from w4pack.convert.core.scheme import QuantScheme  # noqa: E402
from w4pack.convert.files.checkpoint import open_checkpoint  # noqa: E402
from w4pack.convert.files.local import LocalStore  # noqa: E402
from w4pack.convert.files.provider import CheckpointProvider  # noqa: E402
from w4pack.convert.files.twobuffers import TwoBuffers  # noqa: E402
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


@pytest.mark.parametrize("outputs", [96, 2048], ids=["by triangles", "in the cheapest order"])
def test_the_shift_moves_weights_as_float64_does(outputs: int) -> None:
    weights, inputs = drawn(512, outputs)
    found = gptq.factored(inputs.T @ inputs / 2048, 0.03)
    assert found is not None
    shift = 0.01 * drawn(512, 512, seed=2)[0]
    work = torch.zeros_like(weights)
    gptq._move(work, weights, shift, found.upper, 0.25)
    upper = found.upper.double()
    wanted = 0.25 * (upper.T @ (upper @ (shift.double().T @ weights.double())))
    assert float((work - wanted).abs().max()) < 1e-4 * float(wanted.abs().max())


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "behind other work"])
def test_a_tensor_comes_to_the_card_as_it_lies_in_the_file(busy: bool, tmp_path: Path) -> None:
    """Two buffers are filled while the card may be far behind: none is overwritten before it is fetched."""
    names = {"w": torch.bfloat16, "v": torch.float32, "empty": torch.float16}
    made = {"w": torch.randn(700, 1001).bfloat16(), "v": torch.randn(3, 5), "empty": torch.empty(0, 4).half()}
    save_file(made, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(LocalStore(tmp_path))
    provider = CheckpointProvider(checkpoint, torch.device("cuda"))
    provider._buffers = TwoBuffers(torch.device("cuda"), 1 << 16)
    other = torch.randn(8192, 8192, device="cuda")
    for name, dtype in names.items():
        for wanted in (None, torch.float32):
            for _ in range(20 * busy):
                other @ other
            got = provider.get(name, wanted)
            assert (got.device.type, got.dtype) == ("cuda", wanted or dtype)
            assert torch.equal(got.cpu(), made[name].to(wanted or dtype))
    checkpoint.close()


# ---- whole models ---------------------------------------------------------------------------------------

WORDS = ("--quantize", "gptq", "--group-size", "32", "--samples", "8", "--seqlen", "64", "--device", "cuda")


def command(*words: Any, processes: int = 1) -> subprocess.CompletedProcess[str]:
    """Run ``w4pack``, in several processes as torchrun starts them."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    start = [sys.executable, *(torchrun if processes > 1 else []), "-m", "w4pack", *map(str, words)]
    return subprocess.run(start, capture_output=True, text=True, timeout=300, env={**os.environ})


def layers_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "w4pack.json").read_text())["layers"]
    return found


@pytest.mark.parametrize("model", ["llama", "mixtral"])
@pytest.mark.parametrize("rotate", ["none", "offline"])
def test_f78_a_model_is_quantized_where_its_auxiliary_tensors_are(
    model: str, rotate: str, tmp_path: Path
) -> None:
    from quantize import sources

    source = sources.save(getattr(sources, model)(), tmp_path / "src", torch.bfloat16)
    text = sources.text(tmp_path / "book.txt")
    done = command("convert", source, tmp_path / "out", "--rotate", rotate, "--calibration", text, *WORDS)
    assert done.returncode == 0, done.stderr[-3000:]
    assert all(0 <= e["error"] <= e["rtn_error"] for e in layers_of(tmp_path / "out").values())


ALONE = """
from w4pack.convert.modeljobs import overlap
overlap.OVERLAPPED = ()
from w4pack.cli import main
main()
"""


@pytest.mark.parametrize("rotate", ["none", "offline"])
def test_threads_that_read_and_write_change_no_byte(rotate: str, tmp_path: Path) -> None:
    from quantize import sources

    source = sources.save(sources.llama(num_hidden_layers=5), tmp_path / "src", torch.bfloat16)
    text = sources.text(tmp_path / "book.txt")
    words = ("--rotate", rotate, "--calibration", text, *WORDS)
    done = command("convert", source, tmp_path / "threads", *words)
    assert done.returncode == 0, done.stderr[-3000:]
    alone = [sys.executable, "-c", ALONE, "convert", source, tmp_path / "alone", *words]
    done = subprocess.run([*map(str, alone)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for path in (tmp_path / "alone").iterdir():
        assert path.read_bytes() == (tmp_path / "threads" / path.name).read_bytes(), path.name


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
@pytest.mark.parametrize(
    ("online", "close"),
    [((), 0.1), (("--rotate", "full", "--act-bits", 4, "--kv-bits", 4), 0.25)],
    ids=["weights", "all-of-4-bit"],
)
def test_two_cards_choose_what_one_does_from_the_same_text(
    online: tuple[Any, ...], close: float, tmp_path: Path
) -> None:
    """Sums are added in another order, in batches of another size: few codes differ, no token is lost."""
    from quantize import sources

    source = sources.save(sources.llama(), tmp_path / "src", torch.bfloat16)
    text = sources.text(tmp_path / "book.txt")
    for processes in (1, 2):
        out = tmp_path / str(processes)
        done = command("convert", source, out, "--calibration", text, *WORDS, *online, processes=processes)
        assert done.returncode == 0, done.stderr[-3000:]
    one, two = (layers_of(tmp_path / str(n)) for n in (1, 2))
    assert {n: e["tokens"] for n, e in one.items()} == {n: e["tokens"] for n, e in two.items()}
    for name, entry in one.items():
        assert two[name]["error"] == pytest.approx(entry["error"], rel=close), name


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
def test_two_cards_end_when_the_leading_process_refuses(tmp_path: Path) -> None:
    """The other one waits in a collective call of the card: it must not wait for two hours."""
    from quantize import sources

    source = sources.save(sources.llama(), tmp_path / "src", torch.bfloat16)
    text = sources.text(tmp_path / "book.txt")
    words = ("--max-kl", "1e-9", "--calibration", text, *WORDS)
    done = command("convert", source, tmp_path / "out", *words, processes=2)
    assert done.returncode != 0 and "--max-kl" in done.stderr, done.stderr[-3000:]
    assert not (tmp_path / "out").exists()
