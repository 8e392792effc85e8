"""One model in vLLM on the CPU: the whole distribution at every position of the prompt."""

from __future__ import annotations

import os
from typing import Any

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="WARNING",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
)

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Load and score."""
    vocabulary = case["vocabulary"]
    how: dict[str, Any] = {
        "dtype": case.get("dtype") or "auto",
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "max_model_len": 64,
        "max_num_seqs": 2,
        "max_logprobs": vocabulary,
        "seed": 0,
        "trust_remote_code": False,
        "enable_prefix_caching": False,
        "tensor_parallel_size": case.get("ranks", 1),
        "load_format": case.get("loader") or "auto",
    }
    model = LLM(case["folder"], **{**how, **case.get("options", {})})
    if case.get("reload"):
        model.collective_rpc("reload_weights")
    wanted = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=vocabulary, detokenize=False)
    adapter = LoRARequest("adapter", 1, case["adapter"]) if case.get("adapter") else None
    (answer,) = model.generate(
        {"prompt_token_ids": case["tokens"]}, wanted, use_tqdm=False, lora_request=adapter
    )
    rows = answer.prompt_logprobs[1:]
    return {"logprobs": [[row[token].logprob for token in range(vocabulary)] for row in rows]}
