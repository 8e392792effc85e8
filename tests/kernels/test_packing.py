"""``convert --device``: another packer writes the same bytes; a device that cannot pack is refused."""

from __future__ import annotations

import hashlib
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import builders  # noqa: E402
import checkpoints  # noqa: E402
import runner  # noqa: E402
from w4pack.convert import convert, errors  # noqa: E402
from w4pack.convert.errors import W4PackError  # noqa: E402
from w4pack.convert.jobs.running import Running  # noqa: E402
from w4pack.convert.planning.quantize_options import QuantizeOptions  # noqa: E402
from w4pack.kernels import layout, packing  # noqa: E402

if TYPE_CHECKING:
    from numpy.typing import NDArray

KINDS = {  # one of each way to the tiles: source layout, act-order, padding, widening, 8 bit
    "autoawq-gemm-w4g64-skip-llama": {},
    "autoawq-gemv-w4g64-llama": {},
    "gptqmodel-w4g32-asym-desc-qwen2": {"widen": True},
    "gptqmodel-w4gm1-offtile-llama": {},
    "gptqmodel-w8g32-asym-desc-llama": {},
    "legacymarlin-w4g128-qwen2": {},
    "llmcompressor-w4g64-asym-actgroup-llama": {},
}


class OnHost(packing.CudaPacker):
    """The GPU's packer with the operator's CPU version, which packs by the definition of the tile."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.device, self.codes = "stand-in", 0

    def __call__(self, words: NDArray[Any], bits: int) -> NDArray[np.int32]:
        self.codes += words.size * 32 // bits
        return super().__call__(words, bits)

    def _stream(self) -> None:
        return None


def hashes(folder: Path) -> dict[str, str]:
    """The sha256 of every file."""
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir() if p.is_file()}


@pytest.mark.parametrize(("name", "options"), KINDS.items(), ids=KINDS)
def test_another_packer_writes_the_same_files(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    check_same(checkpoints.lay_out(name, tmp_path / "source"), tmp_path, options)


def test_another_packer_regroups_to_the_same_files(tmp_path: Path) -> None:
    config = builders.llama_config(intermediate_size=256)  # one order fits every layer
    order = builders.act_order(np.random.default_rng(2), 256)
    made = builders.model(1, config, order=order)
    source = builders.write(tmp_path / "source", made, builders.gptq, builders.gptq_config(desc=True))
    check_same(source, tmp_path, {"to": "marlin-legacy", "regroup": True})


def check_same(source: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    packer = OnHost()
    plain = convert(source, tmp_path / "cpu", **options)
    other = convert(source, tmp_path / "other", running=Running(packer=packer), **options)
    assert hashes(tmp_path / "cpu") == hashes(tmp_path / "other")
    packed = [layer.scheme for layer in plain.plan.layers if layer.action != "dense"]
    assert packer.codes >= sum(s.in_features * s.out_features for s in packed) > 0  # all of them went there
    assert (plain.packed_on, other.packed_on) == ("cpu", "stand-in")


def test_a_packer_is_not_asked_where_no_tile_is_made(tmp_path: Path) -> None:
    source = checkpoints.lay_out("gptqmodel-w4g32-sym-mini-llama", tmp_path / "source")
    packer = OnHost()
    report = convert(source, tmp_path / "out", to="compressed-tensors", running=Running(packer=packer))
    assert (packer.codes, report.packed_on) == (0, None)


@pytest.mark.parametrize("bits", [4, 8])
def test_the_packer_follows_the_definition_for_any_view(bits: int) -> None:
    codes = np.random.default_rng(1).integers(0, 2**bits, (64, 128), np.uint8)
    shifts = np.arange(0, 32, bits, dtype=np.uint32)[:, None]
    words = np.bitwise_or.reduce(codes.reshape(-1, 32 // bits, 128).astype(np.uint32) << shifts, axis=1)
    wide = np.repeat(words, 2, axis=1)
    views = [words, wide[:, ::2], np.asfortranarray(words), np.frombuffer(words.tobytes(), np.uint32)]
    for view in views:
        found = OnHost()(view.reshape(words.shape), bits)
        assert np.array_equal(found, layout.pack_codes(codes, bits))


def test_a_full_card_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: object) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("w4pack.kernels.ops.repack", full)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 2000))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    with pytest.raises(W4PackError) as caught:
        OnHost()(np.zeros((8, 64), np.uint32), 4)
    assert (caught.value.code, caught.value.found) == ("device-memory", "1,000 bytes free")


# ---- the option -------------------------------------------------------------------------------------------


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return checkpoints.lay_out("gptqmodel-w4g32-sym-mini-llama", tmp_path / "source")


def no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def old_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))


def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "find_spec", lambda name: None)


REFUSALS = [
    (no_card, "cuda", "no-device"),
    (old_card, "cuda:0", "card-too-old"),
    (old_card, "cuda:1", "no-device"),
    (no_torch, "cuda", "extra-missing"),
    (no_card, "abacus", "no-device"),
]


@pytest.mark.parametrize(("without", "device", "code"), REFUSALS, ids=lambda v: getattr(v, "__name__", v))
@pytest.mark.parametrize("dry", [(), ("--dry-run",)], ids=["", "dry"])
def test_a_device_that_cannot_pack_is_refused_before_anything_is_written(
    without: Any, device: str, code: str, dry: tuple[str, ...], source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch)
    out = source.parent / "out"
    done = runner.convert(source, out, "marlin", "--device", device, *dry).expect(2)
    assert done.error["code"] == code
    assert sorted(p.name for p in source.parent.iterdir()) == ["source"]


@pytest.mark.parametrize("to", ["gptq", "awq", "compressed-tensors", "dense"])
def test_a_device_that_has_nothing_to_do_is_a_usage_error(to: str, source: Path) -> None:
    done = runner.convert(source, source.parent / "out", to, "--device", "cuda").expect(2)
    assert (done.error["where"], done.error["found"]) == ("--device", f"--to {to}")
    runner.convert(source, source.parent / "out", to, "--device", "cpu").expect(0)


def test_the_summary_says_which_device_packed(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "packer_on", lambda device: OnHost())
    done = runner.convert(source, source.parent / "one", "marlin", "--device", "cuda").expect(0)
    assert done.events[-1]["packed_on"] == "stand-in"
    runner.run("convert", source, source.parent / "two", "--device", "cuda").expect(0, ", packed on stand-in")
    done = runner.convert(source, source.parent / "three", "marlin").expect(0)
    assert done.events[-1]["packed_on"] == "cpu"
    assert hashes(source.parent / "one") == hashes(source.parent / "three")


# ---- with --quantize --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    from quantize import sources

    return sources.save(sources.llama(), tmp_path_factory.mktemp("packing") / "source")


RTN = ("--quantize", "rtn", "--group-size", 32, "--threads", 1, "--json")


def test_a_quantized_output_is_packed_there_too(dense: Path, tmp_path: Path) -> None:
    packer = OnHost()
    done = runner.run("convert", dense, tmp_path / "cpu", *RTN).expect(0)
    quantize = QuantizeOptions("rtn", group_size=32)
    report = convert(dense, tmp_path / "other", quantize=quantize, running=Running(threads=1, packer=packer))
    assert (done.events[-1]["packed_on"], report.packed_on) == ("cpu", "stand-in")
    assert packer.codes > 0
    assert hashes(tmp_path / "cpu") == hashes(tmp_path / "other")


def test_quantizing_on_a_card_without_kernels_packs_on_the_cpu_and_says_so(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any card that torch runs on can choose codes."""
    old_card(monkeypatch)
    monkeypatch.setattr("w4pack.convert.modeljobs.prepared.device_of", lambda name: torch.device("cpu"))
    done = runner.run("convert", dense, tmp_path / "out", *RTN, "--device", "cuda").expect(0)
    assert done.events[-1]["packed_on"] == "cpu"
    (note,) = [e["text"] for e in done.events if e["event"] == "note" and "packed" in e["text"]]
    assert note == "the codes are packed on the CPU: the card is too old for the kernels"
