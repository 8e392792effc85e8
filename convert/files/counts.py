"""Sizes that a config.json claims, held against what the headers list.

A config of transformers makes lists as long as its count of layers, and a model class builds as many modules,
before anything is compared with a file: a claim of ten million layers takes memory until there is none left.
So claims are looked at before either is made. A key that is not there is no claim.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from w4pack.convert.core.families import MAX_DIGITS
from w4pack.convert.errors import Refused, SourceError

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
# None of these is larger than the longest side of any tensor: some tensor has a side of that size, or of a
# multiple of it.
SIDES = (
    *("vocab_size", "hidden_size", "n_embd", "d_model", "head_dim", "num_attention_heads", "n_head"),
    *("num_experts", "num_local_experts", "n_routed_experts"),
)
OTHER_CONFIG = "config.json is of another model, or shards are missing: fetch the checkpoint again"


def check_layers(config: Mapping[str, Any], names: Collection[str]) -> None:
    """Raise SourceError for a config that counts layers which no file has; it names the first.

    config  parsed config.json
    names   of everything in the files
    """
    if problems := list(layer_problems(config, names)):
        raise Refused.together(problems)


def layer_problems(config: Mapping[str, Any], names: Collection[str]) -> Iterator[SourceError]:
    """Yield what ``check_layers`` raises."""
    text, inside = _text(config)
    for key in LAYERS:
        yield from _missing_layer(inside + key, text.get(key), names)
    for name, part in config.items():  # vision, audio: where their layers lie is the class's own matter
        for key in LAYERS if isinstance(part, dict) and part is not text else ():
            yield from _too_large(f"{name}.{key}", part.get(key), len(names), "the tensors in the files")


def size_problems(config: Mapping[str, Any], shapes: Iterable[Sequence[int]]) -> Iterator[SourceError]:
    """Yield an error for each size of a config that is larger than anything in the files.

    shapes  of everything in the files
    """
    text, inside = _text(config)
    largest = max((side for shape in shapes if 0 not in shape for side in shape), default=0)
    for key in SIDES:
        yield from _too_large(inside + key, text.get(key), largest, "the longest side of a tensor")


def _text(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """Return the config of the language model, and the path of its keys."""
    text = config.get("text_config")
    return (text, "text_config.") if isinstance(text, dict) else (config, "")


def _missing_layer(key: str, claimed: object, names: Collection[str]) -> Iterator[SourceError]:
    if type(claimed) is not int or claimed < 1:
        return  # transformers says what it is instead
    lists: dict[str, set[int]] = {}
    for name in names:
        path, number = _numbered(name)
        if number is not None:
            lists.setdefault(path, set()).add(number)
    firsts = {path: next(n for n in count() if n not in found) for path, found in lists.items()}
    path = max(firsts, key=lambda path: firsts[path], default="layers.")
    there = firsts.get(path, 0)
    if claimed > there:
        yield SourceError(
            "the config counts a layer that no file has",
            code="layers-missing",
            where=f"config.json: {key}",
            expected=f"at most {there:,}: there is no tensor of `{path}{there}`",
            found=f"{claimed:,}"[:80],
            hint=OTHER_CONFIG,
        )


def _numbered(name: str) -> tuple[str, int | None]:
    """Return the list that a tensor is of, and its number there: ``model.layers.``, 3; None: of no list."""
    parts = name.split(".")
    for place, part in enumerate(parts):
        if part.isascii() and part.isdigit() and len(part) < MAX_DIGITS:
            return "".join(f"{before}." for before in parts[:place]), int(part)
    return "", None


def _too_large(key: str, claimed: object, most: int, what: str) -> Iterator[SourceError]:
    if type(claimed) is int and claimed > most:
        yield SourceError(
            "the config claims a size that nothing in the files has",
            code="config-size",
            where=f"config.json: {key}",
            expected=f"at most {most:,}, {what}",
            found=f"{claimed:,}"[:80],
            hint=OTHER_CONFIG,
        )
