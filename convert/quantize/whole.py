"""A model on its way through quantization: layer after layer, each in memory alone.

Driven by a job that knows files; here are only tensors.
"""

import copy
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from w4pack.convert.core.scheme import QuantScheme
from w4pack.convert.errors import Refused, W4PackError
from w4pack.convert.files.provider import Provider, is_finite
from w4pack.convert.files.readahead import ReadAhead
from w4pack.convert.quantize.evaluation import divergence
from w4pack.convert.quantize.layer import LayerWork
from w4pack.convert.quantize.linears import Quantized
from w4pack.convert.quantize.overflow import not_finite, size
from w4pack.convert.quantize.settings import WITNESS, Settings
from w4pack.convert.quantize.skeleton import Between, Nothing, build
from w4pack.convert.quantize.stream import Stream, batches_of
from w4pack.convert.quantize.team import Team

BATCH_TOKENS = {"cpu": 4096, "cuda": 16384}  # in one run of a layer
ROOM = 0.9  # of a card's memory: what is beyond may be another process's


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is known at the end. kl: mean over the witness tokens of KL(source, quantized), nats."""

    kl: float
    tokens: int


def compute_dtype(device: torch.device, provider: Provider, module: str) -> torch.dtype:
    """Return the dtype of arithmetic: float32 on the CPU, elsewhere that of the weights."""
    if device.type == "cpu":
        return torch.float32
    tag = provider.info(f"{module}.weight").dtype
    return {"BF16": torch.bfloat16, "F16": torch.float16}.get(tag, torch.float32)


def _has_room(device: torch.device, nbytes: int) -> bool:
    """Whether a device has room for ``nbytes`` beside the most that it has held so far."""
    if device.type != "cuda":
        return True
    total = torch.cuda.get_device_properties(device).total_memory
    return torch.cuda.max_memory_reserved(device) + nbytes <= ROOM * total


class ModelRun:
    """Quantizes the decoder layers of a model in order.

    schemes  module name of the checkpoint -> scheme
    windows  calibration tokens (W, L)
    between  what runs between the linears: statistics are of what they are given then
    team     the processes that share the windows, or None; all of them call the same methods in one order
    ahead    what ``provider`` reads through, if a thread is to read the next layer while one is in work
    check    called before each batch and each set of linears of a layer: may raise to end the work

    stream   the windows in the model as it is quantized so far
    source   the windows in the source model, where the quantization looks at them, else None
    witness  ``source``, or the first tokens alone: what the outcome is compared with
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        provider: Provider,
        schemes: Mapping[str, QuantScheme],
        windows: torch.Tensor,
        settings: Settings,
        device: torch.device,
        between: Between | None = None,
        team: Team | None = None,
        ahead: ReadAhead | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        self.between = between or Nothing()
        self.team = team
        self.check = check
        self.ahead = ahead
        dtype = compute_dtype(device, provider, next(iter(schemes)))
        self.skeleton = build(config, provider, device, dtype)
        self.settings = settings
        self.schemes = schemes
        self.paths = self._places()
        windows = windows if team is None else team.part(windows)
        per_batch = max(1, BATCH_TOKENS["cpu" if device.type == "cpu" else "cuda"] // windows.shape[1])
        self.skeleton.fill_outside(head=True)
        self.stream = self._started(batches_of(windows, per_batch))
        self.source = self._started(batches_of(windows, per_batch)) if settings.strength > 0 else None
        self.witness = self.source or self._started([windows[:1, :WITNESS]] if self._leads else [])

    @property
    def _leads(self) -> bool:
        return self.team is None or self.team.leads

    def _started(self, batches: list[torch.Tensor]) -> Stream:
        stream = Stream(self.skeleton, batches)
        if self.check is not None:
            stream.check = self.check
        stream.begin()
        return stream

    def _places(self) -> dict[str, str]:
        """Return module path -> checkpoint's module name of every linear. Raises Refused for one without."""
        path_of = {name: path for path, name in self.skeleton.names.items()}
        places = {}
        for name in self.schemes:
            path = path_of[f"{name}.weight"].removesuffix(".weight")
            try:
                found = self.skeleton.model.get_submodule(path)
            except AttributeError:
                found = None
            if not isinstance(found, nn.Linear) or not path.startswith(self.skeleton.path + "."):
                raise Refused(
                    "a matrix is no linear of a decoder layer in this model's class",
                    code="model-unknown",
                    where=f"{name}.weight",
                    found="no such module" if found is None else type(found).__name__,
                    hint=f"`--ignore {name}` leaves it in 16 bit",
                )
            places[path] = name
        return places

    def below(self, index: int) -> dict[str, str]:
        """Return path below the layer -> checkpoint name, for the linears of one layer."""
        prefix = self.skeleton.prefix(index)
        return {p.removeprefix(prefix): n for p, n in self.paths.items() if p.startswith(prefix)}

    @property
    def layers(self) -> int:
        """Number of decoder layers."""
        return len(self.skeleton.layers)

    def quantize(self, index: int) -> dict[str, Quantized]:
        """Quantize a layer and send everything through it. Returns checkpoint name -> codes.

        Raises W4PackError for activations that are not finite, with the linear or the layer.
        """
        went_in = max((size(hidden) for hidden in self.stream.hidden), default=0.0)
        layer, places = self.skeleton.layers[index], self.below(index)
        self._fill(index)
        source = None if self.source is None else (copy.deepcopy(layer), self.source)
        if source is None:
            self._pass_source(layer, index)
        schemes = {path: self.schemes[name] for path, name in places.items()}
        with ExitStack() as stack:
            if source is not None:
                stack.enter_context(self.between.around(self.skeleton, source[0], index, quantized=False))
            stack.enter_context(self.between.around(self.skeleton, layer, index))
            work = LayerWork(layer, index, schemes, self.settings, source, self.team)
            try:
                made = work.run(self.stream)
            except W4PackError as err:  # a layer knows its linears by their paths below it
                err.where = ", ".join(places.get(p, p) for p in (err.where or "").split(", "))
                raise
        self._check_output(index, went_in)
        source = None  # its copy of the layer goes before memory is handed back
        self.skeleton.empty(layer)
        return {places[path]: codes for path, codes in made.items()}

    def _check_output(self, index: int, went_in: float) -> None:
        """Raise W4PackError where a layer's output is not finite, in the source or the quantized model."""
        for name, stream in (("the source", self.witness), ("the quantized model", self.stream)):
            if not all(is_finite(hidden) for hidden in stream.hidden):
                where, found = self.skeleton.prefix(index).rstrip("."), f"NaN or infinity as output of {name}"
                raise not_finite(where, found, went_in, self.skeleton.dtype)

    def repeat(self, index: int, weights: Callable[[str], torch.Tensor]) -> None:
        """Send everything through a layer that an earlier run has quantized.

        ``weights(name)`` gives the weights (N, K) float32 that a linear's codes stand for; of a team only the
        leader asks for them.
        """
        layer = self.skeleton.layers[index]
        self._fill(index)
        self._pass_source(layer, index)
        for path, name in self.below(index).items():
            found = layer.get_submodule(path)
            assert isinstance(found, nn.Linear)
            if self._leads:
                found.weight.data.copy_(weights(name))
            if self.team is not None:
                self.team.share(found.weight.data)
        with self.between.around(self.skeleton, layer, index):
            self.stream.advance(layer, index)
        self.skeleton.empty(layer)

    def _fill(self, index: int) -> None:
        """Put a layer in memory, and have the next one read if the device has room for it.

        Not while the first layer is in work: only behind it is known how much a layer takes.
        """
        self.skeleton.fill(self.skeleton.layers[index], self.skeleton.prefix(index))
        if self.ahead is None or not 0 < index < self.layers - 1:
            return
        names = self.skeleton.names_below(index + 1)
        if _has_room(self.skeleton.device, sum(self.skeleton.provider.info(name).nbytes for name in names)):
            self.ahead.expect(names)

    def _pass_source(self, layer: nn.Module, index: int) -> None:
        """Send the source's tokens through a layer that still has the source's weights."""
        with self.between.around(self.skeleton, layer, index, quantized=False):
            self.witness.advance(layer, index)

    def outcome(self) -> Outcome:
        """Compare the logits of the first tokens, after the last layer.

        Raises W4PackError for logits that are not finite: the layers before gave numbers.
        """
        before, after = (stream.logits(0, 0, WITNESS) for stream in (self.witness, self.stream))
        for name, logits in (("the source", before), ("the quantized model", after)):
            if not is_finite(logits):
                went_in = max(size(hidden) for hidden in self.stream.hidden)
                found = f"NaN or infinity in the logits of {name}"
                raise not_finite("the final norm and the head", found, went_in, self.skeleton.dtype)
        kl = divergence(before, after)
        return Outcome(float(kl.mean()), kl.numel())
