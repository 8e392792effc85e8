"""Whether an output of w4pack is what its manifest says: `inspect`, `check`, `eval` and `convert` ask here.

Loaders ask the same of an artifact (``kernels.artifact``, ``kernels.hashes``), by the same functions.
"""

from w4pack.convert.core.facts import Warning_
from w4pack.convert.dialects.recorded import transforms
from w4pack.convert.errors import Refused, SourceError, W4PackError
from w4pack.convert.files.described import edited, missing, relabelled, unmatched
from w4pack.convert.source.detect import Source


def is_artifact(source: Source) -> bool:
    """Tell whether a checkpoint says that it is an artifact."""
    return source.claims is not None and source.claims.method == "w4pack"


def unusable(source: Source) -> tuple[W4PackError, ...]:
    """Return why the manifest of a checkpoint cannot be used; nothing where it can, or there is none."""
    checkpoint = source.checkpoint
    try:
        transforms(checkpoint.manifest() or {}, checkpoint.label)
    except (SourceError, Refused) as err:
        return (err,)
    return ()


def problems_of(source: Source) -> tuple[W4PackError, ...]:
    """Return what stops whoever uses a checkpoint with its manifest: one that cannot be used, and tensors of
    an artifact that have other dtypes or shapes than they were written with.

    Of other outputs of w4pack headers are not compared: people save them anew in another dtype.
    """
    problems = unusable(source)
    if problems or not is_artifact(source):
        return problems
    checkpoint = source.checkpoint
    return tuple(relabelled(checkpoint.tensors, checkpoint.manifest() or {}, checkpoint.label))


def warnings_of(source: Source) -> tuple[Warning_, ...]:
    """Return the warnings of an artifact without a manifest, or with other tensors than it names; and of a
    config.json that is not as it was written.
    """
    if unusable(source):
        return ()
    checkpoint = source.checkpoint
    manifest = checkpoint.manifest()
    if manifest is None:
        return (missing(checkpoint.label),) if is_artifact(source) else ()
    other = unmatched(checkpoint.tensors, manifest, checkpoint.label) if is_artifact(source) else ()
    raw = checkpoint.config_raw
    return (*(() if raw is None else edited(raw, manifest, checkpoint.label)), *other)
