"""``convert --device cuda``: every checkpoint becomes the same files as on the CPU."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import checkpoints  # noqa: E402
import runner  # noqa: E402
from w4pack.convert import convert  # noqa: E402
from w4pack.convert.core.tiles import pack_tiles  # noqa: E402
from w4pack.convert.errors import Refused, SourceError  # noqa: E402
from w4pack.convert.jobs.conversion import Running  # noqa: E402
from w4pack.kernels.packing import packer_on  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def hashes(folder: Path) -> dict[str, str]:
    """The sha256 of every file."""
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir() if p.is_file()}


@pytest.mark.parametrize("name", checkpoints.names())
def test_every_checkpoint_becomes_the_same_files(name: str, tmp_path: Path) -> None:
    source = checkpoints.lay_out(name, tmp_path / "source")
    try:
        convert(source, tmp_path / "cpu")
    except (Refused, SourceError) as err:
        pytest.skip(f"cannot become an artifact: {err.what}")
    packer = packer_on("cuda")
    assert packer is not None
    report = convert(source, tmp_path / "cuda", running=Running(threads=4, packer=packer))
    assert report.packed_on == "cuda:0"
    assert hashes(tmp_path / "cpu") == hashes(tmp_path / "cuda")


def test_the_command_says_which_card_packed(demo: Path, tmp_path: Path) -> None:
    done = runner.convert(demo, tmp_path / "out", "marlin", "--device", "cuda", "--verify").expect(0)
    assert done.events[-1]["packed_on"] == f"cuda:{torch.cuda.current_device()}"


@pytest.mark.parametrize("bits", [4, 8])
def test_blocks_as_large_as_a_conversion_makes(bits: int) -> None:
    words = np.random.default_rng(bits).integers(0, 2**32, (4096 * bits // 32, 2048), np.uint32)
    packer = packer_on("cuda")
    assert packer is not None
    assert np.array_equal(packer(words, bits), pack_tiles(words, bits))


def test_a_quantized_output_is_packed_there_too(tmp_path: Path) -> None:
    """Codes are chosen on the card both times; the packer alone differs."""
    pytest.importorskip("transformers")
    from quantize import sources
    from w4pack.convert.planning.quantize_options import QuantizeOptions

    source = sources.save(sources.llama(), tmp_path / "source")
    asked = QuantizeOptions("rtn", group_size=32)
    convert(source, tmp_path / "cpu", quantize=asked, running=Running(device="cuda"))
    report = convert(
        source, tmp_path / "cuda", quantize=asked, running=Running(device="cuda", packer=packer_on("cuda"))
    )
    assert report.packed_on == "cuda:0"
    assert hashes(tmp_path / "cpu") == hashes(tmp_path / "cuda")
