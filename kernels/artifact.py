"""An artifact on disk, known from its headers alone: which layers are packed, and where every tensor lies.

``open_artifact`` reads config.json, the index and the headers, checks all of it, and lists every problem at
once. No byte of a tensor is read, so a folder that cannot run is refused in milliseconds, before anything is
allocated. No torch: the same answers serve tools that only look.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from w4pack.convert.dialects import Claims
from w4pack.convert.dialects import w4pack as dialect
from w4pack.convert.errors import Refused, SourceError, W4PackError
from w4pack.convert.files.checkpoint import CONFIG, Checkpoint, open_checkpoint
from w4pack.convert.files.jsonfile import read_object
from w4pack.convert.files.local import LocalStore
from w4pack.convert.files.tensorfile import TensorInfo, natural_order
from w4pack.kernels import spec as specs_of
from w4pack.kernels.spec import LinearSpec

GROUP_SIZES = (-1, 32, 64, 128)
UNIT = 64  # K and N of a packed layer are rounded up to it
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

    folder   as given
    config   parsed config.json
    quant    its quantization_config
    specs    module -> what it is, for every packed linear, in natural order of names
    tensors  name -> file, offset in the file, bytes, safetensors dtype, shape; everything in the files
    files    file name -> (path with links resolved, size in bytes)
    dense    names of tensors that belong to no packed linear
    """

    folder: Path
    config: Mapping[str, Any] = field(repr=False)
    quant: Mapping[str, Any] = field(repr=False)
    specs: dict[str, LinearSpec] = field(repr=False)
    tensors: dict[str, TensorInfo] = field(repr=False)
    files: dict[str, tuple[Path, int]] = field(repr=False)
    dense: tuple[str, ...] = field(repr=False)

    def parts(self, module: str) -> dict[str, TensorInfo]:
        """Return the tensors of a packed module by suffix: ``weight``, ``weight_scale``, ..."""
        return {suffix: self.tensors[f"{module}.{suffix}"] for suffix in self.specs[module].shapes()}

    def fused(self, modules: Iterable[str], *, same_order: bool = False) -> LinearSpec | None:
        """Return the spec of packed modules side by side, or None if they must stay apart.

        As ``spec.fuse``; scales and biases must have the same dtypes too.
        """
        names = list(modules)
        kinds = {tuple((s, info.dtype) for s, info in self.parts(name).items()) for name in names}
        fused = specs_of.fuse([self.specs[name] for name in names], same_order=same_order)
        return fused if len(kinds) == 1 else None


def open_artifact(path: str | os.PathLike[str]) -> Artifact:
    """Open the artifact in a folder. Reads headers only.

    Raises SourceError for broken, missing or disagreeing files and tensors; Refused for a folder that is no
    artifact, and for one whose version, layout, keys or ``online`` records are not known here. Several
    problems come as one error that lists them.
    """
    with LocalStore(path) as store:
        config = _config(store)
        quant = config["quantization_config"]
        claims = dialect.claims(quant)
        if claims.refusals:
            raise Refused.together([_unknown(key, found, store.label) for key, found in claims.refusals])
        with open_checkpoint(store) as checkpoint:
            files = {name: (store.path(name), store.files()[name]) for name in checkpoint.weight_files}
            return _check(checkpoint, Path(path), quant, claims, files)


# ---------------------------------------------------------------- config.json


def _config(store: LocalStore) -> dict[str, Any]:
    if CONFIG not in store.files():
        raise _no_artifact(store.label, "a folder without config.json")
    config = read_object(store, CONFIG)[1]
    quant = config.get("quantization_config")
    if not isinstance(quant, dict):
        raise _no_artifact(store.label, "a checkpoint without quantization_config")
    method = quant.get("quant_method")
    if method != "w4pack":
        raise _no_artifact(store.label, f"a checkpoint with quant_method {str(method)[:80]!r}")
    return config


def _no_artifact(label: str, found: str) -> Refused:
    return Refused(
        "not a w4pack artifact",
        code="no-artifact",
        where=label,
        expected="config.json with quantization_config.quant_method 'w4pack'",
        found=found,
        hint=f"w4pack convert {label} OUT",
    )


def _unknown(key: str, found: str, label: str) -> W4PackError:
    where = f"{os.path.join(label, CONFIG)}: quantization_config.{key}"  # noqa: PTH118 - the user's spelling
    if key.startswith("online."):
        return Refused(
            "the artifact asks for a transform that this version of w4pack does not run",
            code="artifact-online",
            where=where,
            expected="no `online` records",
            found=found,
            hint="use the version of w4pack that wrote it, or a later one",
        )
    return Refused(
        f"the artifact's config has a `{key}` that this version of w4pack does not know",
        code="artifact-unknown",
        where=where,
        found=found,
        expected="what the same version wrote",
        hint="use the version of w4pack that wrote it, or a later one",
    )


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
    packed = _packed_modules(tensors, quant)
    specs: dict[str, LinearSpec] = {}
    for module, found in packed.items():
        spec = _spec(module, found, quant, claims)
        if isinstance(spec, LinearSpec):
            specs[module] = spec
            problems += _compare(module, spec, found)
        else:
            problems.append(spec)
    if not packed:
        problems.append(_no_artifact(checkpoint.label, "no packed layer in the files"))
    if problems:
        raise Refused.together(problems)
    ours = {info.name for found in packed.values() for info in found.values()}
    dense = tuple(name for name in tensors if name not in ours)
    return Artifact(folder, checkpoint.config, quant, specs, tensors, files, dense)


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


def _packed_modules(
    tensors: Mapping[str, TensorInfo], quant: Mapping[str, Any]
) -> dict[str, dict[str, TensorInfo]]:
    """Return module -> suffix -> tensor for every module that the config or the tensors call packed."""
    modules = dict.fromkeys(quant.get("modules", {}))
    for name, info in tensors.items():
        module, _, suffix = name.rpartition(".")
        is_words = suffix == "weight" and info.dtype == "I32" and len(info.shape) == 2
        if is_words or suffix in ("weight_scale", "weight_zero_point", "act_perm"):
            modules[module] = None
    found: dict[str, dict[str, TensorInfo]] = {name: {} for name in sorted(modules, key=natural_order)}
    for name, info in tensors.items():
        module, _, suffix = name.rpartition(".")
        if module in found:
            found[module][suffix] = info
    return found


def _spec(
    module: str, found: Mapping[str, TensorInfo], quant: Mapping[str, Any], claims: Claims
) -> LinearSpec | W4PackError:
    """Return what the config, and for an unlisted module the weight's shape, say of a module."""
    claim = claims.for_module(module)
    if claim is None:
        names = ", ".join(found)
        return _tensor_error("a layer that is said to be left in 16 bit is packed", module, "none", names)
    bits, group = claim.bits or 0, claim.group_size or 0
    if group not in GROUP_SIZES:
        known = ", ".join(map(str, GROUP_SIZES))
        return Refused(
            "no kernel for this group size", code="group-size", where=module, expected=known, found=str(group)
        )
    sizes = dialect.sizes(quant).get(module) or _sizes(found.get("weight"), bits)
    if sizes is None:
        return _tensor_error(
            "a packed layer has no usable weight",
            f"{module}.weight",
            "int32, (K/16, N * bits / 2)",
            _shown(found.get("weight")),
        )
    k, n, stored_k, stored_n = sizes
    if (stored_k, stored_n) != (-(-k // UNIT) * UNIT, -(-n // UNIT) * UNIT):
        rounded = f"{k} x {n}, each rounded up to {UNIT}"
        return _tensor_error(
            "the stored size of a layer does not fit its own", module, rounded, f"{stored_k} x {stored_n}"
        )
    return LinearSpec(
        k, n, bits, group, bool(claim.sym), bool(claim.desc_act), "bias" in found, stored_k, stored_n
    )


def _sizes(weight: TensorInfo | None, bits: int) -> tuple[int, int, int, int] | None:
    """Sizes of a module that the config does not list: nothing of it is padded."""
    if weight is None or len(weight.shape) != 2 or bits not in (4, 8):
        return None
    k, n = 16 * weight.shape[0], 2 * weight.shape[1] // bits
    return (k, n, k, n) if k and n and n * bits == 2 * weight.shape[1] else None


def _compare(module: str, spec: LinearSpec, found: Mapping[str, TensorInfo]) -> Iterator[SourceError]:
    """Compare the tensors of a packed module with its spec."""
    dtypes = spec.dtypes()
    for suffix, shape in spec.shapes().items():
        name, wanted = f"{module}.{suffix}", f"{' or '.join(dtypes[suffix])} {list(shape)}"
        info = found.get(suffix)
        if info is None:
            yield _tensor_error("a tensor of a packed layer is missing", name, wanted, None, "missing-tensor")
        elif info.shape != shape:
            yield _tensor_error("a tensor of a packed layer has the wrong shape", name, wanted, _shown(info))
        elif info.dtype not in dtypes[suffix]:
            yield _tensor_error("a tensor of a packed layer has the wrong dtype", name, wanted, _shown(info))
    for suffix, info in found.items():
        if suffix not in dtypes:
            wanted = ", ".join(dtypes)
            yield _tensor_error(
                "a packed layer has a tensor too many", info.name, wanted, _shown(info), "extra-tensor"
            )


def _tensor_error(
    what: str, where: str, expected: str, found: str | None, code: str = "tensor-mismatch"
) -> SourceError:
    return SourceError(what, code=code, where=where, expected=expected, found=found)


def _shown(info: TensorInfo | None) -> str:
    return "no such tensor" if info is None else f"{info.dtype} {list(info.shape)}"


# ---------------------------------------------------------------- what a model expects


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
                    _tensor_error(
                        "a tensor of the model is missing in the artifact",
                        name,
                        wanted,
                        None,
                        "missing-tensor",
                    )
                )
        elif info.shape != tuple(shape) or dtype not in (None, info.dtype):
            problems.append(
                _tensor_error("a tensor of the artifact does not fit the model", name, wanted, _shown(info))
            )
    for name, info in artifact.tensors.items():
        if shared.get(name, name) not in known:
            problems.append(
                _tensor_error(
                    "the artifact has a tensor that the model has no place for",
                    name,
                    "no such tensor",
                    _shown(info),
                    "extra-tensor",
                )
            )
    if problems:
        raise Refused.together(problems)
