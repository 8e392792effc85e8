"""Tensors of files that are not read yet: an engine's own code says where they go, the bytes move later.

An engine hands each tensor of a checkpoint to the code of its model, which narrows it to a rank's share and
copies that to a parameter. Here the tensor is only a place in a file. Views of it are views; a copy of it
into memory is written down as a rectangle; and when all is written down, the rectangles are read by the
transfer, in parallel, straight to where they stay. Whatever else is done with such a tensor reads it, and
whatever else is done with memory that waits for such bytes brings them first.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from w4pack.convert.files.tensorfile import TensorInfo
from w4pack.kernels import placement, transfer
from w4pack.kernels.chunks import CHUNK, GAP, Cutter, Move
from w4pack.kernels.workers import Files

COPY = torch.ops.aten.copy_.default


class Ledger:
    """Where the bytes of files go: copies that were asked for, until ``execute`` does them.

    taken  names of the tensors that something was done with
    """

    def __init__(self, files: Files) -> None:
        self.files = files
        self.taken: set[str] = set()
        self.written: set[int] = set()  # addresses of the storages that something was copied to
        # An engine may keep some layers in main memory: each device has arenas and moves of its own.
        self._arenas: dict[torch.device, dict[int, tuple[int, torch.Tensor]]] = {}  # address -> number, bytes
        self._moves: dict[torch.device, list[Move]] = {}

    def tensor(self, info: TensorInfo) -> "FileTensor":
        """Return a tensor of a file, unread."""
        dtype = transfer.torch_dtype(info.dtype, info.name)
        return FileTensor(torch.empty(info.shape, dtype=dtype, device="meta"), info, self)

    def note(self, target: torch.Tensor, source: "FileTensor") -> bool:
        """Write a copy down; False if it is none of rectangles of bytes, and must be done by reading."""
        view = source.window
        place = address(target)
        if place is None:
            return False
        self.written.add(place)
        if target.dtype != view.dtype or target.shape != view.shape or target.device.type == "meta":
            return False
        rectangle = _rectangle(target, view)
        if rectangle is None:
            return False
        width, rows, step, pitch = rectangle
        size = view.element_size()
        storage = target.untyped_storage()
        number = self._arena(storage, target.device)
        offset = source.info.offset + int(view.storage_offset()) * size
        to = int(target.storage_offset()) * size
        if width * rows:
            move = Move(source.info.file, offset, pitch, width, rows, number, to, step)
            self._moves.setdefault(target.device, []).append(move)
        return True

    def _arena(self, storage: torch.UntypedStorage, device: torch.device) -> int:
        arenas, address = self._arenas.setdefault(device, {}), storage.data_ptr()
        if address not in arenas:
            whole = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
            arenas[address] = len(arenas), whole
        return arenas[address][0]

    def execute(self, threads: int | None = None) -> int:
        """Do the copies; returns how many bytes were read. Raises as ``transfer.execute``."""
        moves, arenas = self._moves, self._arenas
        self._moves, self._arenas = {}, {}
        done = 0
        for device, found in moves.items():
            cutter = Cutter(CHUNK, GAP)
            for move in sorted(found):
                cutter.add(move)
            chunks = cutter.close()
            places = [whole for _, whole in arenas[device].values()]  # in the order of their numbers
            transfer.carry(chunks, self.files, places, threads=threads)
            done += sum(read.nbytes * read.rows for chunk in chunks for read in chunk.reads)
        return done

    def waits(self, tensor: torch.Tensor) -> bool:
        """Tell whether bytes for a tensor's memory are written down and not there yet."""
        return address(tensor) in self._arenas.get(tensor.device, {})

    def read(self, info: TensorInfo) -> torch.Tensor:
        """Return a tensor of a file in main memory, read now."""
        plan = placement.make_plan({info.name: placement.take(info)})
        return transfer.execute(plan, self.files, "cpu")[info.name]


def address(tensor: torch.Tensor) -> int | None:
    """Return where the memory of a tensor starts; None: it has none, as on ``meta``, or others hold it."""
    try:
        return tensor.untyped_storage().data_ptr() or None
    except RuntimeError:  # of tensors that only wrap others there is no other way to tell
        return None


class FileTensor(torch.Tensor):
    """A tensor of a file, or a view of one.

    window  on the ``meta`` device: its shape, strides and offset are those within the file's tensor
    info    of the whole tensor
    """

    window: torch.Tensor
    info: TensorInfo
    ledger: Ledger

    @staticmethod
    def __new__(
        cls: type["FileTensor"], window: torch.Tensor, info: TensorInfo, ledger: Ledger
    ) -> "FileTensor":
        """Return it: of the window's shape, on the CPU as far as anyone asks."""
        made: FileTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            window.shape,
            strides=window.stride(),
            storage_offset=window.storage_offset(),
            dtype=window.dtype,
            device=torch.device("cpu"),
            requires_grad=False,
        )
        made.window, made.info, made.ledger = window, info, ledger
        return made

    def __init__(self, window: torch.Tensor, info: TensorInfo, ledger: Ledger) -> None:
        pass

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Say which tensor of which file it is."""
        return f"FileTensor({self.info.name}, {list(self.shape)}, {self.dtype})"

    def whole(self) -> torch.Tensor:
        """Read the tensor and return this view of it."""
        real = self.ledger.read(self.info)
        window = self.window
        return real.as_strided(window.shape, window.stride(), window.storage_offset())

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator: a view of a file's tensor is one again, a copy is noted, all else reads it."""
        kwargs = dict(kwargs or {})
        if func is COPY and len(args) > 1 and isinstance(args[1], FileTensor):
            target, source = args[:2]
            if not isinstance(target, FileTensor):
                source.ledger.taken.add(source.info.name)
                return target if source.ledger.note(target, source) else func(target, source.whole())
        first = args[0] if args else None
        if isinstance(first, FileTensor) and _is_view(func):
            plain = tree_map(_view_of, args)
            return tree_map(lambda out: _wrapped(out, first), func(*plain, **tree_map(_view_of, kwargs)))
        return func(*tree_map(_read, args), **tree_map(_read, kwargs))


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While a model's code takes tensors: brings bytes that it asked for when it uses what they are for.

    Some weights are changed in place as soon as they are copied (``A = -exp(A)`` of a state space).
    """

    def __init__(self, ledger: Ledger, threads: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger, self.threads = ledger, threads

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator, after what it needs has come."""
        kwargs = dict(kwargs or {})
        noted = func is COPY and len(args) > 1 and isinstance(args[1], FileTensor)
        if not noted and not _is_view(func) and any(map(self._waits, tree_leaves((args, kwargs)))):
            self.ledger.execute(self.threads)
        place = address(args[0]) if func is COPY and not noted else None
        if place is not None:
            self.ledger.written.add(place)  # by what was read before
        return func(*args, **kwargs)

    def _waits(self, value: Any) -> bool:
        plain = isinstance(value, torch.Tensor) and not isinstance(value, FileTensor)
        return plain and value.device.type != "meta" and self.ledger.waits(value)


@cache
def _is_view(func: Any) -> bool:
    """Tell whether an operator returns views of its first argument and nothing else."""
    returns = func._schema.returns
    aliases = [r.alias_info for r in returns]
    first = func._schema.arguments[0].alias_info if func._schema.arguments else None
    return (
        first is not None
        and not first.is_write
        and bool(aliases)
        and all(alias is not None and not alias.is_write for alias in aliases)
    )


def _view_of(value: Any) -> Any:
    return value.window if isinstance(value, FileTensor) else value


def _wrapped(value: Any, origin: FileTensor) -> Any:
    return FileTensor(value, origin.info, origin.ledger) if isinstance(value, torch.Tensor) else value


def _read(value: Any) -> Any:
    if isinstance(value, FileTensor):
        value.ledger.taken.add(value.info.name)
        return value.whole()
    return value


def _rectangle(target: torch.Tensor, source: torch.Tensor) -> tuple[int, int, int, int] | None:
    """Return (width, rows, step of the target, pitch of the source) in bytes; None: it is no rectangle.

    Both are rows of bytes that lie together, the rows at equal distances.
    """
    size = source.element_size()
    dims = [
        (n, a, b) for n, a, b in zip(source.shape, target.stride(), source.stride(), strict=True) if n != 1
    ]
    width = 1
    while dims and dims[-1][1:] == (width, width):
        width *= dims.pop()[0]
    if prod(source.shape) == 0:
        return 0, 0, 0, 0
    rows, step, pitch = 1, width, width
    if dims:
        rows, step, pitch = dims.pop()
        for n, a, b in reversed(dims):
            if (a, b) != (rows * step, rows * pitch):
                return None
            rows *= n
    if step < width or pitch < width:
        return None
    return width * size, rows, step * size, pitch * size


def seen(tensor: torch.Tensor) -> None:
    """Say of a tensor that the engine knows it, and that another rank has it."""
    if isinstance(tensor, FileTensor):
        tensor.ledger.taken.add(tensor.info.name)


def names(tensors: Mapping[str, TensorInfo], ledger: Ledger) -> Iterator[tuple[str, FileTensor]]:
    """Yield (name, unread tensor) in the order of the files."""
    for info in sorted(tensors.values(), key=lambda info: (info.file, info.offset)):
        yield info.name, ledger.tensor(info)
