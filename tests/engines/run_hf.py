"""One model in stock transformers on the CPU, as a user loads it, with its report of missing keys."""

from __future__ import annotations

import os
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    GPTQMODEL_CPU_WORKERS="2",
    TORCHDYNAMO_DISABLE="1",  # kernels that would be compiled at the first call run as they are
)

import torch
from transformers import AutoModelForCausalLM

torch.set_num_threads(1)


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Load and score."""
    model, info = AutoModelForCausalLM.from_pretrained(
        case["folder"], dtype=case.get("dtype") or "auto", device_map="cpu", output_loading_info=True
    )
    with torch.no_grad():
        logits = model(torch.tensor([case["tokens"]])).logits[0, :-1].double()
    lost = {kind: sorted(info[kind]) for kind in ("missing_keys", "unexpected_keys")}
    return {"logprobs": torch.log_softmax(logits, -1).tolist(), **lost}
