"""One way to record a CUDA graph, for all tests that replay one."""

from collections.abc import Callable
from typing import TypeVar

import torch

Found = TypeVar("Found")


def captured(
    run: Callable[[], Found], warm: Callable[[], object] | None = None, warm_ups: int = 2
) -> tuple[torch.cuda.CUDAGraph, Found]:
    """Return a graph of a call, and what the call returned: a replay fills it anew.

    warm  what is run before, on a stream of its own, instead of the call: where that would leave something
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm_ups):
            (warm or run)()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    return graph, found
