"""How weights are quantized: values that decide bytes, apart from what each linear's scheme says."""

from dataclasses import dataclass

STAGE_BYTES = {"cpu": 1 << 30, "cuda": 8 << 30}  # of experts' Hessians that exist at a time, one at the least
WITNESS = 512  # tokens whose predictions are compared with the source's in the end


@dataclass(frozen=True, slots=True)
class Settings:
    """How codes are chosen.

    method    gptq, or rtn: round to nearest after the search for clipping; needs no calibration
    damping   share of the mean diagonal of H that is added to it at first
    strength  GPTAQ: how far weights are moved towards the source's outputs, 0 (not) to 1
    sinks     GPTAQ: whether the first token of each window counts in that. All others attend to it, and its
              activations are huge and after a rotation equally large: a quantizer that clips shortens all of
              them. Weights that make up for that are wrong with any other quantizer.
    """

    method: str = "gptq"
    damping: float = 0.03
    strength: float = 0.0
    sinks: bool = True
