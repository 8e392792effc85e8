"""What w4pack made before is proved again before it is believed: a finished OUT, an output as a source."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from runner import run
from w4pack.convert import api
from w4pack.convert.errors import Refused, VerifyError
from w4pack.convert.files import checkpoint
from w4pack.convert.files.checkpoint import open_checkpoint
from w4pack.convert.files.local import LocalStore
from w4pack.convert.jobs import manifest
from w4pack.convert.jobs.running import Running

DEMO = Path(__file__).parents[2] / "examples" / "demo-gptq"
LAYER = "model.layers.0.mlp.down_proj"


def flip(folder: Path, tensor: str) -> None:
    """Change one bit of a tensor in place."""
    path = folder / "model.safetensors"
    with open_checkpoint(LocalStore(folder)) as opened:
        at = opened.tensors[tensor].offset + 5
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


def test_broken_order_is_damage_as_any_other(source: Path, tmp_path: Path) -> None:
    """A bit of act_perm that leaves no permutation breaks the parsing too; the manifest is asked first."""
    art, out = tmp_path / "art", tmp_path / "out"
    api.convert(source, art)
    flip(art, f"{LAYER}.act_perm")
    with pytest.raises(VerifyError, match="damaged") as told:
        api.unpack(art, out)
    assert told.value.where == f"{LAYER}.act_perm"
    for target in ("marlin", "gptq"):
        with pytest.raises(VerifyError, match="damaged"):
            api.convert(art, out, to=target)
    assert not out.exists()
    run("convert", art, out, "--dry-run").expect(4, "damaged", "act_perm")
    (art / "w4pack.json").unlink()  # nothing says any more what it was
    run("convert", art, out, "--dry-run").expect(1, "act_perm")


def other_codes(folder: Path) -> None:
    flip(folder, f"{LAYER}.qweight")


def other_scales(folder: Path) -> None:
    flip(folder, f"{LAYER}.scales")


def other_order(folder: Path) -> None:
    """Swap two rows of different groups: still a map, another model."""
    path = folder / "model.safetensors"
    with open_checkpoint(LocalStore(folder)) as checkpoint:
        at = checkpoint.tensors[f"{LAYER}.g_idx"].offset
        groups = checkpoint.read(f"{LAYER}.g_idx")
    row = int((groups != groups[0]).argmax())
    groups[[0, row]] = groups[[row, 0]]
    data = bytearray(path.read_bytes())
    data[at : at + groups.nbytes] = groups.tobytes()
    path.write_bytes(data)


def other_settings(folder: Path) -> None:
    (folder / "generation_config.json").write_text("{}")


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("to", ["marlin", "dense"])
@pytest.mark.parametrize("change", [other_codes, other_scales, other_order, norm, junk, other_settings])
def test_finished_output_of_another_source(
    change: Callable[[Path], None], to: str, strict: bool, older: bool, source: Path, tmp_path: Path
) -> None:
    """Bytes decide, whatever the times of the files say."""
    out = tmp_path / "out"
    api.convert(source, out, to=to, running=Running(strict=strict))
    change(source)
    aside = -3600 if older else 3600
    for file in source.iterdir():
        when = (out / "w4pack.json").stat().st_mtime + aside
        os.utime(file, (when, when))
    with pytest.raises(Refused, match="source changed"):
        api.convert(source, out, to=to, running=Running(resume=True, strict=strict))


@pytest.mark.parametrize("strict", [(False, False), (False, True), (True, False), (True, True)])
def test_equal_bytes_with_another_time_pass(source: Path, tmp_path: Path, strict: tuple[bool, bool]) -> None:
    out = tmp_path / "out"
    api.convert(source, out, running=Running(strict=strict[0]))
    later = (out / "w4pack.json").stat().st_mtime_ns + 1_000_000_000
    os.utime(source / "model.safetensors", ns=(later, later))
    assert api.convert(source, out, running=Running(resume=True, strict=strict[1])).was_complete


def test_the_manifest_of_a_source_is_read_once(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is proved and what goes into the new manifest are one reading."""
    art, read, reads = tmp_path / "art", checkpoint.read_manifest, []
    api.convert(source, art)
    monkeypatch.setattr(checkpoint, "read_manifest", lambda store: reads.append(store) or read(store))
    api.convert(art, tmp_path / "out")
    assert len(reads) == 1
    assert manifest.load(tmp_path / "out")["original"] == manifest.load(art)["source"]
