"""What an engine must know of an artifact before it makes layers: from headers, of a folder or of the Hub."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from w4pack.convert.core.facts import DenseFacts, LayerFacts, ModelFacts
from w4pack.convert.core.families import expert_index
from w4pack.convert.dialects import w4pack as dialect
from w4pack.convert.engines.rules import evaluate
from w4pack.convert.errors import Refused, W4PackError
from w4pack.convert.files.tensorfile import TensorInfo, tensor_nbytes
from w4pack.kernels.artifact import Artifact, open_artifact
from w4pack.kernels.packed import compare, packed_modules, spec_of
from w4pack.kernels.spec import LinearSpec

ENGINE = "vllm"
CUTS = ("vllm.plugin-n-tile", "vllm.plugin-k-tile", "vllm.plugin-k-order")  # rules about a rank's share
WHOLE = "vllm serve OUT --enable-expert-parallel leaves each expert whole, on one of the ranks"


@dataclass(frozen=True, slots=True)
class Source:
    """The modules of an artifact, under the names that the engine gives them.

    config    config.json
    specs     packed module -> what it is
    tensors   name -> where it lies (of a Hub repository: dtype and shape only)
    artifact  opened, where the files are at hand
    """

    config: Mapping[str, Any] = field(repr=False)
    specs: Mapping[str, LinearSpec] = field(repr=False)
    tensors: Mapping[str, TensorInfo] = field(repr=False)
    artifact: Artifact | None = field(repr=False, default=None)

    def scales(self, module: str) -> str:
        """Return the safetensors dtype of a packed module's scales."""
        return self.tensors[f"{module}.weight_scale"].dtype

    def has_bias(self, module: str) -> bool:
        """Tell whether the file has a bias for a module."""
        return f"{module}.bias" in self.tensors

    def dense_shape(self, module: str) -> tuple[int, int]:
        """Return (outputs, inputs) of a module left in 16 bit beside packed ones of the same layer.

        Raises:
            Refused: there is no such weight.
        """
        info = self.tensors.get(f"{module}.weight")
        if info is None or len(info.shape) != 2:
            raise Refused(
                "a part of a layer is neither packed nor left in 16 bit",
                code="missing-tensor",
                where=f"{module}.weight",
                expected="a packed or a 16-bit weight",
                found="no such tensor" if info is None else f"{info.dtype} {list(info.shape)}",
            )
        return info.shape[0], info.shape[1]

    def order(self, module: str) -> bytes | None:
        """Return the act-order of a module, K numbers of 4 bytes; None if the file is not at hand."""
        return None if self.artifact is None else self.artifact.read(self.tensors[f"{module}.act_perm"])

    def renamed(self, rename: Callable[[str], str | None]) -> "Source":
        """Return the same under other names; names without one are left out."""

        def mapped(table: Mapping[str, Any], *, suffix: str = "") -> dict[str, Any]:
            names = {name: rename(name + suffix) for name in table}
            return {new.removesuffix(suffix): table[name] for name, new in names.items() if new is not None}

        return replace(self, specs=mapped(self.specs, suffix=".weight"), tensors=mapped(self.tensors))

    def refuse(self, ranks: int, *, split_experts: bool = True) -> None:
        """Raise a Refused that lists what ``w4pack check --engine vllm`` has against ``ranks``.

        split_experts  every rank has a share of each expert; else some experts whole (expert parallelism)
        """
        facts = self.facts()
        if not split_experts:
            whole = tuple(layer for layer in facts.layers if expert_index(layer.name) is None)
            facts = replace(facts, layers=whole)
        result = evaluate(facts, ENGINE, ranks)
        folder = "ARTIFACT" if self.artifact is None else self.artifact.folder
        check = f"w4pack check {folder} --engine vllm --tp {ranks}"
        problems: list[W4PackError] = [
            Refused(
                f"vLLM with w4pack does not run this artifact on {ranks} rank{'s' if ranks > 1 else ''}",
                code=blocker.rule,
                where=blocker.layer,
                expected=blocker.expected,
                found=blocker.found,
                hint=WHOLE if blocker.rule in CUTS and ".experts." in blocker.layer else check,
            )
            for blocker in result.blockers
            if blocker.verdict == "refuses"
        ]
        if problems:
            raise Refused.together(problems)

    def facts(self) -> ModelFacts:
        """Return what engine rules look at."""
        layers = tuple(self._layer(name, spec) for name, spec in self.specs.items())
        ours = {f"{name}.{suffix}" for name, spec in self.specs.items() for suffix in spec.shapes()}
        dense = tuple(DenseFacts(n, i.dtype, i.shape) for n, i in self.tensors.items() if n not in ours)
        quant = self.config["quantization_config"]
        return ModelFacts(self.config, quant, "config.json", layers, dense)

    def _layer(self, name: str, spec: LinearSpec) -> LayerFacts:
        order = "groups" if spec.act_order else "none"
        sizes = (spec.in_features, spec.out_features, spec.k, spec.n)
        scheme = (spec.bits, spec.group_size, spec.sym, order)
        return LayerFacts(name, "marlin", *scheme, *sizes, self.scales(name), spec.bias)  # type: ignore[arg-type]


def of_folder(path: str | os.PathLike[str]) -> Source:
    """Open the artifact in a folder. Raises as ``open_artifact``."""
    artifact = open_artifact(path)
    return Source(artifact.config, artifact.specs, artifact.tensors, artifact)


def of_headers(found: Mapping[str, Mapping[str, Any]], config: Mapping[str, Any], label: str) -> Source:
    """Return what the headers of a repository say: name -> ``dtype`` and ``shape``.

    Raises:
        SourceError: tensors that are not as the config says.
    """
    quant = config["quantization_config"]
    tensors = {}
    for name, header in found.items():
        dtype, shape = str(header["dtype"]), tuple(header["shape"])
        tensors[name] = TensorInfo(name, dtype, shape, "", 0, tensor_nbytes(dtype, shape))
    claims = dialect.claims(quant)
    specs: dict[str, LinearSpec] = {}
    problems: list[W4PackError] = []
    for module, parts in packed_modules(tensors, quant).items():
        spec = spec_of(module, parts, quant, claims)
        if isinstance(spec, LinearSpec):
            specs[module] = spec
            problems += compare(module, spec, parts)
        else:
            problems.append(spec)
    if not specs:
        problems.append(
            Refused("the headers of the repository show no packed layer", code="no-artifact", where=label)
        )
    if problems:
        raise Refused.together(problems)
    return Source(config, specs, tensors)


def is_folder(name: str) -> bool:
    """Tell whether the engine's name of a model is a folder."""
    return Path(name).is_dir()
