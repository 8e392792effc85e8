"""Patterns from configs: same answers as ``re``, without its traps."""

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from w4pack.convert.core import patterns

ATOMS = st.sampled_from(["a", "b", ".", r"\.", "[ab]", "[^a]", r"\d", r"\w", "[a-c1]", "(?:)", "[]a]"])


def grow(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Build larger patterns out of smaller ones."""
    counts = st.sampled_from(
        ["*", "+", "?", "{2}", "{1,3}", "{0,2}", "{2,}", "{,2}", "*?", "+?", "??", "{1,2}?"]
    )
    return st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: "(" + "|".join(parts) + ")"),
        st.tuples(inner, counts).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
        inner.map(lambda part: f"(?={part})"),
        inner.map(lambda part: f"(?!{part})"),
        inner.map(lambda part: f"^{part}"),
        inner.map(lambda part: f"{part}$"),
    )


PATTERNS = st.recursive(ATOMS, grow, max_leaves=6)
NAMES = st.text(alphabet="ab.1\n", max_size=9)


@settings(max_examples=600, deadline=None)
@given(pattern=PATTERNS, names=st.lists(NAMES, min_size=1, max_size=6))
def test_the_automaton_answers_as_re_does(pattern: str, names: list[str]) -> None:
    automaton = patterns._Automaton(patterns._Parser(pattern).whole())
    for name in names:
        assert automaton.matches(name) == (re.match(pattern, name) is not None)


@settings(max_examples=300, deadline=None)
@given(pattern=PATTERNS, name=NAMES)
def test_public_functions_answer_as_re_does(pattern: str, name: str) -> None:
    match, search = patterns.matcher(pattern), patterns.searcher(pattern)
    assert match is not None and match(name) == (re.match(pattern, name) is not None)
    assert search is not None and search(name) == (re.search(pattern, name) is not None)


@settings(max_examples=500, deadline=None)
@given(pattern=st.text(alphabet="ab.*+?{}()[]|\\^$d1,<=!P:>&-~iKR", max_size=14), name=NAMES)
def test_any_text_is_read_as_re_reads_it_or_not_at_all(pattern: str, name: str) -> None:
    match = patterns.matcher(pattern)
    if match is not None:
        assert match(name) == (re.match(pattern, name) is not None)


@pytest.mark.parametrize(
    "pattern",
    [
        r"(a+)+$", r"(.*)*x", r"(.+)+$", r"(a|aa)+$", r"(a|a)*b", r".*.*.*.*.*.*.*.*.*.*x", r"(a?){30}a{30}",
        r"a?a?a?a?a?a?a?a?a?a?a?a?a?a?a?a?a?a?a?a?a?a?a?a?a?a?aaaaaaaaaaaaaaaaaaaaaaaaaax", r"(?=(a+)+$)b",
        r"((a+)+)+$", r"^(\w+\.?)*$", r"(a|b|ab)*c", r"(?:a*)*(?:a*)*(?:a*)*c",
    ],
)  # fmt: skip
def test_explosive_patterns_answer_at_once(pattern: str) -> None:
    start = time.perf_counter()
    for read in (patterns.matcher, patterns.searcher):
        match = read(pattern)
        assert match is not None
        match("a" * 120 + "!")
    assert time.perf_counter() - start < 2


@pytest.mark.parametrize(
    "pattern",
    ["(", "a)", "[", "*a", "a**", r"\1", r"(a)\1", "(?<=a)b", "(?P=x)", r"\K", "(?R)", "a++", "(?>a)",
     "(?i)a", "[[:alpha:]]", "a{3,1}", "\\", "a" * 30_000, r"\p{L}", "(" * 500 + ")" * 500,
     "((a{999}){999}){999}"],
)  # fmt: skip
def test_what_is_not_read_has_no_matcher(pattern: str) -> None:
    assert patterns.matcher(pattern) is None
    assert patterns.searcher(pattern) is None


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        (r".*q_proj", "model.layers.0.self_attn.qkv_proj", False),
        (r".*v_proj", "model.layers.0.self_attn.qkv_proj", True),
        (r".*\.1\.mlp\.gate_proj$", "model.layers.1.mlp.gate_proj", True),
        (r".*\.1\.mlp\.gate_proj$", "model.layers.11.mlp.gate_proj", False),
        (r"^(?!.*lm_head).*$", "lm_head", False),
        (r"^(?!.*lm_head).*$", "model.norm", True),
        (r"^model\.layers\.(1|10|3)\.mlp\.(gate|up)_proj$", "model.layers.10.mlp.up_proj", True),
    ],
)
def test_patterns_of_real_configs(pattern: str, name: str, expected: bool) -> None:
    match = patterns.matcher(pattern)
    assert match is not None and match(name) is expected
