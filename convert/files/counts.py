"""Sizes that a config.json claims, held against what the headers list.

A config of transformers makes lists as long as its count of layers, and a model class builds as many modules,
before anything is compared with a file: a claim of ten million layers takes memory until there is none left.
So claims are looked at before either is made. They are bounded, not checked: layers may share their tensors
(ALBERT), be counted once for each time that they run (HRM), or be of a part that was left out. A key that is
not there is no claim.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from w4pack.convert.core.families import TEXT_SECTIONS
from w4pack.convert.errors import Refused, SourceError

LAYERS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"),
    *("num_layers_per_stack", "depth"),
)
CHEAP = 1000  # layers without numbers, which any process has memory for
# None of these is larger than the longest side of any tensor: some tensor has a side of that size, or of a
# multiple of it.
SIDES = (
    *("vocab_size", "hidden_size", "n_embd", "d_model", "head_dim", "num_attention_heads", "n_head"),
    *("num_experts", "num_local_experts", "n_routed_experts"),
)
OTHER_CONFIG = "config.json is of another model, or shards are missing: fetch the checkpoint again"


def check_layers(config: Mapping[str, Any], names: Collection[str]) -> None:
    """Raise SourceError for a config that counts more layers than there are tensors.

    config  parsed config.json
    names   of everything in the files
    """
    if problems := list(layer_problems(config, names)):
        raise Refused.together(problems)


def layer_problems(config: Mapping[str, Any], names: Collection[str]) -> Iterator[SourceError]:
    """Yield what ``check_layers`` raises: of the model, and of its parts for text, vision, audio."""
    for where, claimed in _claims(config, LAYERS, max(len(names), CHEAP)):
        yield SourceError(
            "the config counts more layers than there are tensors",
            code="layers-missing",
            where=where,
            expected=f"at most {len(names):,}",
            found=claimed,
            hint=OTHER_CONFIG,
        )


def size_problems(config: Mapping[str, Any], shapes: Iterable[Sequence[int]]) -> Iterator[SourceError]:
    """Yield an error for each size of a language model that is larger than anything in the files.

    config  parsed config.json
    shapes  of everything in the files
    """
    largest = max((side for shape in shapes if 0 not in shape for side in shape), default=0)
    plain = {
        key: value for key, value in config.items() if key in TEXT_SECTIONS or not isinstance(value, dict)
    }
    for where, claimed in _claims(plain, SIDES, largest):
        yield SourceError(
            "the config claims a size that nothing in the files has",
            code="config-size",
            where=where,
            expected=f"at most {largest:,}, the longest side of a tensor",
            found=claimed,
            hint=OTHER_CONFIG,
        )


def _claims(config: Mapping[str, Any], keys: Collection[str], most: int) -> Iterator[tuple[str, str]]:
    """Yield (where, what it says) of each of ``keys`` in a config, and in what lies in it, above ``most``.

    Of what is no whole number transformers says what it is.
    """
    left: list[tuple[str, Mapping[str, Any]]] = [("config.json: ", config)]
    while left:
        inside, part = left.pop()
        for key, value in part.items():
            if key in keys and type(value) is int and value > most:
                yield inside + key, f"{value:,}"[:80]
        left += [(f"{inside}{name}.", value) for name, value in part.items() if isinstance(value, dict)]
