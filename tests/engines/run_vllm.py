"""One model in vLLM on the CPU: the whole distribution at every position of the prompt."""

from __future__ import annotations

import os
from pathlib import Path
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

import torch
from safetensors.torch import load_file
from vllm import LLM, SamplingParams
from vllm.config import PoolerConfig
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
    if case.get("pooled"):
        return pooled(case, how)
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


def pooled(case: dict[str, Any], how: dict[str, Any]) -> dict[str, Any]:
    """Score a model without a head: the states of its tokens, and then the file's head, in fp32."""
    del how["max_logprobs"]
    how["skip_tokenizer_init"] = False
    model = LLM(
        case["folder"],
        runner="pooling",
        pooler_config=PoolerConfig(task="token_embed", use_activation=False),
        **how,
    )
    (answer,) = model.encode({"prompt_token_ids": case["tokens"]}, pooling_task="token_embed", use_tqdm=False)
    head = load_file(Path(case["folder"]) / "model.safetensors")["lm_head.weight"].float()
    logits = answer.outputs.data.float()[:-1] @ head.t()
    return {"logprobs": torch.log_softmax(logits, -1).tolist()}
