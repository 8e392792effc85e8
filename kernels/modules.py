"""The modules that replace linear layers: they hold the artifact's tensors and run the operators on them.

Parameter names are the artifact's, so that a state dictionary of the file fits as it is. A module is made on
the ``meta`` device and filled from the file; nothing is repacked. ``FusedLinear`` joins layers that read the
same input (q/k/v, gate/up): the layers keep their places and names in the model, so the model's own code
stays as it is, and one product serves all of them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from w4pack.convert.errors import UsageError
from w4pack.kernels import checks, gradient, ops, orders
from w4pack.kernels.shared import Shared, SharedOrder
from w4pack.kernels.spec import SUFFIXES, LinearSpec


class PackedTensors(nn.Module):
    """The tensors of a packed layer. They follow the module from device to device; no cast reaches them.

    Scales keep the file's dtype whatever the model's is: rounding them once more would change weights. Only
    the bias, which is added to activations, follows a cast.
    """

    weight: torch.Tensor
    weight_scale: torch.Tensor
    weight_zero_point: torch.Tensor | None
    act_perm: torch.Tensor | None
    bias: torch.Tensor | None

    def __init__(self, spec: LinearSpec) -> None:
        super().__init__()
        self.spec = spec
        self.front: Callable[[PackedTensors, torch.Tensor], torch.Tensor] | None = None

    def _put(self, name: str, tensor: torch.Tensor) -> None:
        """Set a tensor that was moved or cast."""
        raise NotImplementedError

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "PackedTensors":
        for name in SUFFIXES:
            tensor: torch.Tensor | None = getattr(self, name, None)
            if tensor is not None:
                moved = fn(tensor) if name == "bias" else without_cast(fn, tensor)
                if moved is not tensor:
                    self._put(name, moved)
        return self

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        given, own = state_dict.get(f"{prefix}act_perm"), self.act_perm
        if (
            given is not None
            and own is not None
            and given.shape == own.shape
            and not given.is_meta
            and not orders.is_order(given)  # a kernel reads where it points
        ):
            rest[-1].append(f"{prefix}act_perm is no permutation of the layer's inputs")  # is raised
        else:
            self._load_checked(state_dict, prefix, *rest)

    def _load_checked(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        """Load what the layer has; its act-order is one."""
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Return (..., out_features) of x (..., in_features), in x's dtype; a front says what x is."""
        if self.front is not None:
            return self.front(self, x)
        tensors = {name: getattr(self, name) for name in SUFFIXES[:-1]}
        return product(self.spec, tensors, x, self.bias)

    def extra_repr(self) -> str:
        """Say what the layer is in a printed model."""
        s = self.spec
        kind = "symmetric" if s.sym else "zero points"
        order = ", act-order" if s.act_order else ""
        return f"{s.in_features} -> {s.out_features}, {s.bits} bit, groups of {s.group_size}, {kind}{order}"


def product(
    spec: LinearSpec, tensors: Mapping[str, torch.Tensor | None], x: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return (..., out_features) of x (..., in_features), in x's dtype.

    Args:
        spec: of the layer.
        tensors: its ``weight``, ``weight_scale``, and what else it has; not the bias.
        x: activations, fp16 or bf16.
        bias: (out_features,) or None.
    """
    checks.width(x, spec.in_features)
    if gradient.wanted(x):
        return gradient.refused(x, product(spec, tensors, x.detach(), bias))
    if bias is not None and spec.n != spec.out_features:
        bias = functional.pad(bias, (0, spec.n - spec.out_features))
    y: torch.Tensor = ops.gemm(
        _rows(spec, tensors.get("act_perm"), x.reshape(-1, spec.in_features)),
        tensors["weight"],
        tensors["weight_scale"],
        tensors.get("weight_zero_point"),
        bias,
        spec.bits,
        spec.group_size,
    )
    return y[:, : spec.out_features].reshape(*x.shape[:-1], spec.out_features)


def _rows(spec: LinearSpec, act_perm: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    """Bring activations into the order and width of the packed rows."""
    if act_perm is not None:
        gathered: torch.Tensor = ops.gather(x.contiguous(), act_perm, spec.k)
        return gathered
    if spec.k != spec.in_features:
        return functional.pad(x, (0, spec.k - spec.in_features))
    return x.contiguous()


def without_cast(fn: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor where ``fn`` of ``nn.Module._apply`` sends it, in its own dtype."""
    if tensor.is_meta:
        return fn(tensor).to(tensor.dtype)
    return tensor.to(fn(torch.empty(0, dtype=torch.int32, device=tensor.device)).device)  # no cast's affair


class PackedLinear(PackedTensors):
    """y = x W + b with W in the Marlin tile; x and y have any leading dimensions.

    Made empty, on ``device``; ``scale_dtype`` is the file's, ``dtype`` that of activations and bias.
    """

    def __init__(
        self,
        spec: LinearSpec,
        *,
        dtype: torch.dtype = torch.float16,
        scale_dtype: torch.dtype | None = None,
        device: torch.device | str = "meta",
    ) -> None:
        super().__init__(spec)
        dtypes = {"weight_scale": scale_dtype or dtype, "bias": dtype}
        shapes = spec.shapes()
        for name in SUFFIXES:
            tensor = None
            if name in shapes:
                empty = torch.empty(shapes[name], dtype=dtypes.get(name, torch.int32), device=device)
                tensor = nn.Parameter(empty, requires_grad=False)
            self.register_parameter(name, tensor)
        self.fused: FusedLinear | None = None
        self.place = 0  # among the fused parts

    @property
    def in_features(self) -> int:
        """Width of the input."""
        return self.spec.in_features

    @property
    def out_features(self) -> int:
        """Width of the output."""
        return self.spec.out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (..., out_features) of x (..., in_features), in x's dtype."""
        return self.product(x) if self.fused is None else self.fused.part(self.place, x)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Set a parameter; one of a joined layer is copied to where the product reads it."""
        held = None if self._modules.get("fused") is None else self._parameters.get(name)
        if held is None or param is None:
            super().register_parameter(name, param)
        else:
            held.data, self._parameters[name] = param, held

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take up what was copied or pickled."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if self.fused is not None:
            self.fused.share_again()

    def _put(self, name: str, tensor: torch.Tensor) -> None:
        self._parameters[name] = nn.Parameter(tensor, requires_grad=False)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "PackedLinear":
        if self.fused is not None:
            self.fused._apply(fn)  # the parts are views of it
        else:
            super()._apply(fn)
        return self

    def _load_checked(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        if self.fused is not None:  # copy into the shared tensors: an assigned one would not be read
            rest = ({**rest[0], "assign_to_params_buffers": False}, *rest[1:])
            state_dict = self.fused.with_order(self.place, state_dict, f"{prefix}act_perm")
        super()._load_checked(state_dict, prefix, *rest)


class FusedLinear(PackedTensors):
    """Packed layers with one input, side by side: columns of one weight, scales, zero points and bias.

    The parts' parameters become views of the joined tensors, so names, shapes and values of a state
    dictionary stay those of the file, and nothing is held twice. The first part that is called with an input
    computes all; the others, called with the same tensor, take their columns; after the last one nothing is
    kept. Any other order of calls is right too, and computes again. That an input was changed in place
    between two parts is seen by its version, which tensors of ``torch.inference_mode`` do not have: there it
    must not be changed.
    """

    def __init__(
        self, spec: LinearSpec, parts: Sequence[PackedLinear], tensors: Mapping[str, torch.Tensor]
    ) -> None:
        super().__init__(spec)
        for name in SUFFIXES:
            self.register_buffer(name, tensors.get(name), persistent=False)
        self.parts = tuple(parts)  # in a tuple: the parts own this module, not the other way round
        self.starts: list[int] = []
        self.orders: dict[int, torch.Tensor] = {}  # place -> an act-order that the others do not have
        self._held: list[Any] = []  # input, its version, output, parts still to come
        start = 0
        for place, part in enumerate(parts):
            self.starts.append(start)
            part.fused, part.place = self, place
            start += part.spec.out_features
        self._share()

    def part(self, place: int, x: torch.Tensor) -> torch.Tensor:
        """Return the columns of one part, (..., its out_features), of x (..., in_features)."""
        y, missing = self._take(place, x)
        if missing:
            self._held[:] = [x, _version(x), y, missing]
        start = self.starts[place]
        return y[..., start : start + self.parts[place].spec.out_features]

    def _take(self, place: int, x: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
        """Return the output for x and the parts that have not taken theirs; nothing is held afterwards."""
        held = list(self._held)
        self._held.clear()
        if held and held[0] is x and held[1] == _version(x) and place in held[3]:
            return held[2], tuple(p for p in held[3] if p != place)
        return self.product(x), tuple(p for p in range(len(self.parts)) if p != place)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take up what was copied or pickled."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.share_again()

    def share_again(self) -> None:
        """Make views of the parts' parameters, which a copy or a pickle has made tensors of their own.

        The modules refer to each other and come one by one: called by each, it acts when the last is there.
        """
        if "parts" in self.__dict__ and all("_parameters" in part.__dict__ for part in self.parts):
            self._share()

    def with_order(self, place: int, state_dict: Mapping[str, Any], name: str) -> Mapping[str, Any]:
        """Return the state dictionary of a part without an act-order that the joined layers do not have yet.

        They take it once each was given it. Until then there is no product: their orders differ.
        """
        given, own = state_dict.get(name), self.act_perm
        if given is None or own is None or given.is_meta or own.is_meta or given.shape != own.shape:
            return state_dict
        self.orders.pop(place, None)
        given = given.detach().to(own, copy=True)
        if not torch.equal(given, own):
            self.orders[place] = given
        if len(self.orders) == len(self.parts) and all(torch.equal(o, given) for o in self.orders.values()):
            with torch.no_grad():
                own.copy_(given)
            self.orders.clear()
        return {**state_dict, name: own}

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs of all parts.

        Raises:
            UsageError: some of them were given another act-order.
        """
        if self.orders:
            raise UsageError(
                "layers that are joined were given different orders of their inputs",
                code="fused-part",
                where="act_perm",
                expected="one order for all of them",
                found=f"another for {len(self.orders)} of {len(self.parts)}",
                hint="load_state_dict of the artifact that was loaded, or load the other one",
            )
        return super().product(x)

    def _put(self, name: str, tensor: torch.Tensor) -> None:
        self._buffers[name] = tensor
        self._share()

    def _share(self) -> None:
        """Make the parts' parameters views of the joined tensors."""
        bits = self.spec.bits
        for part, start in zip(self.parts, self.starts, strict=True):
            units = {"weight": (bits, 2), "weight_scale": (1, 1), "weight_zero_point": (bits, 32)}
            for name in part.spec.shapes():
                whole: torch.Tensor = getattr(self, name)
                if name in units:
                    times, over = units[name]
                    whole = whole[:, start * times // over : (start + part.spec.n) * times // over]
                elif name == "bias":
                    whole = whole[start : start + part.spec.out_features]
                kind = SharedOrder if name == "act_perm" else Shared
                part._parameters[name] = kind(whole, requires_grad=False)


def _version(x: torch.Tensor) -> int:
    """Return a number that changes when x is written to; inference tensors and traced ones have none."""
    return 0 if torch.compiler.is_compiling() or x.is_inference() else x._version


def side_by_side(parts: Sequence[PackedLinear]) -> dict[str, torch.Tensor]:
    """Return copies of the parts' tensors joined as ``FusedLinear`` holds them."""
    joined = {}
    for name in parts[0].spec.shapes():
        tensors = [getattr(part, name) for part in parts]
        if name == "act_perm":
            joined[name] = tensors[0].detach()
        else:
            joined[name] = torch.cat([t.detach() for t in tensors], dim=-1)
    return joined
