"""Calibration text: where it comes from, how it is cut, and a record of what was used.

Rules. A ``.jsonl`` file holds one object a line with a ``text``; any other file is one text. Texts are
tokenized one by one, whole, without special tokens; those of fewer than two tokens are left out, the others
joined in their order. The tokens are cut into windows of ``seqlen``; run ``seed`` takes the ``samples``
windows from number ``seed * samples`` on, round to the start. A text shorter than one window is one window.

What lies behind the last of these windows is not read: of JSONL no further line, of one long text what is
beyond ``LETTERS`` characters a token, which is read after all where it turns out too little.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from w4pack.convert.core.facts import Warning_
from w4pack.convert.errors import SourceError, UsageError
from w4pack.convert.files.tensorfile import TensorInfo
from w4pack.convert.quantize.texts import Texts

LETTERS = 8  # characters of a token at most, on average: how much of one text is read at first
LEAST = 1 << 22  # characters that are read of one text in any case
SEAM = 256  # last tokens of a text that was cut, which may be others than those of the whole text
GRAM = 16  # tokens that are hashed together for the sketch
SKETCH = 256  # smallest hashes that are kept: enough to see an overlap of a few percent
BASE = np.uint64(0x9E3779B97F4A7C15)
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight")  # a row for each token
POSITIONS = ("embed_positions.weight", "wpe.weight")  # learned: a row for each place of a window


@dataclass(frozen=True, slots=True, eq=False)
class Calibration:
    """Windows of tokens (W, L) int64, and what is recorded of them.

    source    the file's name, or ``built-in sample``
    wanted    windows that were asked for
    skipped   texts left out, of those that were read
    """

    windows: torch.Tensor
    source: str
    wanted: int
    skipped: int

    @property
    def tokens(self) -> int:
        """Tokens in all windows."""
        return self.windows.numel()

    def record(self) -> dict[str, Any]:
        """Return what the manifest says: enough to know the text again, not the text."""
        flat = self.windows.reshape(-1).numpy()
        return {
            "source": self.source,
            "windows": self.windows.shape[0],
            "seqlen": self.windows.shape[1],
            "tokens": self.tokens,
            "digest": hashlib.sha256(flat.astype("<i4").tobytes()).hexdigest(),
            "sketch": sketch(flat),
        }


def first_tokens(path: str | None, tokenizer: Any, count: int) -> tuple[torch.Tensor, int]:
    """Tokenize a file as far as it takes to know its first ``count`` tokens, or all if it has fewer.

    Returns (tokens (T,) int64, maybe more than asked for; texts left out). Raises UsageError.
    """
    letters = max(LEAST, LETTERS * count)
    while True:
        texts = Texts(path, letters)
        tokens, skipped = tokens_of(texts, tokenizer, texts.where, count)
        if not texts.cut:
            return tokens, skipped
        if tokens.numel() >= count + SEAM:
            return tokens[:-SEAM], skipped
        letters *= 2


def tokens_of(
    texts: Iterable[str], tokenizer: Any, where: str, enough: int | None = None
) -> tuple[torch.Tensor, int]:
    """Tokenize texts and join them. Returns (tokens (T,) int64, texts left out). Raises UsageError.

    enough  tokens after which no further text is asked for; None: all
    """
    found, skipped, known = [], 0, 0
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) < 2:
            skipped += 1
        else:
            found.append(torch.tensor(ids, dtype=torch.int64))
            known += len(ids)
        if enough is not None and known >= enough:
            break
    if not found:
        raise UsageError(
            "the text gives no tokens to use", where=where, expected="a text of two tokens or more"
        )
    return torch.cat(found), skipped


def cut(tokens: torch.Tensor, samples: int, seqlen: int, seed: int) -> torch.Tensor:
    """Return the windows (W, L) of run ``seed``: see the module's rules."""
    available = tokens.numel() // seqlen
    if available == 0:
        return tokens.unsqueeze(0)
    rows = tokens[: available * seqlen].view(available, seqlen)
    count = min(samples, available)
    first = seed * samples
    return rows[[(first + i) % available for i in range(count)]]


def calibrate(
    path: str | None,
    tokenizer: Any,
    *,
    samples: int,
    seqlen: int,
    seed: int,
    given: tuple[list[str], str] | None = None,
) -> Calibration:
    """Read, tokenize and cut the calibration text. Raises UsageError for one that holds nothing.

    ``given``: texts that were read already, and their name.
    """
    wanted = (seed + 1) * samples * seqlen
    if given is None:
        name = Texts(path).name
        tokens, skipped = first_tokens(path, tokenizer, wanted)
    else:
        name = given[1]
        tokens, skipped = tokens_of(given[0], tokenizer, path or name, wanted)
    return Calibration(cut(tokens, samples, seqlen, seed), name, samples, skipped)


def check_windows(windows: torch.Tensor, config: Mapping[str, Any], infos: Mapping[str, TensorInfo]) -> None:
    """Raise UsageError for windows (W, L) that a model cannot embed: its tables end before they do.

    infos  name of each of the model's tensors -> header
    """
    length, places = windows.shape[1], _rows(infos, POSITIONS)
    own = config.get("max_position_embeddings")
    if places is not None and isinstance(own, int):
        places = min(places, own)  # some tables begin with rows that are no places
    if places is not None and length > places:
        raise UsageError(
            "a window is longer than the model has positions",
            where="--seqlen",
            expected=f"at most {places}",
            found=str(length),
        )
    known, largest = _rows(infos, EMBEDDINGS), int(windows.max())
    if known is not None and largest >= known:
        raise SourceError(
            "the tokenizer gives tokens that the model does not have",
            code="tokenizer-mismatch",
            where="tokenizer",
            expected=f"tokens below {known:,}, the rows of the embeddings",
            found=f"{largest:,}",
            hint="the tokenizer's files are another model's: fetch those of this checkpoint",
        )


def positions_of(config: Mapping[str, Any]) -> int | None:
    """Return the positions that a model was made for, a window's at least; None: config.json does not say.

    Of its text model in a model of several kinds.
    """
    text = config.get("text_config")
    own = (text if isinstance(text, Mapping) else config).get("max_position_embeddings")
    return own if type(own) is int and own >= 2 else None


def too_long(windows: torch.Tensor, config: Mapping[str, Any]) -> Iterator[Warning_]:
    """Warn of windows (W, L) beyond the positions that a model was made for: it computes them all the same.

    config  config.json
    """
    own, length = positions_of(config), windows.shape[1]
    if own is not None and own < length:
        expected, found = f"at most {own}, the model's positions", f"windows of {length} tokens"
        yield Warning_("windows-long", "--seqlen", expected, found, f"`--seqlen {own}` stays within them")


def _rows(infos: Mapping[str, TensorInfo], endings: tuple[str, ...]) -> int | None:
    """Return the rows of the first matrix whose name ends so."""
    found = (info for name, info in infos.items() if name.endswith(endings) and len(info.shape) == 2)
    return next((info.shape[0] for info in found), None)


def _hashes(tokens: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return a 64-bit hash of every run of ``GRAM`` tokens."""
    values = tokens.astype(np.uint64) + np.uint64(1)
    count = max(values.size - GRAM + 1, 0)
    made: np.ndarray[Any, Any] = np.zeros(count, np.uint64)
    with np.errstate(over="ignore"):
        for i in range(GRAM):
            made = (made ^ (made >> np.uint64(29))) * BASE + values[i : i + count]
        made = (made ^ (made >> np.uint64(32))) * BASE
    return made


def sketch(tokens: np.ndarray[Any, Any]) -> list[str]:
    """Return the smallest hashes of runs of tokens: texts that share passages share some of them."""
    return [f"{int(h):016x}" for h in np.unique(_hashes(tokens))[:SKETCH]]


def overlap(record: dict[str, Any], tokens: np.ndarray[Any, Any]) -> float:
    """Return the share, 0 to 1, of a recorded calibration text that occurs in ``tokens``."""
    kept = record.get("sketch")
    if not kept:
        return 0.0
    here = {f"{int(h):016x}" for h in _hashes(tokens)}
    return sum(item in here for item in kept) / len(kept)
