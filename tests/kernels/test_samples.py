"""Tensors that were exchanged are found by a sample; what is right in another form is not refused."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from artifacts import write_artifact  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

import checkpoints  # noqa: E402
from w4pack.convert import convert  # noqa: E402
from w4pack.convert.errors import EXIT_VERIFY, SourceError, VerifyError  # noqa: E402
from w4pack.convert.files import samples  # noqa: E402
from w4pack.kernels import hashes, transfer  # noqa: E402
from w4pack.kernels.artifact import open_artifact  # noqa: E402
from w4pack.kernels.placement import rest  # noqa: E402
from w4pack.kernels.spec import LinearSpec  # noqa: E402

Tensors = dict[str, torch.Tensor]
SPECS = {name: LinearSpec(256, 128, group_size=32) for name in ("a", "b", "c")}
W = {name: f"{name}.weight" for name in SPECS}


@pytest.mark.parametrize("size", [0, 1, 511, 512, 513, 514, 20000])
def test_the_digest_is_of_half_a_kilobyte_in_the_middle(size: int) -> None:
    data = bytes(range(256)) * 100
    read: list[int] = []

    def reader(offset: int, length: int) -> bytes:
        read.append(length)
        return data[offset : offset + length]

    held = data[100 : 100 + size]
    while len(held) > 512:
        held = held[:-1] if len(held) % 2 else held[1:]  # an odd byte is left at the end
    assert samples.digest(reader, 100, size) == hashlib.sha256(held).hexdigest()[:16]
    assert read == [min(size, 512)]


def changed(folder: Path, edit: Callable[[Tensors], Tensors]) -> None:
    """Change the tensors of an artifact, not its manifest."""
    tensors = load_file(folder / "model.safetensors")
    save_file({k: v.contiguous() for k, v in edit(tensors).items()}, folder / "model.safetensors")


def same(found: Tensors, wanted: Tensors) -> bool:
    """Compare bytes: random scales may be no numbers."""
    return all(torch.equal(found[n].view(torch.uint8), t.view(torch.uint8)) for n, t in wanted.items())


def load(folder: Path) -> Tensors:
    """Load all of an artifact."""
    artifact = open_artifact(folder)
    return transfer.load_tensors(artifact, rest(artifact.tensors, ()), "cpu")


EXCHANGES: dict[str, dict[str, str]] = {  # tensor -> whose bytes it gets
    "two": {"a": "b", "b": "a"},
    "a circle": {"a": "b", "b": "c", "c": "a"},
    "a copy": {"a": "c"},
}


@pytest.mark.parametrize("suffix", ["weight", "weight_scale"])
@pytest.mark.parametrize("what", EXCHANGES)
def test_exchanged_tensors_are_named(tmp_path: Path, what: str, suffix: str) -> None:
    write_artifact(tmp_path, SPECS)
    load(tmp_path)
    moves = EXCHANGES[what]
    changed(tmp_path, lambda t: t | {f"{n}.{suffix}": t[f"{m}.{suffix}"].clone() for n, m in moves.items()})
    with pytest.raises(VerifyError) as caught:
        load(tmp_path)
    problems = caught.value.problems or (caught.value,)
    told = {(p.code, p.where, p.found) for p in problems}
    where = "model.safetensors, {}." + suffix
    assert told == {("tensor-exchanged", where.format(n), f"those of {m}.{suffix}") for n, m in moves.items()}
    assert problems[0].hint == f"w4pack verify {tmp_path}"
    assert {p.exit_code for p in (caught.value, *problems)} == {EXIT_VERIFY}
    text = str(caught.value)
    assert text.count("model.safetensors") == 1
    assert all(f"{n}.{suffix}" in text and f"{m}.{suffix}" in text for n, m in moves.items())
    if what == "two":
        assert f"found: those of b.{suffix} in a.{suffix}, a.{suffix} in b.{suffix}" in text


def test_no_more_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_artifact(tmp_path, {"a": LinearSpec(4096, 1024, group_size=128)})
    artifact = open_artifact(tmp_path)
    read: list[int] = []
    real = hashes.WeightFile.read
    monkeypatch.setattr(
        hashes.WeightFile, "read", lambda file, at, length: read.append(length) or real(file, at, length)
    )
    hashes.check_samples(artifact)
    sizes = [info.nbytes for info in artifact.tensors.values()]
    assert sum(read) == sum(min(size, 512) for size in sizes) < sum(sizes) // 1000


def same_bytes(t: Tensors) -> Tensors:
    """Leave everything as it is, in another order in the file."""
    return dict(reversed(t.items()))


def edited(t: Tensors) -> Tensors:
    """Change a tensor to one that was never written: every bit pattern of it is another."""
    return t | {W["a"]: t[W["a"]] ^ 1}


@pytest.mark.parametrize("edit", [same_bytes, edited])
def test_what_was_not_exchanged_is_loaded(tmp_path: Path, edit: Callable[[Tensors], Tensors]) -> None:
    write_artifact(tmp_path, SPECS)
    changed(tmp_path, edit)
    assert same(load(tmp_path), load_file(tmp_path / "model.safetensors"))
    told = hashes.check_samples(open_artifact(tmp_path))
    assert [(t.code, t.where) for t in told] == ([("tensor-changed", W["a"])] if edit is edited else [])


def test_equal_tensors_may_be_exchanged(tmp_path: Path) -> None:
    """Norms of ones, and act-orders that layers share, are nobody's in particular."""
    write_artifact(tmp_path, SPECS)
    changed(tmp_path, lambda t: t | {"b.weight_scale": t["a.weight_scale"].clone()})
    path = tmp_path / "w4pack.json"
    manifest = json.loads(path.read_text())
    manifest["tensors"]["b.weight_scale"] = manifest["tensors"]["a.weight_scale"]
    path.write_text(json.dumps(manifest))
    changed(tmp_path, lambda t: t | {"a.weight_scale": t["b.weight_scale"].clone()})
    load(tmp_path)


@pytest.mark.parametrize("manifest", ["none", "older"])
def test_an_artifact_without_samples_is_loaded(tmp_path: Path, manifest: str) -> None:
    write_artifact(tmp_path, SPECS)
    changed(tmp_path, lambda t: t | {W["a"]: t[W["b"]].clone(), W["b"]: t[W["a"]].clone()})
    path = tmp_path / "w4pack.json"
    value = json.loads(path.read_text())
    for entry in value["tensors"].values():
        del entry["sample"]
    path.write_text(json.dumps(value))
    if manifest == "none":
        path.unlink()
    load(tmp_path)
    told = hashes.check_samples(open_artifact(tmp_path))
    assert [t.code for t in told] == (["no-manifest"] if manifest == "none" else [])


def test_a_manifest_that_is_damaged_stops_the_load(tmp_path: Path) -> None:
    write_artifact(tmp_path, SPECS)
    path = tmp_path / "w4pack.json"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(SourceError) as caught:
        load(tmp_path)
    assert (caught.value.code, caught.value.where) == ("manifest", str(path))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact that convert wrote."""
    place = tmp_path_factory.mktemp("samples")
    convert(checkpoints.lay_out("gptqmodel-w4g32-sym-desc-mixtral", place / "source"), place / "out")
    return place / "out"


def test_convert_writes_the_samples_of_what_is_in_the_files(made: Path) -> None:
    entries = json.loads((made / "w4pack.json").read_text())["tensors"]
    artifact = open_artifact(made)
    assert entries.keys() == artifact.tensors.keys()
    for name, info in artifact.tensors.items():
        path, _ = artifact.files[info.file]
        data = path.read_bytes()[info.offset : info.offset + info.nbytes]
        middle = data[max(0, len(data) // 2 - 256) :][:512]
        assert entries[name]["sample"] == hashlib.sha256(middle).hexdigest()[:16], name


def test_an_artifact_whose_files_were_cut_otherwise_is_loaded(made: Path, tmp_path: Path) -> None:
    tensors = load_file(made / "model.safetensors")
    for name in ("config.json", "w4pack.json"):
        (tmp_path / name).write_bytes((made / name).read_bytes())
    parts = [dict(list(tensors.items())[start::3]) for start in range(3)]
    where = {}
    for number, part in enumerate(parts, 1):
        file = f"model-{number:05d}-of-00003.safetensors"
        save_file(part, tmp_path / file)
        where |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": where}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert same(load(tmp_path), tensors)
