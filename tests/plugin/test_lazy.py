"""Tensors that are not read yet: views stay views, copies are rectangles of the file, all else reads.

Every result is compared with the same operations on the tensor that safetensors itself reads.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402

from w4pack.kernels import transfer  # noqa: E402
from w4pack.kernels.vllm import lazy  # noqa: E402
from w4pack.kernels.vllm.lazy import FileTensor, Ledger, Watch  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(7)
    tensors = {
        "words": torch.randint(-(2**31), 2**31 - 1, (12, 40), generator=generator).to(torch.int32),
        "half": torch.randn(6, 10, generator=generator).half(),
        "stack": torch.randn(3, 4, 5, generator=generator),
        "one": torch.randn(1, generator=generator),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def opened(file: Path) -> tuple[Ledger, dict[str, FileTensor], Tensors]:
    tensors, places = transfer.file_tensors(file)
    ledger = Ledger(places)
    return ledger, dict(lazy.names(tensors, ledger)), load_file(file)


VIEWS: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "whole": ("words", lambda t: t),
    "rows": ("words", lambda t: t.narrow(0, 3, 5)),
    "columns": ("words", lambda t: t.narrow(1, 8, 16)),
    "both": ("words", lambda t: t.narrow(0, 2, 4).narrow(1, 4, 8)),
    "slices": ("words", lambda t: t[1:9, 5:7]),
    "one row": ("words", lambda t: t[4]),
    "every other row": ("words", lambda t: t[::2]),
    "shape": ("words", lambda t: t.view(6, 80)[1:3]),
    "expert": ("stack", lambda t: t[1]),
    "expert's rows": ("stack", lambda t: t[1].narrow(0, 1, 2)),
    "of every expert": ("stack", lambda t: t.narrow(1, 1, 2)),
    "columns of every expert": ("stack", lambda t: t.narrow(2, 1, 3)),
    "unbound": ("stack", lambda t: t.unsqueeze(0).unbind()[0][2]),
    "chunk": ("stack", lambda t: t.chunk(2, dim=1)[1]),
    "detached": ("half", lambda t: t.detach().data),
    "flat": ("half", lambda t: t.reshape(-1)[7:23]),
    "scalar": ("one", lambda t: t),
    "nothing": ("words", lambda t: t.narrow(0, 3, 0)),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", VIEWS)
def test_a_copy_of_a_view_is_read_later_and_right(name: str, device: str, file: Path) -> None:
    tensor, view = VIEWS[name]
    ledger, files, real = opened(file)
    wanted, window = view(real[tensor]), view(files[tensor])
    assert isinstance(window, FileTensor)
    assert (window.shape, window.dtype) == (wanted.shape, wanted.dtype)
    target = torch.zeros_like(wanted, device=device)
    target.copy_(window)
    assert not target.any()  # nothing was read
    ledger.execute()
    assert torch.equal(target.cpu(), wanted)
    assert ledger.taken == {tensor}


@pytest.mark.parametrize("device", DEVICES)
def test_a_copy_into_a_part_of_a_parameter_touches_nothing_else(device: str, file: Path) -> None:
    ledger, files, real = opened(file)
    target = torch.full((20, 64), 5, dtype=torch.int32, device=device)
    target.narrow(0, 4, 12).narrow(1, 16, 40).copy_(files["words"])
    ledger.execute()
    expected = torch.full((20, 64), 5, dtype=torch.int32)
    expected[4:16, 16:56] = real["words"]
    assert torch.equal(target.cpu(), expected)
    assert ledger.written == {target.untyped_storage().data_ptr()}


def test_only_what_is_copied_is_read(file: Path) -> None:
    ledger, files, _ = opened(file)
    torch.empty(3, 40, dtype=torch.int32).copy_(files["words"][2:5])
    assert ledger.execute() == 3 * 40 * 4
    assert ledger.execute() == 0  # once


OTHER: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "another dtype": lambda t: torch.empty(6, 10, dtype=torch.float32).copy_(t),
    "transposed": lambda t: torch.empty(10, 6, dtype=torch.float16).copy_(t.t()),
    "broadcast": lambda t: torch.empty(2, 10, dtype=torch.float16).copy_(t[0]),
    "sum": lambda t: t.float().sum(0),
    "joined": lambda t: torch.cat([t, t]),
    "cast": lambda t: t.to(torch.float32),
    "contiguous": lambda t: t[:, 3:5].contiguous(),
    "item": lambda t: torch.tensor(t[0, 0].item()),
    "assigned": lambda t: torch.zeros(8, 10, dtype=torch.float16).index_copy_(0, torch.arange(6), t),
}


@pytest.mark.parametrize("name", OTHER)
def test_anything_else_reads_the_tensor(name: str, file: Path) -> None:
    ledger, files, real = opened(file)
    found = OTHER[name](files["half"])
    assert ledger.taken == {"half"}
    ledger.execute()
    assert torch.equal(found, OTHER[name](real["half"]))


def test_attributes_of_an_engine_stay_on_the_tensor(file: Path) -> None:
    _, files, _ = opened(file)
    files["half"].shard_id = "q"
    assert files["half"].shard_id == "q"
    assert not hasattr(files["half"].detach(), "shard_id")


# ---- while a model's code takes tensors ---------------------------------------------------------------


IN_PLACE: dict[str, Callable[[torch.Tensor], object]] = {
    "computed from itself": lambda t: t.copy_(-torch.exp(t.float())),
    "in place": lambda t: t.mul_(3),
    "read": lambda t: float(t.sum()),
    "through a view": lambda t: t.view(-1)[2:9].add_(1),
    "overwritten": lambda t: t.fill_(2),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_a_weight_that_is_changed_as_soon_as_it_is_copied(name: str, file: Path) -> None:
    ledger, files, real = opened(file)
    target, other = torch.zeros(6, 10, dtype=torch.float16), torch.zeros(12, 40, dtype=torch.int32)
    with Watch(ledger):
        other.copy_(files["words"])
        target.copy_(files["half"])
        found = IN_PLACE[name](target)
    ledger.execute()
    wanted = real["half"].clone()
    assert found == IN_PLACE[name](wanted) if name == "read" else IN_PLACE[name](wanted) is not None
    assert torch.equal(target, wanted)
    assert torch.equal(other, real["words"])


def test_copies_and_views_alone_bring_nothing(file: Path) -> None:
    ledger, files, _ = opened(file)
    target = torch.zeros(12, 40, dtype=torch.int32)
    with Watch(ledger):
        target.narrow(0, 0, 4).copy_(files["words"].narrow(0, 0, 4))
        target[4:].copy_(files["words"][4:])
        torch.zeros(3).add_(1)  # nothing waits for it
    assert not target.any()
    assert ledger.execute() == 12 * 40 * 4


def test_a_tensor_can_be_read_whole_at_once(file: Path) -> None:
    _, files, real = opened(file)
    assert torch.equal(files["stack"][1:].whole(), real["stack"][1:])


@pytest.mark.gpu
def test_some_layers_in_main_memory_and_some_on_the_card(file: Path) -> None:
    ledger, files, real = opened(file)
    places = [torch.zeros(12, 40, dtype=torch.int32, device=device) for device in ("cpu", "cuda", "cpu")]
    for target in places:
        target.copy_(files["words"])
    assert ledger.execute() == 3 * 12 * 40 * 4
    assert all(torch.equal(target.cpu(), real["words"]) for target in places)


class Wrapped(torch.Tensor):
    """A parameter without memory of its own, as quantized ones of an engine are."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls: type["Wrapped"], held: torch.Tensor) -> "Wrapped":
        made: Wrapped = torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)
        made.held = held
        return made

    def __init__(self, held: torch.Tensor) -> None:
        pass

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., object], types: object, args: tuple[object, ...] = (), kwargs: object = None
    ) -> object:
        return func(*(arg.held if isinstance(arg, Wrapped) else arg for arg in args))


@pytest.mark.parametrize("read", [False, True])
def test_a_parameter_that_wraps_others_takes_what_is_read(read: bool, file: Path) -> None:
    ledger, files, real = opened(file)
    target = torch.zeros(6, 10, dtype=torch.float16)
    with Watch(ledger):
        Wrapped(target).copy_(files["half"].clone() if read else files["half"])
    ledger.execute()
    assert torch.equal(target, real["half"])
