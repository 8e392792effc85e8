"""Whether the headers of an artifact are those that it was written with: `eval` and `check` ask here."""

from w4pack.convert.errors import W4PackError
from w4pack.convert.files.described import read_manifest, relabelled
from w4pack.convert.source.detect import Source


def relabelled_in(source: Source) -> tuple[W4PackError, ...]:
    """Return what says that tensors of an artifact have other dtypes or shapes than they were written with.

    Nothing of other outputs of w4pack: their engines do not look, and people save them anew in another dtype.

    Raises SourceError for a manifest that cannot be read.
    """
    if source.claims is None or source.claims.method != "w4pack":
        return ()
    checkpoint = source.checkpoint
    return tuple(relabelled(checkpoint.tensors, read_manifest(checkpoint.store) or {}, checkpoint.label))
