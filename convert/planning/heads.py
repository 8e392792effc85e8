"""A head that the config ties to the embeddings and that the file stores all the same.

Rotating and quantizing compute with the weights, so they have to know which of the two is the head: the
same bytes are one head, other bytes are refused. Packed layers that only change their form leave both as they
are, with a warning.
"""

from collections.abc import Mapping
from typing import Any

from w4pack.convert.core.facts import Warning_
from w4pack.convert.errors import Refused
from w4pack.convert.files.checkpoint import Checkpoint
from w4pack.convert.files.tensorfile import TensorInfo
from w4pack.convert.planning.decisions import State
from w4pack.convert.rotate.architecture import find
from w4pack.convert.source.detect import Source

TIE = "tie_word_embeddings"
HEAD = "lm_head.weight"  # of classes without a description


def stored_twice(config: Mapping[str, Any], infos: Mapping[str, TensorInfo]) -> tuple[str, str] | None:
    """Return (embeddings, head) of a model whose config ties them and whose file has both, else None."""
    try:
        architecture = find(config)
    except Refused:
        tied, names = config.get(TIE), [(n, HEAD) for n in infos if n.endswith("embed_tokens.weight")]
    else:
        tied = config.get(TIE, architecture.tied)
        names = [(f"{architecture.embeddings[0]}.weight", f"{architecture.head}.weight")]
    found = (pair for pair in names if pair[0] in infos and pair[1] in infos)
    return next(found, None) if tied is True else None


def refuse_two_heads(source: Source) -> None:
    """Raise Refused for a tied model that stores another head: nobody could say which of the two counts."""
    infos = source.checkpoint.tensors
    pair = stored_twice(source.config, infos)
    if pair is None or same_bytes(source.checkpoint, infos[pair[0]], infos[pair[1]]):
        return
    table, head = pair
    raise Refused(
        "the config ties the head to the embeddings, and the file holds another head",
        code="tied-differs",
        where=f"{infos[head].file}, {head}",
        expected=f"the bytes of {table}, or `{TIE}: false` in config.json",
        found="other values",
        hint=f"if the stored head is the model's, write `{TIE}: false` into config.json; if not, save the "
        "checkpoint without it",
    )


def tied_head(state: State) -> None:
    """Say where a tied head is stored too: twice the bytes, or a head that engines never read."""
    infos = state.source.checkpoint.tensors
    pair = stored_twice(state.source.config, {name: infos[name] for name in state.dense if name in infos})
    if pair is None:
        return
    table, head = pair
    if same_bytes(state.source.checkpoint, infos[table], infos[head]):
        found = f"tied, stored twice, {infos[head].nbytes} bytes"
        state.warnings.append(Warning_("tied-twice", head, "stored once, as it is tied", found))
        return
    state.warnings.append(
        Warning_(
            "tied-differs",
            head,
            f"the values of {table}, as the config ties them",
            "other values; both are kept, engines use the embedding and ignore this head",
        )
    )


def same_bytes(checkpoint: Checkpoint, one: TensorInfo, other: TensorInfo) -> bool:
    """Compare two tensors byte by byte, a few MiB at a time."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    pairs = zip(checkpoint.chunks(one), checkpoint.chunks(other), strict=True)
    return all(a == b for (_, a), (_, b) in pairs)
