"""What w4pack made before is proved again before it is believed: a finished OUT, an output as a source."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from w4pack.convert import api
from w4pack.convert.errors import Refused, VerifyError
from w4pack.convert.files.checkpoint import open_checkpoint
from w4pack.convert.files.local import LocalStore
from w4pack.convert.jobs.conversion import Running

DEMO = Path(__file__).parents[2] / "examples" / "demo-gptq"
LAYER = "model.layers.0.mlp.down_proj"


def flip(folder: Path, tensor: str) -> None:
    """Change one bit of a tensor in place."""
    path = folder / "model.safetensors"
    with open_checkpoint(LocalStore(folder)) as checkpoint:
        at = checkpoint.tensors[tensor].offset + 5
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def junk(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("junk")


def weight(folder: Path) -> None:
    flip(folder, f"{LAYER}.weight")


def norm(folder: Path) -> None:
    flip(folder, "model.layers.0.input_layernorm.weight")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEMO, tmp_path / "src"))


@pytest.mark.parametrize("damage", [weight, norm, junk])
def test_damaged_artifact_is_no_source(source: Path, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    art, out = tmp_path / "art", tmp_path / "out"
    api.convert(source, art)
    damage(art)
    for target in ("marlin", "dense"):
        with pytest.raises(VerifyError, match="damaged"):
            api.convert(art, out, to=target)
    with pytest.raises(VerifyError, match="damaged"):
        api.unpack(art, out)
    assert not out.exists()


@pytest.mark.parametrize("damage", [weight, norm, junk])
def test_finished_output_is_hashed_again(
    source: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    out = tmp_path / "out"
    api.convert(source, out)
    assert api.convert(source, out, running=Running(resume=True)).was_complete
    damage(out)
    with pytest.raises(VerifyError, match="damaged"):
        api.convert(source, out, running=Running(resume=True))


@pytest.mark.parametrize("strict", [False, True])
def test_finished_output_of_another_source(source: Path, tmp_path: Path, strict: bool) -> None:
    out = tmp_path / "out"
    api.convert(source, out, running=Running(strict=strict))
    made = (out / "w4pack.json").stat().st_mtime_ns
    flip(source, f"{LAYER}.qweight")
    # with --strict the bytes decide, whatever the times say
    later = made + (0 if strict else 1_000_000_000)
    os.utime(source / "model.safetensors", ns=(later, later))
    with pytest.raises(Refused, match="source changed"):
        api.convert(source, out, running=Running(resume=True, strict=strict))


def test_equal_bytes_with_another_time_pass_strict(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    api.convert(source, out, running=Running(strict=True))
    later = (out / "w4pack.json").stat().st_mtime_ns + 1_000_000_000
    os.utime(source / "model.safetensors", ns=(later, later))
    assert api.convert(source, out, running=Running(resume=True, strict=True)).was_complete
