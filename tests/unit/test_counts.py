"""What a config claims against names and shapes: layers, sizes, no claim."""

from typing import Any

import pytest

from w4pack.convert.files.counts import layer_problems, size_problems

SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (320, 64),
    **{f"model.layers.{n}.mlp.experts.{e}.w1.weight": (96, 64) for n in (0, 1, 3) for e in range(9)},
    **{f"vision.blocks.{n}.norm.weight": (64,) for n in range(2)},
    "model.empty": (10**9, 0),
}


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"num_hidden_layers": 2, "vocab_size": 320, "hidden_size": 64, "num_experts": 9},
        {
            "num_hidden_layers": "9",
            "vocab_size": None,
            "hidden_size": True,
        },  # transformers says what these are
        {"num_hidden_layers": -1, "vocab_size": -1},
        {"text_config": {"num_hidden_layers": 2}, "vision_config": {"num_hidden_layers": 30}},
        {"num_hidden_layers": 1000},  # layers may share their tensors
        {"num_hidden_layers": 2, "intermediate_size": 10**6},  # some families have it and make nothing of it
    ],
)
def test_claims_that_the_files_may_hold_are_none_of_ours(config: dict[str, Any]) -> None:
    assert not [*layer_problems(config, SHAPES), *size_problems(config, SHAPES.values())]


def test_claims_of_many_digits_and_files_without_layers_are_told_in_few_words() -> None:
    (problem,) = layer_problems({"num_hidden_layers": 10**4000}, {"head.weight": (2, 2)})
    assert problem.expected == "at most 1"
    assert len(str(problem.found)) == 80


@pytest.mark.parametrize(
    ("config", "where", "expected"),
    [
        ({"num_hidden_layers": 1001}, "num_hidden_layers", "at most 31"),
        ({"n_layer": 10**12, "text_config": {}}, "n_layer", "at most 31"),
        ({"text_config": {"num_hidden_layers": 1001}}, "text_config.num_hidden_layers", "at most 31"),
        (
            {"num_hidden_layers": 1001, "text_config": {"num_hidden_layers": 2}},
            "num_hidden_layers",
            "at most 31",
        ),
        ({"vision_config": {"depth": 1001}}, "vision_config.depth", "at most 31"),
        (
            {"thinker_config": {"text_config": {"num_layers": 1001}}},
            "thinker_config.text_config.num_layers",
            "at most 31",
        ),
        ({"vocab_size": 321, "text_config": {}}, "vocab_size", "at most 320, the longest side"),
        ({"vocab_size": 321}, "vocab_size", "at most 320, the longest side of a tensor"),
        ({"text_config": {"num_experts": 10**9}}, "text_config.num_experts", "at most 320"),
    ],
)
def test_claims_beyond_the_files_are_named(config: dict[str, Any], where: str, expected: str) -> None:
    (problem,) = [*layer_problems(config, SHAPES), *size_problems(config, SHAPES.values())]
    assert problem.where == f"config.json: {where}"
    assert str(problem.expected).startswith(expected)
