"""An operator's arguments as one value: its fields are the operator's arguments, in the operator's order."""

import pytest

torch = pytest.importorskip("torch")

from w4pack.kernels.quarot import calls, int_moe_ops, int_ops, kv, quantize_ops  # noqa: E402

OPERATORS = (int_moe_ops, int_ops, kv, quantize_ops)  # importing them registers the operators


def _arguments(operator: str) -> list[str]:
    schema = getattr(torch.ops.w4pack, operator).default._schema
    return [argument.name for argument in schema.arguments]


@pytest.mark.parametrize(
    ("operator", "value"),
    [
        ("int_gemm", calls.Product),
        ("int_moe_gemm", calls.GroupedProduct),
        ("kv_append", calls.Append),
        ("kv_attention", calls.Attention),
    ],
)
def test_the_fields_are_the_arguments(operator: str, value: type) -> None:
    assert _arguments(operator) == list(value._fields)


@pytest.mark.parametrize("operator", ["norm_quantize", "act_quantize", "heads_quantize"])
def test_the_form_comes_last(operator: str) -> None:
    assert _arguments(operator)[-4:] == list(calls.Form._fields)


def test_an_operator_is_given_its_form_as_one_value() -> None:
    operator = calls.with_form(lambda *given: given)
    assert operator("x", "", 8, 0.9, 1, 64) == ("x", "", calls.Form(8, 0.9, 1, 64))
