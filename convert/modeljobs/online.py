"""What a runtime does between the linears, done with hooks in transformers' own layers: the definition.

In front of a linear stands the transform of its site, then the quantizer of activations; between a layer's
keys and values and its attention stands the cache. Keys are transformed, quantized and turned back: queries
need no transform then, and scores are the same. The offset of a guide stays off, as it does in the kernels:
the softmax does not see it. Everything is done in float32.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from w4pack.convert.core.scheme import WIDE
from w4pack.convert.dialects.online import Hadamard, KVQuant, Online
from w4pack.convert.dialects.online_reading import parse
from w4pack.convert.errors import Refused
from w4pack.convert.files.tensorfile import TensorInfo
from w4pack.convert.planning.online import model_of
from w4pack.convert.quantize.activations import fake_cache, fake_keys, fake_tokens
from w4pack.convert.quantize.guides import SOFTCAP, refuse_guide
from w4pack.convert.quantize.skeleton import CACHE_NAMES, Skeleton
from w4pack.convert.rotate.rotation import Rotation
from w4pack.convert.rotate.transform import rotate
from w4pack.convert.source.online_places import guide_of, place, plain, sites_of, transform_of
from w4pack.convert.source.online_rules import misfits


def rotation_of(record: Hadamard) -> Rotation:
    """Return a recorded transform as a rotation without signs."""
    return Rotation(record.site, -1, record.order, record.block, record.factors, None)


@dataclass(slots=True, eq=False)
class Cache:
    """In the place of a cache: gives back keys and values as the quantized cache would."""

    bits: int
    quant: KVQuant
    transform: Rotation | None
    guide: torch.Tensor | None = None
    _square: torch.Tensor | None = None

    def update(self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return keys and values (B, heads, tokens, head size) after their way through the cache."""
        clip_k, clip_v = (self.clip(table) for table in (self.quant.clip_k, self.quant.clip_v))
        return self._turned(keys, clip_k), fake_cache(values, self.bits, clip_v)

    def clip(self, table: Mapping[int, float]) -> float:
        """Return the ratio of a table for the bits that are used."""
        return 1.0 if self.bits == WIDE else table[self.bits]

    def _turned(self, keys: torch.Tensor, clip: float) -> torch.Tensor:
        if self.bits == WIDE or self.transform is None:
            return self._fake(keys, clip)
        if self._square is None or self._square.device != keys.device:
            eye = torch.eye(self.transform.n, dtype=torch.float32, device=keys.device)
            self._square = rotate(eye, self.transform)
        turned = self._fake(rotate(keys.float(), self.transform), clip)
        return (turned @ self._square.T).to(keys.dtype)

    def _fake(self, turned: torch.Tensor, clip: float) -> torch.Tensor:
        guide = None if self.guide is None else self.guide.to(turned.device)
        return fake_keys(turned.transpose(1, 2), self.bits, clip, guide).transpose(1, 2)


def runtime_of(
    config: Mapping[str, Any],
    infos: Mapping[str, TensorInfo],
    records: Any,
    packed: Iterable[str],
    *,
    act_bits: int | None = None,
    kv_bits: int | None = None,
    read: Callable[[str], torch.Tensor] | None = None,
) -> "Runtime":
    """Return what runs between the linears of a model, at the bits asked for or those of the calibration.

    records  the value of ``online``
    packed   names of the quantized linears
    read     gives a tensor of the model by its name: a record may speak of guides

    Raises Refused for records that are not known here or do not fit, or an architecture that has no runtime;
    UsageError for bits that the records do not have.
    """
    online = parse(records)
    settings, model = online.settings(act_bits, kv_bits), model_of(config, infos)
    problems = tuple(misfits(online, place(config, infos, plain(infos.values()))))
    if problems:
        raise Refused.together(problems)
    guides: dict[int, torch.Tensor] = {}
    if online.kv is not None and online.kv.guide and settings.kv_bits != WIDE:
        if read is None:
            raise ValueError("guides of keys, and nothing to read them with")
        named = {layer.index: guide_of(layer) for layer in model.layers}
        guides = {index: read(name) for index, name in named.items()}
        for index, name in named.items():
            refuse_guide(name, guides[index], config.get(SOFTCAP))
    return Runtime(
        online,
        sites_of(model.layers),
        model.heads,
        frozenset(packed),
        settings.act_bits,
        settings.kv_bits,
        guides,
    )


@dataclass(slots=True, eq=False)
class _Memo:
    """The last input of one site and what became of it: q, k and v ask for the same."""

    given: torch.Tensor | None = None
    made: torch.Tensor | None = None


@dataclass(eq=False)
class Runtime:
    """Everything that runs between the linears of a model.

    online   the records
    sites    module name of the checkpoint -> site
    heads    query heads, for the transform across them
    packed   names of the linears that are quantized: the inputs of others are transformed alone
    act_bits, kv_bits  16: not quantized
    guides   of the keys, by layer
    """

    online: Online
    sites: Mapping[str, str]
    heads: int
    packed: frozenset[str]
    act_bits: int
    kv_bits: int
    guides: Mapping[int, torch.Tensor] = field(default_factory=dict)
    _rotations: dict[tuple[str, int | None], Rotation | None] = field(default_factory=dict, init=False)

    @contextmanager
    def around(
        self, skeleton: Skeleton, layer: nn.Module, index: int, *, quantized: bool = True
    ) -> Iterator[None]:
        """Let a layer run as the runtime runs it. ``quantized=False``: transforms alone."""
        handles = []
        memos: dict[tuple[str, bool], _Memo] = {}
        for path, module in layer.named_modules():
            name = skeleton.names.get(f"{skeleton.prefix(index)}{path}.weight", "").removesuffix(".weight")
            if name in self.sites and isinstance(module, nn.Linear):
                site, own = self.sites[name], quantized and name in self.packed
                memo = memos.setdefault((site, own), _Memo())
                handles.append(module.register_forward_pre_hook(self._hook(site, own, memo)))
        if quantized and self.kv_bits != WIDE:
            handles.append(layer.register_forward_pre_hook(partial(self._cached, index), with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, site: str, own: bool, memo: _Memo) -> Any:
        def before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            given = args[0]
            if memo.given is not given or memo.made is None:
                memo.given, memo.made = given, self.input(site, given, quantized=own)
            return (memo.made, *args[1:])

        return before

    def input(self, site: str, x: torch.Tensor, *, quantized: bool = True) -> torch.Tensor:
        """Return what a linear of a site is given: ``x`` transformed and quantized, in its own dtype."""
        turned = self.transformed(site, x)
        quant = self.online.acts.get(site)
        if not quantized or quant is None or self.act_bits == WIDE:
            return turned.to(x.dtype)
        return fake_tokens(turned, self.act_bits, quant.clip[self.act_bits]).to(x.dtype)

    def transformed(self, site: str, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` (..., K) float32 after the transform of its site, if there is one."""
        wide = x.float()
        rotation = self._rotation(site, x.shape[-1])
        if rotation is None:
            return wide
        if site != "attn_out":
            return rotate(wide, rotation)
        apart = wide.reshape(*wide.shape[:-1], self.heads, -1)
        return rotate(apart, rotation, -2).flatten(-2)

    def _rotation(self, site: str, width: int) -> Rotation | None:
        key = transform_of(site, width)
        if key not in self._rotations:
            record = self.online.transform(*key)
            self._rotations[key] = None if record is None else rotation_of(record)
        return self._rotations[key]

    @property
    def turn_of_keys(self) -> Rotation | None:
        """The transform of keys and queries, if there is one."""
        record = self.online.transform("qk")
        return None if record is None else rotation_of(record)

    def cache(self, index: int) -> Cache:
        """Return the stand-in for a layer's cache. Only where ``kv_bits`` is not 16."""
        if self.online.kv is None:
            raise ValueError("no record of a quantized cache")
        return Cache(self.kv_bits, self.online.kv, self.turn_of_keys, self.guides.get(index))

    def _cached(
        self, index: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        name = next((n for n in CACHE_NAMES if n in kwargs), None)
        if name is None:
            raise Refused(
                "the layers of this model are called without a cache, so none can be quantized",
                code="model-unknown",
                where=type(layer).__name__,
                expected=" or ".join(CACHE_NAMES),
                found=", ".join(sorted(kwargs)),
                hint="`--kv-bits 16` leaves it as it is",
            )
        return args, {**kwargs, name: self.cache(index)}


# Nothing runs but the products.
NOTHING = Runtime(Online(), {}, 0, frozenset(), WIDE, WIDE)
