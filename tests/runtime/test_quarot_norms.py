"""Norms that their readers compute: what reaches a weight is in the next pass, without a launch for it."""

from __future__ import annotations

import copy
import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402

import w4pack  # noqa: E402
from runtime import quarot_models as models  # noqa: E402
from w4pack.kernels.quarot import norms, quantize_ops  # noqa: E402
from w4pack.kernels.quarot.norms import FusedNorm  # noqa: E402

TOKENS = torch.randint(3, 256, (1, 9), generator=torch.Generator().manual_seed(0))
NORM = "model.layers.0.input_layernorm"
Change = Callable[[Any, Any], None]


def _values(k: int = 64) -> Any:
    return torch.rand(k, generator=torch.Generator().manual_seed(2)) + 0.5


def _weight(dtype: Any = torch.bfloat16) -> Any:
    return torch.nn.Parameter(_values().to(dtype), requires_grad=False)


def _load(norm: Any, values: Any, *, assign: bool) -> None:
    norm.load_state_dict({"weight": values.to(norm.weight.dtype)}, assign=assign)


def _in_place(norm: Any, values: Any) -> None:
    with torch.no_grad():
        norm.weight.copy_(values)


def _replaced(norm: Any, values: Any) -> None:
    norm.weight = torch.nn.Parameter(values.to(norm.weight.dtype), requires_grad=False)


def _data(norm: Any, values: Any) -> None:
    norm.weight.data = values.to(norm.weight.dtype)


def _data_in_place(norm: Any, values: Any) -> None:
    norm.weight.data.copy_(values)


CHANGES: dict[str, Change] = {
    "load_state_dict": lambda norm, values: _load(norm, values, assign=False),
    "load_state_dict, assigned": lambda norm, values: _load(norm, values, assign=True),
    "in place": _in_place,
    "another parameter": _replaced,
    "other data": _data,
}
ON_CPU: dict[str, Change] = {**CHANGES, "data in place": _data_in_place}


# ---- in a model ------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def out(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """llama's norms were folded and are ones, gemma2's are 1 + weight and were not."""
    return models.artifact(request.param, tmp_path_factory.mktemp(request.param), **models.SMALL)


def _logits(model: Any) -> Any:
    with torch.no_grad():
        return model(TOKENS).logits.float()


@pytest.fixture(scope="module")
def other(out: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The artifact with another weight of one norm, and no manifest that knows the old one."""
    folder = tmp_path_factory.mktemp("other") / "out"
    shutil.copytree(out, folder)
    (folder / "w4pack.json").unlink()
    tensors = load_file(folder / "model.safetensors")
    name = f"{NORM}.weight"
    tensors[name] = _values(tensors[name].shape[0]).to(tensors[name].dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("how", ON_CPU)
def test_other_weights_are_the_logits_of_a_file_with_them(how: str, out: Path, other: Path) -> None:
    model, wanted = w4pack.load(out), w4pack.load(other)
    before = _logits(model)
    norm = model.get_submodule(NORM)
    ON_CPU[how](norm, _values(norm.weight.shape[0]))
    assert not torch.equal(_logits(model), before)
    assert torch.equal(_logits(model), _logits(wanted))
    assert torch.equal(model.state_dict()[f"{NORM}.weight"], wanted.state_dict()[f"{NORM}.weight"])


def test_a_cast_to_the_dtype_it_has_changes_nothing(out: Path) -> None:
    """Rotary frequencies are cast, as ever: they are put back."""
    model = w4pack.load(out)
    before = _logits(model)
    plain = {n: b.clone() for n, b in model.named_buffers() if "norm" not in n}
    model.to(model.dtype)
    for name, kept in plain.items():
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._buffers[leaf] = kept
    assert torch.equal(_logits(model), before)
    assert not [n for n, _ in model.named_buffers() if "norm" in n]


def test_a_copy_reads_its_own_weight(out: Path) -> None:
    model = w4pack.load(out)
    before = _logits(model)
    twin = copy.deepcopy(model)
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    for other in (twin, torch.load(stored, weights_only=False)):
        norm = other.get_submodule(NORM)
        _data_in_place(norm, _values(norm.weight.shape[0]))
        assert not torch.equal(_logits(other), before)
    assert torch.equal(_logits(model), before)


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools")
def test_a_compiled_model_reads_the_weight(out: Path) -> None:
    model = w4pack.load(out, kv_bits=16)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        assert torch.equal(compiled(TOKENS, use_cache=False).logits, model(TOKENS, use_cache=False).logits)
        norm = model.get_submodule(NORM)
        _in_place(norm, _values(norm.weight.shape[0]))
        assert torch.equal(compiled(TOKENS, use_cache=False).logits, model(TOKENS, use_cache=False).logits)


# ---- as on a card ----------------------------------------------------------------------------------


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Let the rules of a card hold on a CPU; every look at a weight is counted."""
    found: list[bool] = []
    own = FusedNorm._factor

    def factor(norm: FusedNorm) -> Any:
        found.append(True)
        return own(norm)

    monkeypatch.setattr(norms, "_on_card", lambda weight: not weight.is_meta)
    monkeypatch.setattr(FusedNorm, "_factor", factor)
    return found


def _wanted(norm: Any) -> Any:
    return norm.weight.detach().float() + float(norm.plus_one)


@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("how", CHANGES)
def test_the_gain_follows_the_weight(how: str, plus_one: bool, looks: list[bool]) -> None:
    norm = FusedNorm(_weight(), 1e-6, plus_one=plus_one)
    norm.gain()
    for values in (_values() * 3, _values() * 7):
        CHANGES[how](norm, values)
        found = norm.gain()
        assert found is not None and torch.equal(found.float(), _wanted(norm))
        count = len(looks)
        assert norm.gain() is found and len(looks) == count  # no launch


@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("how", ["load_state_dict", "in place"])
def test_the_address_stays(how: str, plus_one: bool, looks: list[bool]) -> None:
    """A graph that was captured reads what the weight has become, also when it has become all ones."""
    norm = FusedNorm(_weight(), 1e-6, plus_one=plus_one)
    captured = norm.gain()
    assert captured is not None
    for values in (_values() * 3, torch.full((64,), 1.0 - plus_one), _values() * 5):
        CHANGES[how](norm, values)
        norm.gain()
        assert torch.equal(captured.float(), _wanted(norm))
    assert norm.gain().data_ptr() == captured.data_ptr()


@pytest.mark.parametrize("plus_one", [False, True])
def test_ones_are_left_out_until_they_are_no_ones(plus_one: bool, looks: list[bool]) -> None:
    norm = FusedNorm(_weight(), 1e-6, plus_one=plus_one)
    with torch.no_grad():
        norm.weight.fill_(1.0 - plus_one)
    assert norm.gain() is None and norm.folded
    norm.half()
    assert norm.gain() is None
    _in_place(norm, _values())
    assert torch.equal(norm.gain().float(), _wanted(norm)) and not norm.folded


@pytest.mark.parametrize("plus_one", [False, True])
def test_a_cast_there_and_back_is_seen(plus_one: bool, looks: list[bool]) -> None:
    norm = FusedNorm(_weight(torch.float32), 1e-6, plus_one=plus_one)
    for cast in (norm.half, norm.float, norm.bfloat16, norm.double, norm.float):
        cast()
        found = norm.gain()
        assert found is not None and found.dtype in norms.DTYPES
        assert torch.equal(found.float(), _wanted(norm).float())
    assert not dict(norm.named_buffers())


def test_a_weight_that_no_kernel_reads_is_copied(looks: list[bool]) -> None:
    """A view that starts at an odd address, or whose values lie apart."""
    norm = FusedNorm(_weight(), 1e-6, plus_one=False)
    whole = torch.rand(129).bfloat16()
    for view in (whole[1:65], whole[:128:2]):
        norm.load_state_dict({"weight": view}, assign=True)
        found = norm.gain()
        assert found is not None and found.is_contiguous() and found.data_ptr() % 16 == 0
        assert torch.equal(found, view)


def test_what_was_made_in_inference_mode_can_be_written_to(looks: list[bool]) -> None:
    with torch.inference_mode():
        norm = FusedNorm(_weight(), 1e-6, plus_one=True)
    for _ in range(2):
        _load(norm, _values() * 3, assign=True)
        assert torch.equal(norm.gain(), _wanted(norm))


def test_16_bit_gains_are_float32_ones_bit_for_bit() -> None:
    """The weight is handed over as it is: the operator widens it without rounding."""
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).half()
    for dtype in (torch.float16, torch.bfloat16):
        gain = _values().to(dtype)
        given = (1e-6, "", 8, 0.9, 1, 64)
        found = quantize_ops.norm_quantize(x, gain, *given)
        wanted = quantize_ops.norm_quantize(x, gain.float(), *given)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_a_capture_may_follow_a_cast_or_a_load(looks: list[bool]) -> None:
    """The weight was looked at when it changed: a capture cannot wait for the answer."""
    norm = FusedNorm(_weight(), 1e-6, plus_one=True)
    for change in (norm.half, norm.bfloat16, lambda: _load(norm, _values() * 3, assign=False)):
        change()
        count = len(looks)
        assert torch.equal(norm.gain(), _wanted(norm)) and len(looks) == count
