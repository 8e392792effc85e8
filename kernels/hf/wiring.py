"""Puts what an ``online`` plan says into a model: fronts, norms, MLPs, experts, the cache.

A norm whose output is transformed or quantized moves into its readers: the module that stands in its place
hands the stream on, and each reader computes the norm with its front. Readers in 16 bit (a router) get the
norm, and the transform where there is one, in 16 bit.
"""

from torch import nn
from transformers.activations import ACT2FN

from w4pack.convert.core.families import expert_index
from w4pack.convert.core.scheme import WIDE
from w4pack.convert.quantize.guides import SOFTCAP, refuse_guide
from w4pack.convert.rotate.accounting import Layer
from w4pack.convert.rotate.architecture import Block
from w4pack.convert.source.online_places import GUIDE, guide_of
from w4pack.kernels.experts import PackedExperts
from w4pack.kernels.hf import kv_attention, kv_guides
from w4pack.kernels.hf.kv_pages import KVPlan
from w4pack.kernels.hf.online import OnlinePlan
from w4pack.kernels.hf.skeleton import Skeleton, replace
from w4pack.kernels.quarot.experts import QuantizedExperts
from w4pack.kernels.quarot.fronts import Front, GatedFront, HeadsFront, NormFront, PlainFront
from w4pack.kernels.quarot.modules import GatedMLP, put_front
from w4pack.kernels.quarot.norms import FusedNorm
from w4pack.kernels.quarot.transform import Transform

OPERATOR_OF = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}  # transformers' name -> the operator's
GATED = ({"gate_proj", "up_proj", "down_proj"}, {"gate_up_proj", "down_proj"})


def wire(frame: Skeleton, made: OnlinePlan) -> None:
    """Put everything into a model that is filled and joined, on its devices."""
    wiring = _Wiring(frame, made)
    for layer in made.at.layers:
        wiring.readers(layer.attention, "attn_in")
        wiring.attention_output(layer.attention)
        wiring.readers(layer.mlp, "mlp_in")
        wiring.mlp_output(layer.mlp)
    wiring.guides()
    if made.settings.kv_bits != WIDE:
        wiring.cache()
    frame.model.online_settings = made.settings


class _Wiring:
    def __init__(self, frame: Skeleton, made: OnlinePlan) -> None:
        self.frame, self.made, self.model = frame, made, frame.model
        self.first_of: dict[str, Front] = {}  # place of experts -> front before gate and up

    # ---- sites

    def front_values(self, site: str, transform: str) -> tuple[int, float, str] | None:
        """Return bits, clip and transform of a front at a site; None where it would do nothing."""
        quant, bits = self.made.records.acts.get(site), self.made.settings.act_bits
        if quant is None or bits == WIDE:
            return (WIDE, 1.0, transform) if transform else None
        return bits, quant.clip[bits], transform

    def transform(self, site: str, order: int | None = None) -> str:
        """Return the key of a site's transform, "" for none."""
        record = self.made.records.transform(site, order)
        return "" if record is None else Transform(record.order, record.factors, record.block).key

    def readers(self, block: Block, site: str) -> None:
        """Fronts before the readers of a norm, or of the stream."""
        values = self.front_values(site, self.transform("residual_read"))
        if values is None:
            return
        front: Front = PlainFront(*values)
        if block.norm is not None:
            front = NormFront(*values, self.moved(block.norm))
        for name in block.readers:
            if expert_index(name) is not None:
                self.first_of[self.experts_of(name)] = front
            else:
                put_front(self.module(name), front)

    def moved(self, name: str) -> FusedNorm:
        """Let the readers compute a norm; return what stands in its place."""
        path = self.place(name)
        own = self.model.get_submodule(path)
        eps = next(getattr(own, key) for key in ("variance_epsilon", "eps") if hasattr(own, key))
        plus_one = self.made.at.architecture.norm == "rms_plus_one"
        made = FusedNorm(own.get_parameter("weight"), float(eps), plus_one=plus_one)
        replace(self.model, path, made)
        return made

    def attention_output(self, block: Block) -> None:
        """The front before o_proj: across heads."""
        key = self.transform("attn_out")
        values = self.front_values("attn_out", key)
        if values is None:
            return
        heads = Transform.of(key).order if key else 1
        for name in block.writers:
            put_front(self.module(name), HeadsFront(*values, heads) if key else PlainFront(*values))

    def mlp_output(self, block: Block) -> None:
        """The fronts before the last linears of MLPs and experts."""
        done = set()
        for name in block.writers:
            index = expert_index(name)
            place = self.experts_of(name) if index is not None else self.place(name).rpartition(".")[0]
            if place in done:
                continue
            done.add(place)
            values = self.front_values("mlp_mid", self.transform("mlp_mid", self.made.at.linears[name].width))
            if index is not None:
                self.experts(place, values)
            elif values is not None:
                self.mlp(place, self.place(name), values)

    def mlp(self, place: str, last: str, values: tuple[int, float, str]) -> None:
        """The front before the last linear of an MLP; a gated one also gets the activation into it."""
        owner = self.model.get_submodule(place)
        activation = _activation(owner)
        parts = dict(owner.named_children())
        linears = {name: module for name, module in parts.items() if name.endswith("_proj")}
        if activation is None or set(linears) not in GATED:
            put_front(self.model.get_submodule(last), PlainFront(*values))
            return
        put_front(linears["down_proj"], GatedFront(*values, activation))
        replace(self.model, place, GatedMLP(linears))

    def experts(self, place: str, values: tuple[int, float, str] | None) -> None:
        """The fronts of a layer's experts."""
        first = self.first_of.get(place)
        if first is None and values is None:
            return
        own = self.model.get_submodule(place)
        assert isinstance(own, PackedExperts)  # those in 16 bit are refused from headers (``online_rules``)
        activation = _activation(own)
        bits, clip, key = values or (WIDE, 1.0, "")
        gated = activation is not None
        last = GatedFront(bits, clip, key, activation) if activation else PlainFront(bits, clip, key)
        first = first or PlainFront(WIDE, 1.0, "")
        replace(self.model, place, QuantizedExperts(own, first, last, gated=gated))

    # ---- the cache

    def guides(self) -> None:
        """Keep the guides of keys as they are in the file, also where the cache needs none."""
        if self.made.records.kv is not None and self.made.records.kv.guide:
            for layer in self.made.at.layers:
                kv_guides.keep(self.attention(layer))

    def attention(self, layer: Layer) -> nn.Module:
        """Return the module of a layer's attention."""
        place = self.place(layer.attention.writers[0]).rpartition(".")[0]
        found: nn.Module = self.model.get_submodule(place)
        return found

    def cache(self) -> None:
        """Attention over a quantized cache."""
        quant, bits = self.made.records.kv, self.made.settings.kv_bits
        assert quant is not None
        stored = KVPlan(bits, quant.clip_k[bits], quant.clip_v[bits], self.transform("qk"))
        softcap = getattr(self.model.config.get_text_config(), SOFTCAP, None)
        plans: dict[nn.Module, KVPlan] = {}
        for layer in self.made.at.layers:
            module = self.attention(layer)
            if quant.guide:
                refuse_guide(guide_of(layer), module.get_buffer(GUIDE), softcap)
            plans[module] = stored
        layers = self.place(self.made.at.layers[0].attention.writers[0]).partition(".layers.")[0]
        kv_attention.install(self.model, self.model.get_submodule(layers), plans)

    # ---- names

    def place(self, name: str) -> str:
        """Return the model's path of a module of the file."""
        found = self.frame.paths.get(name)
        if found is not None:
            return found
        return self.frame.names.tensor(f"{name}.weight")[0].rpartition(".")[0]

    def module(self, name: str) -> nn.Module:
        """Return the module of the model for one of the file."""
        found: nn.Module = self.model.get_submodule(self.place(name))
        return found

    def experts_of(self, name: str) -> str:
        """Return the place of the experts that a linear belongs to."""
        return self.place(name).rpartition(".experts.")[0] + ".experts"


def _activation(owner: nn.Module) -> str | None:
    """Return the operator's name of an MLP's activation, or None if it has none."""
    own = getattr(owner, "act_fn", None) or getattr(owner, "activation_fn", None)
    for name, found in OPERATOR_OF.items():
        if type(own) is type(ACT2FN[name]) and repr(own) == repr(ACT2FN[name]):
            return found
    return None
