"""Names of the file and names of the model: transformers renames on load (``block_sparse_moe`` to ``mlp``)
and merges the experts of dense checkpoints; packed experts are merged by us instead.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from w4pack.convert.core.families import expert_index
from w4pack.convert.errors import Refused


class Names:
    """Where a model wants the tensors of a file. Made before any module is replaced.

    Args:
        model: on the ``meta`` device, as transformers makes it.
        packed: names of the packed modules, as in the file.
    """

    def __init__(self, model: PreTrainedModel, packed: Iterable[str]) -> None:
        self._prefix = model.base_model_prefix
        self._state: Mapping[str, Any] = dict(model.state_dict())
        conversions = get_model_conversion_mapping(model)
        self._renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
        self._converters = [c for c in conversions if isinstance(c, WeightConverter)]
        self._modules = {n: self._renamed(f"{n}.weight", ()).removesuffix(".weight") for n in packed}
        self._packed = set(self._modules.values())

    def module(self, name: str) -> str:
        """Return the model's name of a packed module."""
        return self._modules[name]

    def tensor(self, name: str) -> tuple[str, str | None]:
        """Return the model's name of any tensor; for one that is merged with others, the merged tensor's name
        and the pattern that says so.
        """
        module, _, leaf = name.rpartition(".")
        if module in self._modules:
            return f"{self._modules[module]}.{leaf}", None
        plain = self._renamed(name, ())
        found: tuple[str, str | None] = rename_source_key(
            name, self._renamings, self._converters, self._prefix, self._state
        )
        return found if found[1] is not None else (plain, None)

    def merged_from(self, pattern: str) -> int:
        """Return how many tensors of one expert a merged tensor is made of."""
        return len(self._converter(pattern).source_patterns)

    def merged(self, tensors: Iterable[str]) -> dict[str, list[list[str]]]:
        """Return, for each merged tensor of experts that are not packed, its rows: an expert's tensors in the
        order in which they lie on top of each other, (out, in) each.

        Raises:
            Refused: tensors that transformers merges in another way.
        """
        found: dict[str, dict[int, dict[int, str]]] = {}
        for name in tensors:
            path, pattern = self.tensor(name)
            if pattern is not None:
                converter = self._converter(pattern)
                expert = expert_index(name.rpartition(".")[0])
                if expert is None or not _stacks_experts(converter):
                    raise Refused(
                        "transformers merges tensors of this model in a way that the loader does not",
                        code="merge",
                        where=name,
                        hint="w4pack.register(), then AutoModelForCausalLM.from_pretrained(PATH)",
                    )
                place = converter.source_patterns.index(pattern)
                found.setdefault(path, {}).setdefault(expert, {})[place] = name
        return {
            path: [[row[place] for place in sorted(row)] for _, row in sorted(experts.items())]
            for path, experts in found.items()
        }

    def _converter(self, pattern: str) -> Any:
        return next(c for c in self._converters if pattern in c.source_patterns)

    def conversions(self, given: Iterable[Any]) -> list[Any]:
        """Return transformers' conversions without those that would merge packed experts.

        A converter that serves layers with dense experts too is kept for these layers alone.
        """
        kept: list[Any] = []
        for conversion in given:
            if isinstance(conversion, WeightConverter) and self._catches_packed(conversion):
                kept += self._scoped(conversion)
            else:
                kept.append(conversion)
        return kept

    def _renamed(self, name: str, converters: Iterable[Any]) -> str:
        found: str = rename_source_key(name, self._renamings, list(converters), self._prefix, self._state)[0]
        return found

    def _catches_packed(self, converter: Any) -> bool:
        return any(_matches(converter, f"{module}.weight") for module in self._packed)

    def _scoped(self, converter: Any) -> Iterator[Any]:
        """Yield a copy for each decoder layer whose experts are not packed."""
        packed = {parent for module in self._packed if (parent := _experts_of(module))}
        for name in self._state:
            parent, _, _ = name.rpartition(".")
            merged = any(name.endswith(str(t).lstrip(".")) for t in converter.target_patterns)
            if merged and parent not in packed:
                mine = copy.deepcopy(converter)
                mine.scope_prefix, mine.base_model_prefix = parent.rpartition(".")[0].rpartition(".")[0], ""
                yield mine


def _stacks_experts(converter: Any) -> bool:
    """Tell whether a converter stacks experts, of each one or several matrices one below the other."""
    kinds = [(type(op).__name__, op.dim) for op in converter.operations if hasattr(op, "dim")]
    known = [("MergeModulelist", 0), ("Concatenate", 1)]
    return len(kinds) == len(converter.operations) and kinds in (known[:1], known)


def _matches(converter: Any, name: str) -> bool:
    return converter.rename_source_key(name)[1] is not None


def _experts_of(module: str) -> str | None:
    """Return the module that holds an expert's layer: ``a.experts`` of ``a.experts.3.w1``."""
    parent, dot, _ = module.rpartition(".experts.")
    return f"{parent}.experts" if dot else None
