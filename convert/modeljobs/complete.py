"""Whether a checkpoint has every tensor that its class needs: known from names, before a byte is read."""

import torch

from w4pack.convert.errors import Refused
from w4pack.convert.files.provider import Provider
from w4pack.convert.planning.quantizing import ModelTensors
from w4pack.convert.quantize.skeleton import Skeleton, build, missing_tensor

STACKED = "gate_up_proj"  # experts of a layer in one tensor, which stay as they are where nothing is run


def refuse_incomplete(model: ModelTensors, provider: Provider, method: str) -> None:
    """Raise SourceError for the tensors that the model's class has and the checkpoint lacks, all at once.

    ``rtn`` runs nothing, so a class that nobody can build, or a file with names of its own, is no obstacle.
    """
    config = {**model.config, **model.config_changes}
    try:
        skeleton = build(config, provider, torch.device("meta"), torch.float32)
    except Refused:
        if method == "rtn":
            return
        raise
    lacking = skeleton.lacking()
    if method == "rtn":
        lacking = _without_class(skeleton, lacking)
    if lacking:
        raise Refused.together([missing_tensor(path) for path in lacking])


def _without_class(skeleton: Skeleton, lacking: list[str]) -> list[str]:
    """Leave out what is missing by another spelling alone: no layer is named so, or experts are stacked."""
    if not any(path.startswith(f"{skeleton.path}.") for path in skeleton.names):
        return []
    stacked = [name.removesuffix(STACKED) for name in skeleton.names if name.endswith(f".experts.{STACKED}")]
    return [path for path in lacking if not path.startswith(tuple(stacked))]
