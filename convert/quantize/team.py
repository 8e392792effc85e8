"""Several processes that calibrate one model: each sends a part of the text through, and sums are added.

One process for each GPU (or CPU), started by torchrun. The first one leads: it alone chooses codes and writes
files, and sends the others the weights that its codes stand for. All make the same collective calls in the
same order, so what may differ between them (which experts saw a token, whether an earlier run has finished a
layer) is decided by the leader. Words and counts go from CPU to CPU, also between cards: such a connection
breaks when its other end is gone, one of cards does not.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from w4pack.convert.errors import UsageError, W4PackError
from w4pack.convert.quantize.hessian import Statistics

WAIT = timedelta(hours=2)  # for the slowest process: the leader also writes and hashes


@dataclass(frozen=True, slots=True)
class Team:
    """This process among those that work on one model. ``device``: its own, with its number."""

    rank: int
    size: int
    device: str

    @property
    def leads(self) -> bool:
        """Whether this process chooses codes and writes files."""
        return self.rank == 0

    def part(self, windows: torch.Tensor) -> torch.Tensor:
        """Return this process's windows, neighbours of (W, L). Raises UsageError for fewer than processes."""
        if windows.shape[0] < self.size:
            raise UsageError(
                "fewer windows of calibration text than processes",
                where="--samples",
                expected=f"at least {self.size}, one for each process",
                found=str(windows.shape[0]),
            )
        return torch.tensor_split(windows, self.size)[self.rank]

    def total(self, count: int) -> int:
        """Return the sum of a number over the processes."""
        value = torch.tensor([count], dtype=torch.int64)
        dist.all_reduce(value)
        return int(value)

    def merge(self, statistics: Statistics) -> None:
        """Replace a process's sums by those of all."""
        dist.all_reduce(statistics.sum)
        if statistics.shift is not None:
            dist.all_reduce(statistics.shift)
        statistics.tokens = self.total(statistics.tokens)

    def joined(self, rows: torch.Tensor) -> torch.Tensor:
        """Return every process's rows (t, K), one behind the other in the order of the processes."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, rows.cpu())
        return torch.cat(found).to(rows.device)

    def told(self, value: Any = None) -> Any:
        """Return what the leader says; ``value`` is its own and counts there alone."""
        found = [value]
        dist.broadcast_object_list(found, src=0, device=torch.device("cpu"))
        return found[0]

    def share(self, values: torch.Tensor) -> None:
        """Overwrite a tensor by the leader's."""
        dist.broadcast(values, src=0)

    def meet(self) -> None:
        """Wait for all: one that leaves while another still sends would break it."""
        dist.barrier()

    def leave(self) -> None:
        """Say goodbye: nothing can be sent any more."""
        dist.destroy_process_group()

    def abandon(self) -> None:
        """Leave where others still wait for a call of this process: cards would wait for ever."""
        joined = dist.group.WORLD
        if self.device == "cpu" or joined is None:
            self.leave()
        else:
            joined.abort()


def team_of(device: str) -> Team | None:
    """Join the processes that torchrun started; None for a process that stands alone.

    Raises UsageError for a device with a number: each process takes the card of its own.
    """
    if not (dist.is_available() and dist.is_torchelastic_launched()):
        return None
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if size == 1:
        return None
    if device not in ("cpu", "cuda"):
        raise UsageError(
            "each process takes the device of its own number",
            where="--device",
            expected="cpu or cuda",
            found=device,
        )
    if device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        _take_card(device)
    dist.init_process_group("gloo" if device == "cpu" else "cpu:gloo,cuda:nccl", timeout=WAIT)
    return Team(rank, size, device)


def _take_card(device: str) -> None:
    try:
        torch.cuda.set_device(device)
    except (RuntimeError, AssertionError) as err:
        raise UsageError(
            "no card for this process",
            where="--device",
            expected="as many cards as processes on a machine",
            found=f"{device}: {str(err).partition(chr(10))[0][:100]}",
        ) from err


@contextmanager
def connected() -> Iterator[None]:
    """Turn a broken connection to the leader into an error that says so."""
    try:
        yield
    except RuntimeError as err:  # of torch.distributed
        raise lost(str(err).partition("\n")[0][:160]) from err


def lost(reason: str) -> W4PackError:
    """Return the error of a process whose leader is gone."""
    return W4PackError(
        "the leading process is gone",
        code="team-lost",
        found=reason,
        hint="the same command with `--resume` goes on behind the last finished layer",
    )
