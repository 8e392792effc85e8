"""The converter and the card: ``convert --device cuda`` writes the CPU's files, and dequantizing agrees."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402

import checkpoints  # noqa: E402
import runner  # noqa: E402
from w4pack.convert import convert  # noqa: E402
from w4pack.convert.core.tiles import pack_tiles  # noqa: E402
from w4pack.convert.errors import Refused, SourceError  # noqa: E402
from w4pack.convert.jobs.running import Running  # noqa: E402
from w4pack.kernels import linears, ops, transfer  # noqa: E402
from w4pack.kernels.artifact import open_artifact  # noqa: E402
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


DEQUANTIZED = (
    "autoawq-gemm-w4g64-skip-llama",
    "gptqmodel-w4g32-asym-desc-qwen2",
    "gptqmodel-w4g32-sym-qwen3moe",
    "gptqmodel-w4gm1-offtile-llama",
    "gptqmodel-w8g32-asym-desc-llama",
    "llmcompressor-mixed-groups-llama",
)


@pytest.mark.parametrize("name", DEQUANTIZED)
def test_the_card_dequantizes_to_what_the_converter_writes(name: str, tmp_path: Path) -> None:
    """Bit for bit: products of a code and a scale are exact in fp32, and rounded once by both."""
    dense_on(name, tmp_path, "cuda")


def dense_on(name: str, place: Path, device: str) -> None:
    convert(checkpoints.lay_out(name, place / "source"), place / "out")
    convert(place / "source", place / "dense", to="dense", dtype="float16")
    wanted = {k: v for file in (place / "dense").glob("*.safetensors") for k, v in load_file(file).items()}
    artifact = open_artifact(place / "out")
    for module, spec in artifact.specs.items():
        found = transfer.load_tensors(artifact, linears.alone(artifact, module), device)
        zeros = found.get("weight_zero_point")
        arguments = (found["weight"], found["weight_scale"], zeros, spec.bits, spec.group_size)
        dense = ops.dequantize(*arguments, torch.float16).cpu()
        assert not dense[spec.out_features :].any() and not dense[:, spec.in_features :].any(), module
        rows = dense[: spec.out_features, : spec.in_features]
        if "act_perm" in found:
            rows = rows[:, found["act_perm"].cpu().long().argsort()]
        assert torch.equal(rows, wanted[f"{module}.weight"]), module
