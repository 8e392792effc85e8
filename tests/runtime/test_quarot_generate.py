"""Every way of ``model.generate`` over the quantized cache: tokens and logits are those of a loop without it.

The loop passes a row alone, whole, without padding and without a cache, once for each token. An artifact
without ``online`` records goes the same ways over the caches of transformers.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import w4pack  # noqa: E402
from runtime import quarot_models as models  # noqa: E402
from runtime import quarot_reference as fake  # noqa: E402
from w4pack.convert import convert  # noqa: E402
from w4pack.convert.planning.quantize_options import QuantizeOptions  # noqa: E402
from w4pack.kernels.hf.kv_cache import KVLayer  # noqa: E402

NEW, PAD = 6, 0
MOST = 0.05  # of logits: sums of other shapes, and what they round; a lost token moves them by more than 1
PAGE = 64  # tokens of a page: the longest prompt crosses its end while it is answered
LENGTHS = (61, 17, 40)
RANDOM = torch.Generator().manual_seed(0)
PROMPTS = [torch.randint(3, 256, (length,), generator=RANDOM) for length in LENGTHS]
FIXED: dict[str, Any] = {
    "max_new_tokens": NEW,
    "pad_token_id": PAD,
    "eos_token_id": None,
    "return_dict_in_generate": True,
    "output_logits": True,
}


@pytest.fixture(scope="module")
def online(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return w4pack.load(models.artifact("llama", tmp_path_factory.mktemp("online"), **models.SMALL))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    place = tmp_path_factory.mktemp("plain")
    source = models.source("llama", place / "source", **models.SMALL)
    convert(source, place / "out", quantize=QuantizeOptions(method="rtn", group_size=64))
    return w4pack.load(place / "out")


@pytest.fixture(scope="module", params=["online", "plain"])
def model(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


def last_logits(model: Any, row: Any) -> Any:
    """The logits after a row, alone and without a cache."""
    with torch.no_grad():
        return model(row[None], use_cache=False).logits[0, -1].float()


def batch(rows: list[Any], side: str = "left") -> dict[str, Any]:
    """Rows of any length, padded on one side, with their mask."""
    width = max(map(len, rows))
    ids = torch.full((len(rows), width), PAD)
    mask = torch.zeros_like(ids)
    for n, row in enumerate(rows):
        span = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        ids[n, span], mask[n, span] = row, 1
    return {"input_ids": ids, "attention_mask": mask}


def cache_of(found: Any) -> Any:
    """The cache that generate returns; it has another name since 5.2x."""
    return next(c for c in (getattr(found, n, None) for n in ("cache", "past_key_values")) if c is not None)


def answers(found: Any) -> Any:
    return found.sequences[:, -NEW:]


def check(model: Any, found: Any, rows: list[Any], *, each: int = 1, likeliest: bool = True) -> None:
    """Compare every step's logits with the loop's, after the same row and the tokens drawn so far."""
    for n in range(len(rows) * each):
        answer = answers(found)[n]
        for step, token in enumerate(answer):
            wanted = last_logits(model, torch.cat([rows[n // each], answer[:step]]))
            torch.testing.assert_close(found.logits[step][n].float(), wanted, atol=MOST, rtol=0)
            assert not likeliest or float(wanted.max() - wanted[token]) <= 2 * MOST


# ---- batches, padding, chunks ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "how",
    [{}, {"prefill_chunk_size": 5}, {"prefill_chunk_size": PAGE}, {"cache_implementation": "static"}],
    ids=str,
)
def test_padded_rows_of_a_batch_are_answered_as_alone(model: Any, how: dict[str, Any]) -> None:
    found = model.generate(**batch(PROMPTS), **FIXED | how)
    check(model, found, PROMPTS)
    kinds = {type(layer) is KVLayer for layer in cache_of(found).layers}
    assert kinds == {hasattr(model, "online_settings")}


def test_padding_on_the_right_leaves_the_whole_row_alone(model: Any) -> None:
    """transformers answers the others after their padding, as it says; their own tokens are what is read."""
    found = model.generate(**batch(PROMPTS, "right"), **FIXED)
    free = model.generate(**batch(PROMPTS, "right"), **FIXED, use_cache=False)
    check(model, found, PROMPTS[:1])
    for logits, wanted in zip(found.logits, free.logits, strict=True):
        torch.testing.assert_close(logits, wanted, atol=MOST, rtol=0)


def test_a_row_that_ends_is_padded_and_the_others_go_on(model: Any) -> None:
    wanted = answers(model.generate(**batch(PROMPTS), **FIXED))
    end = int(wanted[1][2])
    found = model.generate(**batch(PROMPTS), **FIXED | {"eos_token_id": end})
    for answer, tokens in zip(answers(found), wanted, strict=True):
        ends = (tokens == end).nonzero()
        kept = int(ends[0]) + 1 if len(ends) else NEW
        assert torch.equal(answer[:kept], tokens[:kept])
        assert bool((answer[kept:] == PAD).all())
    assert bool((answers(found)[1, 3:] == PAD).all())


# ---- several sequences -----------------------------------------------------------------------------


@pytest.mark.parametrize("how", [{}, {"prefill_chunk_size": 7}, {"cache_implementation": "static"}], ids=str)
def test_samples_are_drawn_from_the_logits_of_their_own_tokens(model: Any, how: dict[str, Any]) -> None:
    torch.manual_seed(1)
    warm = {"do_sample": True, "num_return_sequences": 3, "temperature": 2.0, "top_k": 0}
    found = model.generate(**batch(PROMPTS), **FIXED | warm | how)
    check(model, found, PROMPTS, each=3, likeliest=False)
    assert len({tuple(answer.tolist()) for answer in answers(found)}) > 3  # samples differ


@pytest.mark.parametrize("how", [{}, {"prefill_chunk_size": 7}, {"cache_implementation": "static"}], ids=str)
def test_beams_have_the_scores_of_their_own_tokens(model: Any, how: dict[str, Any]) -> None:
    """Beams move between rows of the cache at every step."""
    beams = {"num_beams": 4, "num_return_sequences": 4, "output_scores": True, "length_penalty": 0.0}
    found = model.generate(**batch(PROMPTS), **FIXED | beams | how)
    moved = found.beam_indices[:, :NEW] // 4
    assert torch.equal(moved, torch.arange(3).repeat_interleave(4)[:, None].expand_as(moved))
    for n, answer in enumerate(answers(found)):
        score = 0.0
        for step, token in enumerate(answer):
            logits = last_logits(model, torch.cat([PROMPTS[n // 4], answer[:step]]))
            score += float(logits.log_softmax(-1)[token])
        assert abs(score - float(found.sequences_scores[n])) < MOST
    assert bool((found.beam_indices[:, 1:NEW] != found.beam_indices[:, : NEW - 1]).any())


# ---- a cache that is kept --------------------------------------------------------------------------


def passed(cache: Any) -> dict[str, Any]:
    return {fake.CACHE: cache}


def test_a_conversation_goes_on_from_its_cache(model: Any) -> None:
    first = model.generate(**batch(PROMPTS[:1]), **FIXED)
    longer = torch.cat([first.sequences[0], PROMPTS[1]])
    kept = cache_of(first)
    assert kept.get_seq_length() == LENGTHS[0] + NEW - 1
    found = model.generate(**batch([longer]), **FIXED, **passed(kept))
    check(model, found, [longer])


def test_tokens_are_taken_back_and_answered_otherwise(model: Any) -> None:
    """A turn is undone: the cache is as it was before."""
    first = model.generate(**batch(PROMPTS[:1]), **FIXED)
    kept = cache_of(first)
    kept.crop(-(NEW + 3))  # past the answer, whose last token was never passed, into the prompt
    assert kept.get_seq_length() == LENGTHS[0] - 4
    row = torch.cat([PROMPTS[0][:-4], PROMPTS[2][:9]])
    found = model.generate(**batch([row]), **FIXED, **passed(kept))
    check(model, found, [row])


def test_rows_are_selected_and_repeated(model: Any) -> None:
    first = model.generate(**batch(PROMPTS[:1] * 2), **FIXED | {"do_sample": True, "top_k": 0})
    kept = cache_of(first)
    one, several = copy.deepcopy(kept), kept
    one.batch_select_indices(torch.tensor([1]))
    row = torch.cat([first.sequences[1], PROMPTS[1]])
    found = model.generate(**batch([row]), **FIXED, **passed(one))
    check(model, found, [row])
    several.batch_repeat_interleave(2)
    firsts = [first.sequences[n] for n in (0, 0, 1, 1)]
    rows = [torch.cat([old, PROMPTS[n][:17]]) for n, old in enumerate(firsts, start=-1)]
    found = model.generate(**batch(rows), **FIXED, **passed(several))
    check(model, found, rows)


def test_an_assistant_s_tokens_are_taken_back(online: Any, plain: Any) -> None:
    """Both caches are cropped by what the model does not take; the artifacts are of different sources."""
    for model, assistant in ((online, plain), (plain, online)):
        found = model.generate(**batch(PROMPTS[:1]), **FIXED, assistant_model=assistant)
        check(model, found, [PROMPTS[0]])
