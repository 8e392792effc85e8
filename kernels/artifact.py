"""An artifact on disk, known from its headers alone: which layers are packed, and where every tensor lies.

``open_artifact`` reads config.json, the index, the headers and the manifest, checks all of it, and lists
every problem at once. No byte of a tensor is read, so a folder that cannot run is refused in milliseconds,
before anything is allocated. No torch: the same answers serve tools that only look.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from w4pack.convert.dialects import Claims
from w4pack.convert.dialects import w4pack as dialect
from w4pack.convert.dialects.online import Online
from w4pack.convert.dialects.online_reading import parse
from w4pack.convert.dialects.recorded import changed
from w4pack.convert.errors import Refused, SourceError, W4PackError, quantize_hint
from w4pack.convert.files import counts
from w4pack.convert.files.checkpoint import CONFIG, QUANT_CONFIGS, Checkpoint, open_checkpoint
from w4pack.convert.files.described import COMPUTED, relabelled
from w4pack.convert.files.jsonfile import read_object
from w4pack.convert.files.local import LocalStore
from w4pack.convert.files.store import Store
from w4pack.convert.files.tensorfile import TensorInfo
from w4pack.kernels import spec as specs_of
from w4pack.kernels.packed import compare, packed_modules, shown, spec_of, tensor_error
from w4pack.kernels.spec import LinearSpec

Expected = tuple[str | None, tuple[int, ...]]
STRICT_NOTICES = {
    "not-in-index": "the index does not name every tensor of its shards",
    "index-total-size": "the index gives another total size",
    "duplicate-tensor": "a tensor lies in two files",
    "stray-weights": "a second set of weights lies beside the shards",
}


@dataclass(frozen=True, slots=True)
class Artifact:
    """A checked artifact.

    folder    as given
    config    parsed config.json
    quant     its quantization_config
    specs     module -> what it is, for every packed linear, in natural order of names
    tensors   name -> file, offset in the file, bytes, safetensors dtype, shape; everything in the files
    files     file name -> (path with links resolved, size in bytes)
    dense     names of tensors that belong to no packed linear
    manifest  what the converter wrote of all this; None without a manifest
    """

    folder: Path
    config: Mapping[str, Any] = field(repr=False)
    quant: Mapping[str, Any] = field(repr=False)
    specs: dict[str, LinearSpec] = field(repr=False)
    tensors: dict[str, TensorInfo] = field(repr=False)
    files: dict[str, tuple[Path, int]] = field(repr=False)
    dense: tuple[str, ...] = field(repr=False)
    manifest: Mapping[str, Any] | None = field(repr=False)

    @property
    def online(self) -> Online:
        """What runs between the linears."""
        return parse(self.quant.get("online", []))

    def parts(self, module: str) -> dict[str, TensorInfo]:
        """Return the tensors of a packed module by suffix: ``weight``, ``weight_scale``, ..."""
        return {suffix: self.tensors[f"{module}.{suffix}"] for suffix in self.specs[module].shapes()}

    def read(self, info: TensorInfo) -> bytes:
        """Read a small tensor: an act-order."""
        with self.files[info.file][0].open("rb") as file:
            return os.pread(file.fileno(), info.nbytes, info.offset)

    def fused(self, modules: Iterable[str], *, same_order: bool = False) -> LinearSpec | None:
        """Return the spec of packed modules side by side, or None if they must stay apart.

        As ``spec.fuse``; scales and biases must have the same dtypes too.
        """
        names = list(modules)
        kinds = {tuple((s, info.dtype) for s, info in self.parts(name).items()) for name in names}
        fused = specs_of.fuse([self.specs[name] for name in names], same_order=same_order)
        return fused if len(kinds) == 1 else None


def open_artifact(path: str | os.PathLike[str], *, online: bool = False) -> Artifact:
    """Open the artifact in a folder. Reads headers only.

    online  known ``online`` records are accepted: whoever asks for it runs what they say

    Raises SourceError for broken, missing or disagreeing files and tensors; Refused for a folder that is no
    artifact, and for one whose version, layout, keys or ``online`` records are not known here; VerifyError
    for headers and ``online`` records that are not those that were written. Several problems come as one
    error that lists them.
    """
    with LocalStore(path) as store:
        quant, claims = read_config(store, online=online)
        with open_checkpoint(store) as checkpoint:
            files = {name: (store.path(name), store.files()[name]) for name in checkpoint.weight_files}
            return _check(checkpoint, Path(path), quant, claims, files)


# ---------------------------------------------------------------- config.json


def read_config(store: Store, *, online: bool = False) -> tuple[Mapping[str, Any], Claims]:
    """Return an artifact's quantization_config, and what it claims, from config.json alone.

    Raises SourceError and Refused as ``open_artifact`` does.
    """
    quant = _settings(store)
    claims = dialect.claims(quant)
    refusals = (*claims.refusals, *(() if online else dialect.run_time(quant)))
    if refusals:
        raise Refused.together([_unknown(key, found, store.label) for key, found in refusals])
    return quant, claims


def _settings(store: Store) -> Mapping[str, Any]:
    if CONFIG not in store.files():
        raise _no_artifact(store.label, "a folder without config.json")
    config = read_object(store, CONFIG)[1]
    quant = config.get("quantization_config")
    if not isinstance(quant, dict):
        packed = any(name in store.files() for name in QUANT_CONFIGS)
        hint = None if packed else quantize_hint(store.label)
        raise _no_artifact(store.label, "a checkpoint without quantization_config", hint)
    method = quant.get("quant_method")
    if method != "w4pack":
        raise _no_artifact(store.label, f"a checkpoint with quant_method {str(method)[:80]!r}")
    return quant


def _no_artifact(label: str, found: str, hint: str | None = None) -> Refused:
    return Refused(
        "not a w4pack artifact",
        code="no-artifact",
        where=label,
        expected="config.json with quantization_config.quant_method 'w4pack'",
        found=found,
        hint=hint or f"w4pack convert {label} OUT",
    )


def _unknown(key: str, found: str, label: str) -> W4PackError:
    where = f"{os.path.join(label, CONFIG)}: quantization_config.{key}"  # noqa: PTH118 - the user's spelling
    if key.startswith("online."):
        return Refused(
            "the artifact asks for a transform that this version of w4pack does not run",
            code="artifact-online",
            where=where,
            expected="records that this version knows, or none",
            found=found,
            hint="use the version of w4pack that wrote it, or a later one",
        )
    return dialect.unknown(key, found, where)


# ---------------------------------------------------------------- tensors


def _check(
    checkpoint: Checkpoint,
    folder: Path,
    quant: Mapping[str, Any],
    claims: Claims,
    files: dict[str, tuple[Path, int]],
) -> Artifact:
    tensors = dict(checkpoint.tensors)
    problems: list[W4PackError] = list(_oddities(checkpoint))
    problems += counts.layer_problems(checkpoint.config, tensors)
    problems += counts.size_problems(checkpoint.config, [info.shape for info in tensors.values()])
    packed = packed_modules(tensors, quant)
    specs: dict[str, LinearSpec] = {}
    for module, found in packed.items():
        spec = spec_of(module, found, quant, claims)
        if isinstance(spec, LinearSpec):
            specs[module] = spec
            problems += compare(module, spec, found)
        else:
            problems.append(spec)
    if not packed:
        problems.append(_no_artifact(checkpoint.label, "no packed layer in the files"))
    manifest = None if problems else checkpoint.manifest()
    if manifest is not None:
        problems += relabelled(tensors, manifest, checkpoint.label)
        problems += changed(parse(quant.get("online", [])), manifest, checkpoint.label)
    if problems:
        for problem in problems:
            if isinstance(problem, SourceError) and problem.hint is None:
                problem.hint = f"w4pack verify {checkpoint.label}"
        raise Refused.together(problems)
    ours = {info.name for found in packed.values() for info in found.values()}
    dense = tuple(name for name in tensors if name not in ours)
    return Artifact(folder, checkpoint.config, quant, specs, tensors, files, dense, manifest)


def _oddities(checkpoint: Checkpoint) -> Iterator[SourceError]:
    """What a converter may only mention is an error in a file that w4pack wrote."""
    for file in checkpoint.weight_files:
        if not file.endswith(".safetensors"):
            yield SourceError(
                "an artifact has safetensors files only",
                code="not-safetensors",
                where=file,
                expected="*.safetensors",
            )
    for notice in checkpoint.notices:
        if notice.code in STRICT_NOTICES:
            what = STRICT_NOTICES[notice.code]
            yield SourceError(
                what, code="bad-index", where=notice.where, expected=notice.expected, found=notice.found
            )


# ---------------------------------------------------------------- what a model expects


def is_computed(name: str) -> bool:
    """Tell whether a tensor is a table that every model computes for itself: old files hold some, at whatever
    precision, and all loaders leave them aside.
    """
    return name.endswith(COMPUTED)


def compare_names(
    artifact: Artifact, expected: Mapping[str, Expected], *, tied: Mapping[str, str] | None = None
) -> None:
    """Raise one SourceError that lists what a model misses in the files, what it has no place for, and what
    has another shape or dtype.

    expected  name -> (safetensors dtype, or None where any will do; shape)
    tied      name -> the name whose tensor it shares: the files may hold either, or both
    """
    shared = dict(tied or {})
    held = {shared.get(name, name) for name in artifact.tensors}
    known = {shared.get(name, name) for name in expected}
    problems: list[W4PackError] = []
    for name, (dtype, shape) in expected.items():
        info = artifact.tensors.get(name)
        wanted = f"{dtype or 'any dtype'} {list(shape)}"
        if info is None:
            if shared.get(name, name) not in held:
                problems.append(
                    tensor_error(
                        "a tensor of the model is missing in the artifact",
                        name,
                        wanted,
                        None,
                        "missing-tensor",
                    )
                )
        elif info.shape != tuple(shape) or dtype not in (None, info.dtype):
            problems.append(
                tensor_error("a tensor of the artifact does not fit the model", name, wanted, shown(info))
            )
    for name, info in artifact.tensors.items():
        if shared.get(name, name) not in known:
            problems.append(
                tensor_error(
                    "the artifact has a tensor that the model has no place for",
                    name,
                    "no such tensor",
                    shown(info),
                    "extra-tensor",
                )
            )
    if problems:
        raise Refused.together(problems)
