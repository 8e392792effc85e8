"""How launches are timed: many in one CUDA graph, candidates in turns, medians.

A candidate's launches rotate over sets of tensors that together are several times the L2, so that no weight
is found there. The graph is replayed once before each sample, so that the card is busy while the timed
replays are queued. On a CPU the same code runs without graphs, by the clock: there it checks, not measures.
"""

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import cache

import torch

ROTATED = 400 << 20  # bytes of weights a rotation covers: several times the L2 of every card
MOST_SETS = 1024  # of a rotation, whatever their size
MOST_LAUNCHES = 96  # of a graph, unless one round of the rotation has more
LONG_ROUND = 6e3  # microseconds; a round that takes longer is cut short
TIMED_REPLAYS = 2
GRAPH_US = 1500.0  # microseconds of launches in a graph
WARM_UP_SECONDS = 0.3

Launcher = Callable[[int], object]


class Candidate:
    """One column of a comparison: ``run(i)`` launches on rotation set i. ``times`` are microseconds."""

    def __init__(self, name: str, run: Launcher, sets: int, device: str | torch.device = "cuda") -> None:
        self.name, self.run, self.sets = name, run, sets
        self.device = torch.device(device)
        self.times: list[float] = []
        self.launches = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def capture(self, wanted_us: float = GRAPH_US) -> None:
        """Find how long a launch takes, and record about ``wanted_us`` of them, whole rounds where it can."""
        if self.device.type == "cpu":
            self.launches = self.sets
            return
        side = _side_stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for i in range(min(3, self.sets)):
                self.run(i)
            begin, end = _events()
            begin.record()
            for i in range(3):
                self.run(i % self.sets)
            end.record()
            end.synchronize()
        each = max(1.0, begin.elapsed_time(end) * 1e3 / 3)
        rounds = max(1, math.ceil(min(float(MOST_LAUNCHES), wanted_us / each) / self.sets))
        whole = self.sets * each < LONG_ROUND
        self.launches = rounds * self.sets if whole else max(1, int(wanted_us / each))
        self._graph = recorded(self._launch, self.device, warm_ups=0)

    def _launch(self) -> None:
        for i in range(self.launches):
            self.run(i % self.sets)

    def sample(self) -> None:
        """Take one time, microseconds a launch."""
        if self._graph is None:
            start = time.perf_counter()
            for i in range(self.launches):
                self.run(i)
            self.times.append((time.perf_counter() - start) * 1e6 / self.launches)
            return
        begin, end = _events()
        self._graph.replay()
        begin.record()
        for _ in range(TIMED_REPLAYS):
            self._graph.replay()
        end.record()
        end.synchronize()
        self.times.append(begin.elapsed_time(end) * 1e3 / (TIMED_REPLAYS * self.launches))

    @property
    def median(self) -> float:
        """The median of the samples."""
        return statistics.median(self.times)


def race(
    candidates: Sequence[Candidate],
    repeats: int,
    wanted_us: float = GRAPH_US,
    on_error: Callable[[Candidate, Exception], None] | None = None,
) -> dict[str, float]:
    """Return the median microseconds of each candidate, repeats interleaved.

    Each repeat has an order of its own: a card that has just run at its power limit is slower for a while,
    and the same candidate must not always be the one that pays for its neighbour.

    A candidate that cannot run ends the race, or is handed to ``on_error`` and left out.
    """
    live = []
    for candidate in candidates:
        try:
            candidate.capture(wanted_us)
        except Exception as error:
            if on_error is None:
                raise
            on_error(candidate, error)
        else:
            live.append(candidate)
    for turn in range(repeats):
        for candidate in random.Random(turn).sample(live, len(live)):
            candidate.sample()
    return {candidate.name: candidate.median for candidate in live}


def recorded(
    run: Callable[[], object], device: str | torch.device = "cuda", *, warm_ups: int = 2
) -> torch.cuda.CUDAGraph:
    """Return a graph of a call, which is run before: what is made once is not in the graph."""
    side = _side_stream(torch.device(device))
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(warm_ups):
            run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        run()
    return graph


def rotation(size: int) -> int:
    """Return how many copies of ``size`` bytes cover the rotation."""
    return max(1, min(MOST_SETS, math.ceil(ROTATED / size)))


def warm_up(run: Launcher, sets: int, seconds: float = WARM_UP_SECONDS) -> None:
    """Bring clocks to where a long run has them: the first point after a pause would pay for it."""
    begin = time.monotonic()
    while time.monotonic() - begin < seconds:
        for i in range(100):
            run(i % sets)
        torch.cuda.synchronize()


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    return begin, end


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one stream that captures: the kernels keep a workspace for each stream they meet."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
