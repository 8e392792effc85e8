"""What is told of a job that goes through a model layer by layer: how far it is, what it takes and needs."""

import time
from dataclasses import dataclass, field

import torch

from w4pack.convert.events import Reporter, time_text
from w4pack.convert.modeljobs.peaks import peak_text


@dataclass(slots=True)
class Layers:
    """Tells each finished decoder layer. total: of the model; the time left is that of the mean layer."""

    total: int
    reporter: Reporter
    device: torch.device
    _started: float = field(default_factory=time.monotonic, init=False)

    def tell(self, done: int, how: str) -> None:
        """Tell that ``done`` layers are finished. how: what was done with the last one, in words."""
        left = (time.monotonic() - self._started) / done * (self.total - done)
        text = f"layer {done} of {self.total} {how}, at most {peak_text(self.device)}"
        self.reporter.event("note", text=f"{text}, about {time_text(left)} left")
