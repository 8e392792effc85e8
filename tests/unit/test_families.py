"""Model families: roles, fused sets, MLPs, expert names."""

import pytest
from w4pack.convert.core import families


@pytest.mark.parametrize(
    ("architecture", "name", "expected"),
    [
        ("MixtralForCausalLM", "model.layers.0.mlp.experts.3.gate_proj", "model.layers.0.block_sparse_moe.experts.3.w1"),
        ("MixtralForCausalLM", "model.layers.0.mlp.gate", "model.layers.0.block_sparse_moe.gate"),
        ("Qwen3MoeForCausalLM", "model.layers.0.mlp.experts.3.up_proj", "model.layers.0.mlp.experts.3.up_proj"),
        ("UnheardOf", "model.layers.0.mlp.experts.3.up_proj", "model.layers.0.mlp.experts.3.up_proj"),
    ],
)
def test_expert_names(architecture: str, name: str, expected: str) -> None:
    assert families.rename_experts([architecture], name) == expected
