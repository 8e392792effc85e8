"""Tensors of an artifact that have the bytes of other ones, found by their samples (``samples``).

Tensors of one shape that were exchanged are told by nothing else: a model would load and say nonsense. A
tensor that is none of those that were written is only named: whoever changed it may have meant to.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from w4pack.convert.core.facts import Warning_
from w4pack.convert.errors import VerifyError, name_some
from w4pack.convert.files.tensorfile import TensorInfo

READERS = 16  # threads that read samples: they wait for the disk, not for a core
TOGETHER = 64  # tensors that one of them takes at a time


def refuse_exchanged(
    infos: Iterable[TensorInfo], written: Mapping[str, str], sample: Callable[[TensorInfo], str], folder: str
) -> tuple[Warning_, ...]:
    """Raise VerifyError that names every tensor that has the bytes of another one of the same artifact.

    Returns a warning that names those that have bytes of none, where there are any.

    written  tensor name -> sample, as the converter wrote it, of all tensors of the artifact
    sample   of a tensor, as it is now; called by several threads
    folder   of the artifact, for the message
    """
    ordered = sorted(infos, key=lambda info: (info.file, info.offset))
    parts = [ordered[at : at + TOGETHER] for at in range(0, len(ordered), TOGETHER)]

    def differing(part: Sequence[TensorInfo]) -> list[tuple[TensorInfo, str]]:
        found = [(info, sample(info)) for info in part]
        return [(info, digest) for info, digest in found if digest != written[info.name]]

    with ThreadPoolExecutor(READERS) as pool:
        changed = [pair for pairs in pool.map(differing, parts) for pair in pairs]
    owners = {digest: name for name, digest in written.items()} if changed else {}
    exchanged = {info: owners[digest] for info, digest in changed if digest in owners}
    if exchanged:
        raise _exchanged(exchanged, folder)
    return (_changed([info for info, _ in changed], folder),) if changed else ()


def _changed(infos: Sequence[TensorInfo], folder: str) -> Warning_:
    return Warning_(
        "tensor-changed",
        name_some([info.name for info in infos]),
        "the bytes that were written, as w4pack.json says",
        "others",
        f"w4pack verify {folder}",
    )


def _exchanged(owners: Mapping[TensorInfo, str], folder: str) -> VerifyError:
    """Return the error of tensors that have the bytes of others: tensor -> whose."""
    problems = [_holds([(info, owner)], folder) for info, owner in owners.items()]
    err = _holds(list(owners.items()), folder)
    err.problems = tuple(problems) if len(problems) > 1 else ()
    err.tells_all = True
    return err


def _holds(pairs: Sequence[tuple[TensorInfo, str]], folder: str) -> VerifyError:
    one = len(pairs) == 1
    files = name_some(list(dict.fromkeys(info.file for info, _ in pairs)))
    names = name_some([info.name for info, _ in pairs])
    found = pairs[0][1] if one else name_some([f"{owner} in {info.name}" for info, owner in pairs])
    return VerifyError(
        f"{'a tensor holds' if one else 'tensors hold'} the bytes that were written as another one",
        code="tensor-exchanged",
        where=f"{files}{', ' if one else ': '}{names}",
        expected=f"{'its' if one else 'their'} own, as w4pack.json says",
        found=f"those of {found}",
        hint=f"w4pack verify {folder}",
    )
