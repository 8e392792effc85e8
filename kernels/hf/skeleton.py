"""A model without numbers: transformers' own, its packed layers replaced, its names held against the file's.

Both ways into transformers use it, ``load`` and ``from_pretrained``. No tensor is read here.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedModel

from w4pack.convert.errors import Refused, SourceError, W4PackError
from w4pack.convert.source.online_places import GUIDE
from w4pack.kernels.artifact import Artifact, Expected, compare_names, is_computed
from w4pack.kernels.experts import ExpertParts
from w4pack.kernels.hf import settings
from w4pack.kernels.hf.names import Names
from w4pack.kernels.modules import PackedLinear
from w4pack.kernels.spec import LinearSpec

DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
FP32_LISTS = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A model on the ``meta`` device whose packed layers wait for an artifact's tensors.

    paths  packed module as in the file -> its place in the model
    """

    model: PreTrainedModel
    artifact: Artifact
    names: Names
    paths: Mapping[str, str]

    def layer(self, name: str) -> PackedLinear:
        """Return the layer in the place of a packed module."""
        found = self.model.get_submodule(self.paths[name])
        assert isinstance(found, PackedLinear)
        return found

    def dtype_of(self, path: str) -> torch.dtype:
        """Return the dtype of a parameter or buffer: the file's for packed tensors, for others the model's,
        or fp32 where the model class asks for it.
        """
        module, _, leaf = path.rpartition(".")
        owner = self.model.get_submodule(module)
        own: torch.dtype = getattr(owner, leaf).dtype
        wide = (part for name in FP32_LISTS for part in getattr(self.model, name, None) or ())
        packed = isinstance(owner, PackedLinear)
        return torch.float32 if not packed and any(part in path for part in wide) else own

    def wants(self, tensor: str) -> bool:
        """Tell whether the model has a place for a tensor of the file; the others it leaves aside.

        Buffers that no file is to have (``persistent=False``) are no place: the model computes them.
        """
        module, _, leaf = self.names.tensor(tensor)[0].rpartition(".")
        try:
            found = self.model.get_submodule(module)
        except AttributeError:
            return False
        return leaf in found._parameters or leaf in found._buffers.keys() - found._non_persistent_buffers_set


def build(
    model: PreTrainedModel, artifact: Artifact, dtype: torch.dtype, *, expert_layers: bool = True
) -> Skeleton:
    """Replace the packed layers of a model on ``meta`` in place, and compare all names and shapes.

    Args:
        model: as transformers makes it.
        artifact: opened.
        dtype: of activations, fp16 or bf16.
        expert_layers: make a layer for each linear of each expert. There may be 20,000, which takes seconds;
            who fills the stacks at once does without.

    Raises:
        Refused: a packed layer that the model has no place for, settings that no forward pass takes.
        SourceError: tensors that the model misses, or does not know, or that have other shapes.
    """
    settings.refuse(model)
    names = Names(model, artifact.specs)
    ignored = _left_aside(model)
    paths = {name: names.module(name) for name in artifact.specs if not ignored(f"{name}.weight")}
    _replace(model, artifact, paths, dtype, expert_layers)
    _guides(model, artifact, names)
    for tied in [n for n in model.all_tied_weights_keys if n.removesuffix(".weight") in paths.values()]:
        del model.all_tied_weights_keys[tied]  # a packed head is its own, whatever the config says
    compare_names(artifact, _expected(model, artifact, names, paths), tied=model.all_tied_weights_keys)
    return Skeleton(model, artifact, names, paths)


def mark_filled(model: nn.Module) -> None:
    """Tell transformers that all modules have their numbers: ``init_weights`` draws others for the rest, and
    ``_init_weights`` for whatever it is given, so it is asked for modules without the mark alone.
    """
    for module in model.modules():
        module._is_hf_initialized = True  # type: ignore[assignment]
        if isinstance(module, PreTrainedModel):
            module._init_weights = partial(_init_weights, module)


def _init_weights(model: PreTrainedModel, module: nn.Module) -> None:
    """Draw the numbers of a module that was made since: of embeddings that were resized, say."""
    if not getattr(module, "_is_hf_initialized", False):
        type(model)._init_weights(model, module)


# ---- replacing -------------------------------------------------------------------------------------


def _replace(
    model: PreTrainedModel,
    artifact: Artifact,
    paths: Mapping[str, str],
    dtype: torch.dtype,
    expert_layers: bool,
) -> None:
    experts: dict[str, dict[str, str]] = {}  # place of the experts -> "3.w1" -> name in the file
    problems: list[W4PackError] = []

    def layer(name: str) -> PackedLinear:
        scales = DTYPES[artifact.tensors[f"{name}.weight_scale"].dtype]
        return PackedLinear(artifact.specs[name], dtype=dtype, scale_dtype=scales)

    modules = dict(model.named_modules())
    for name, path in paths.items():
        original = modules.get(path)
        parent, _, leaf = path.rpartition(".experts.")
        if isinstance(original, nn.Linear):
            problems += _linear_problems(name, original, artifact.specs[name])
            replace(model, path, layer(name))
        elif leaf and f"{parent}.experts" in modules:
            experts.setdefault(f"{parent}.experts", {})[leaf] = name
        else:
            problems.append(_no_place(name, model, original))
    for path, named in experts.items():
        original = model.get_submodule(path)
        found = list(_expert_problems(path, original, {n: artifact.specs[m] for n, m in named.items()}))
        problems += found
        if not found:
            layers = {leaf: layer(name) for leaf, name in named.items()} if expert_layers else {}
            replace(model, path, ExpertParts(layers, original.act_fn))
    if problems:
        raise Refused.together(problems)


def replace(model: nn.Module, path: str, module: nn.Module) -> None:
    """Put a module in the place of another."""
    parent, _, leaf = path.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


def _guides(model: PreTrainedModel, artifact: Artifact, names: Names) -> None:
    """Make room for the guides of keys, where the artifact's records speak of them."""
    modules = dict(model.named_modules())
    if artifact.online.kv is None or not artifact.online.kv.guide:
        return
    for name in artifact.dense:
        module, _, leaf = names.tensor(name)[0].rpartition(".")
        if leaf == GUIDE and module in modules:
            shape = artifact.tensors[name].shape
            modules[module].register_buffer(GUIDE, torch.empty(shape, dtype=torch.float32, device="meta"))


def _linear_problems(name: str, original: nn.Linear, spec: LinearSpec) -> Iterator[W4PackError]:
    wanted, found = (original.in_features, original.out_features), (spec.in_features, spec.out_features)
    if wanted != found:
        yield SourceError(
            "a packed layer has other sizes than the model's",
            code="tensor-mismatch",
            where=name,
            expected=f"{wanted[0]} -> {wanted[1]}",
            found=f"{found[0]} -> {found[1]}",
        )
    if original.bias is not None and not spec.bias:
        yield SourceError(
            "a tensor of the model is missing in the artifact",
            code="missing-tensor",
            where=f"{name}.bias",
            expected=str(list(original.bias.shape)),
        )


def _no_place(name: str, model: nn.Module, original: nn.Module | None) -> W4PackError:
    return Refused(
        "the model class has no linear layer in the place of a packed one",
        code="no-place",
        where=name,
        expected=f"a linear layer of {type(model).__name__}",
        found="no such module" if original is None else type(original).__name__,
    )


def _expert_problems(
    path: str, original: nn.Module, specs: Mapping[str, LinearSpec]
) -> Iterator[W4PackError]:
    """Yield why the fused experts of a model class cannot be replaced, or do not fit the file's."""
    reason = _unlike(original)
    if reason:
        yield Refused(
            "the model class computes its experts in a way that the packed ones do not",
            code="experts",
            where=f"{path} ({type(original).__name__})",
            expected="gate and up side by side, an activation, down; no biases",
            found=reason,
        )
        return
    count, twice_inner, hidden = original.get_parameter("gate_up_proj").shape
    leaves: dict[str, set[int]] = {}
    for name, spec in specs.items():
        expert, _, leaf = name.partition(".")
        leaves.setdefault(leaf, set()).add(int(expert) if expert.isdigit() else -1)
        wanted = (twice_inner // 2, hidden) if leaf in DOWN_LEAVES else (hidden, twice_inner // 2)
        if (spec.in_features, spec.out_features) != wanted or spec.bias:
            yield SourceError(
                "a packed expert has other sizes than the model's",
                code="tensor-mismatch",
                where=f"{path}.{name}",
                expected=f"{wanted[0]} -> {wanted[1]}, no bias",
                found=f"{spec.in_features} -> {spec.out_features}{', with a bias' if spec.bias else ''}",
            )
    if set(leaves) not in EXPERT_LEAVES or any(found != set(range(count)) for found in leaves.values()):
        packed = ", ".join(f"{len(found)} x {leaf}" for leaf, found in leaves.items())
        yield Refused(
            "some experts of a layer are packed and others are not",
            code="experts",
            where=path,
            expected=f"gate, up and down of {count} experts",
            found=packed,
            hint=f"w4pack convert SOURCE OUT --ignore 're:{path}.*' leaves all of them in 16 bit",
        )


GATE_UP_DOWN = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
EXPERT_LEAVES = tuple(set(leaves) for leaves in GATE_UP_DOWN)
DOWN_LEAVES = tuple(leaves[2] for leaves in GATE_UP_DOWN)


def _unlike(experts: nn.Module) -> str | None:
    """Return what an experts class does that the packed module does not; None if it is alike."""
    for name in ("gate_up_proj", "down_proj", "act_fn"):
        if not hasattr(experts, name):
            return f"no `{name}`"
    wanted = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}
    for name, value in {**wanted, "has_post_expert_norm": False}.items():
        if getattr(experts, name, value) is not value:
            return f"{name}: {getattr(experts, name)}"
    gate = getattr(type(experts), "_apply_gate", None)
    if gate is not None and gate.__module__ != "transformers.integrations.moe":
        return "a gate of its own"
    return None


# ---- names -----------------------------------------------------------------------------------------


def _expected(
    model: PreTrainedModel, artifact: Artifact, names: Names, paths: Mapping[str, str]
) -> dict[str, Expected]:
    """Return what the model wants, by the names of the file. Packed layers were compared with their specs
    when the artifact was opened, and with the model when they were placed.
    """
    state, ignored = model.state_dict(), _left_aside(model)
    expected: dict[str, Expected] = {}
    merged: Counter[tuple[str, int]] = Counter()
    found: set[str] = set()
    for name, info in artifact.tensors.items():
        path, pattern = names.tensor(name)
        if name.rpartition(".")[0] in paths:
            expected[name] = (None, info.shape)
            found.add(path)
        elif path in state:
            found.add(path)
            foreign = info.dtype not in DTYPES and state[path].is_floating_point()
            dtype = " or ".join(DTYPES) if foreign else None  # a cast of anything else would be a guess
            if pattern is None:
                expected[name] = (dtype, tuple(state[path].shape))
            else:  # experts left in 16 bit: transformers merges them, and knows their shapes
                expected[name] = (dtype, info.shape)
                merged[path, names.merged_from(pattern)] += 1
        elif ignored(name):
            expected[name] = (None, info.shape)
    for (path, each), count in merged.items():
        if count != each * state[path].shape[0]:
            found.discard(path)
    buffers = {name for name, _ in model.named_buffers()}
    missing = [path for path in state if path not in found and path not in buffers]
    return expected | {path: (None, tuple(state[path].shape)) for path in missing}


def _left_aside(model: PreTrainedModel) -> Callable[[str], bool]:
    """Return what tells whether the model class leaves a tensor of the file aside."""
    patterns = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
    return lambda name: is_computed(name) or any(pattern.search(name) for pattern in patterns)
