"""Experts as single linears: what stands in the place of a model's fused experts while it is calibrated.

transformers holds all experts of a layer in two 3-D parameters and multiplies them without a module for each,
so nothing could be seen of the tokens that an expert gets. Here every expert has its own linears, called one
expert after another with that expert's tokens alone.
"""

from collections.abc import Callable

import torch
from torch import nn

from w4pack.convert.errors import Refused, SourceError
from w4pack.convert.files.counts import OTHER_CONFIG
from w4pack.convert.files.provider import Provider

UNCALIBRATED = "`--quantize rtn` without `--rotate` runs nothing of the model"  # the way on from such a class
PARAMETERS = {"gate_up_proj", "down_proj"}


class Expert(nn.Module):
    """gate, up and down of one expert."""

    def __init__(self, hidden: int, inner: int, act_fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)
        self.act_fn = act_fn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return down(act(gate(x)) * up(x))."""
        y: torch.Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return y


class SplitExperts(nn.ModuleList):
    """All experts of a layer, called as the fused ones are."""

    def __init__(
        self, count: int, hidden: int, inner: int, act_fn: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        super().__init__([Expert(hidden, inner, act_fn) for _ in range(count)])

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return (T, H): of each token (T, H), the weighted sum over its experts (T, k)."""
        made = torch.zeros_like(hidden_states)
        for number, expert in enumerate(self):
            token, choice = torch.where(top_k_index == number)
            if token.numel():
                y = expert(hidden_states[token]) * top_k_weights[token, choice, None]
                made.index_add_(0, token, y.to(made.dtype))
        return made


def most_experts(provider: Provider) -> int:
    """Return how many experts a layer has at most, by names, or by headers: stacked ones have three sides."""
    single: dict[str, set[str]] = {}
    stacked = [0]
    for name in provider.names():
        layer, dot, rest = name.rpartition("experts.")
        if dot and rest.partition(".")[0].isdigit():
            single.setdefault(layer, set()).add(rest.partition(".")[0])
        elif len(shape := provider.info(name).shape) >= 3 and 0 not in shape:
            stacked.append(shape[0])
    return max([*stacked, *map(len, single.values())])


def split_fused(model: nn.Module, most: int) -> None:
    """Replace every fused set of experts of a model on ``meta`` by single linears.

    most  experts of a layer that the files have: each gets modules of its own

    Raises:
        Refused: experts of a kind that is not known here.
        SourceError: more of them than the files have.
    """
    for path, module in list(model.named_modules()):
        parameters = dict(module.named_parameters(recurse=False))
        stacked = [name for name, p in parameters.items() if p.dim() == 3]
        if not stacked:
            continue
        if set(parameters) != PARAMETERS or not hasattr(module, "act_fn") or not _plain(parameters):
            raise Refused(
                "the experts of this model are of a kind that w4pack cannot calibrate",
                code="experts-unknown",
                where=path,
                expected="`gate_up_proj` (E, 2 I, H) and `down_proj` (E, H, I), without biases",
                found=", ".join(f"{n} {list(p.shape)}" for n, p in sorted(parameters.items())),
                hint=UNCALIBRATED,
            )
        count, double, hidden = parameters["gate_up_proj"].shape
        if count > most:
            raise SourceError(
                "the config counts an expert that no file has",
                code="experts-missing",
                where=path,
                expected=f"at most {most:,}",
                found=f"{count:,}",
                hint=OTHER_CONFIG,
            )
        with torch.device("meta"):
            made = SplitExperts(count, hidden, double // 2, module.act_fn)
        parent, _, leaf = path.rpartition(".")
        setattr(model.get_submodule(parent), leaf, made)


def _plain(parameters: dict[str, nn.Parameter]) -> bool:
    count, double, hidden = parameters["gate_up_proj"].shape
    return tuple(parameters["down_proj"].shape) == (count, hidden, double // 2)
