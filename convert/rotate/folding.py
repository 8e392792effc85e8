"""The folding rules: which steps each tensor of a model takes so that its rotated self computes the same.

``RMSNorm(h Q) = RMSNorm(h) Q`` once the gain has moved from the norm into its readers; so readers of the
stream get ``W diag(g) Q``, writers ``Qᵀ W``, the embedding ``E Q``. Inside a block the same rule holds for
every vector that is rotated: who makes it has its rows turned, who reads it its columns.
"""

from dataclasses import dataclass, field

from w4pack.convert.errors import SourceError
from w4pack.convert.rotate.accounting import Layer, Model
from w4pack.convert.rotate.architecture import Block, Latent
from w4pack.convert.rotate.rotation import Rotation
from w4pack.convert.rotate.steps import Center, Divide, Fill, Gain, Shift, Step, Turn, whole


@dataclass(slots=True)
class Folding:
    """Collects the steps of every tensor of a model."""

    model: Model
    steps: dict[str, list[Step]] = field(default_factory=dict)

    # ------------------------------------------------------------ the stream

    def stream(self, r1: Rotation) -> None:
        """Rotate the residual stream: tables, every block, final norm and head."""
        architecture = self.model.architecture
        for table in architecture.embeddings:
            self._write(f"{table}.weight", 1, r1)
        for layer in self.model.layers:
            for block in (layer.attention, layer.mlp):
                self._block(block, r1)
        self._norm(architecture.final_norm, (architecture.head,), r1)
        head = f"{architecture.head}.weight"
        self._add(head, *self._read_steps(architecture.final_norm, r1))

    def _block(self, block: Block, r1: Rotation) -> None:
        for module in block.readers:
            self._check(f"{module}.weight", 1, r1.n)
            self._add(f"{module}.weight", *self._read_steps(block.norm, r1))
            if self._shifts(block) and block.norm:
                self._add(f"{module}.bias", Shift(f"{module}.weight", f"{block.norm}.bias"))
        for module in block.writers:
            self._write(f"{module}.weight", 0, r1)
            if self.model.has(f"{module}.bias"):
                self._write(f"{module}.bias", 0, r1)
        if block.norm:
            self._norm(block.norm, block.readers, r1)

    def _read_steps(self, norm: str | None, r1: Rotation) -> list[Step]:
        gain: list[Step] = [Gain(f"{norm}.weight", self._plus_one)] if norm else []
        return [*gain, whole(1, r1)]

    def _write(self, tensor: str, axis: int, r1: Rotation) -> None:
        self._check(tensor, axis, r1.n)
        center: list[Step] = [Center(axis)] if self.model.architecture.norm == "layer" else []
        self._add(tensor, *center, whole(axis, r1))

    def _norm(self, norm: str, readers: tuple[str, ...], r1: Rotation) -> None:
        """Leave a norm without gain. Its bias moves into the readers' biases, or stays, rotated."""
        self._check(f"{norm}.weight", 0, r1.n)
        self._add(f"{norm}.weight", Fill(0.0 if self._plus_one else 1.0))
        if not self.model.has(f"{norm}.bias"):
            return
        if self._have_biases(readers):
            self._add(f"{norm}.bias", Fill(0.0))
        else:
            self._add(f"{norm}.bias", Divide(f"{norm}.weight"), whole(0, r1))

    @property
    def _plus_one(self) -> bool:
        return self.model.architecture.norm == "rms_plus_one"

    def _shifts(self, block: Block) -> bool:
        has_bias = block.norm is not None and self.model.has(f"{block.norm}.bias")
        return has_bias and self._have_biases(block.readers)

    def _have_biases(self, readers: tuple[str, ...]) -> bool:
        return all(self.model.has(f"{module}.bias") for module in readers)

    # ------------------------------------------------------------ inside attention

    def values(self, layer: Layer, r2: Rotation, size: int) -> None:
        """Rotate the value heads: the rows that make them, and the columns that read them, head by head."""
        turn = value_rows(self.model, layer, r2, size)
        module = layer.prefix + self.model.architecture.values.module
        self._add(f"{module}.weight", turn)
        if self.model.has(f"{module}.bias"):
            self._add(f"{module}.bias", turn)
        for out in layer.attention.writers:
            heads = self.model.heads
            self._check(f"{out}.weight", 1, heads * size)
            self._add(f"{out}.weight", Turn(1, r2, stride=size, count=heads))

    def across_heads(self, layer: Layer, heads: Rotation, size: int) -> None:
        """Let the reader of the attention output undo a transform across heads that runs online."""
        for out in layer.attention.writers:
            self._add(f"{out}.weight", Turn(1, heads, stride=heads.n * size, apart=size, online=True))

    def latent(self, layer: Layer, latent: Latent, rotation: Rotation) -> None:
        """Rotate a latent vector between its two linears; the norm between them gives up its gain."""
        down, norm, up = (layer.prefix + name for name in (latent.down, latent.norm, latent.up))
        self._check(f"{norm}.weight", 0, rotation.n)
        self._check(f"{up}.weight", 1, rotation.n)
        self._add(f"{down}.weight", whole(0, rotation))
        if self.model.has(f"{down}.bias"):
            self._add(f"{down}.bias", whole(0, rotation))
        self._add(f"{up}.weight", Gain(f"{norm}.weight", self._plus_one), whole(1, rotation))
        self._add(f"{norm}.weight", Fill(0.0 if self._plus_one else 1.0))

    def nope(self, layer: Layer, rotation: Rotation) -> None:
        """Rotate the part of q and k that no position touches: both sides of a product, so it cancels."""
        for name in self.model.architecture.nope:
            tensor = f"{layer.prefix}{name}.weight"
            if not self.model.has(tensor):
                continue
            stride = self.model.tensors[tensor].shape[0] // self.model.heads
            for each in (tensor, f"{layer.prefix}{name}.bias"):
                if self.model.has(each):
                    self._add(each, Turn(0, rotation, stride=stride, count=self.model.heads))

    # ------------------------------------------------------------ readers of online transforms

    def columns(self, module: str, rotation: Rotation) -> None:
        """Rotate the columns of a linear whose input is rotated at run time."""
        self._check(f"{module}.weight", 1, rotation.n)
        self._add(f"{module}.weight", whole(1, rotation, online=True))

    def _add(self, tensor: str, *steps: Step) -> None:
        self.steps.setdefault(tensor, []).extend(steps)

    def _check(self, tensor: str, axis: int, size: int) -> None:
        """Raise SourceError unless an axis of a tensor has the length that the rotation needs."""
        info = self.model.tensors[tensor]
        if len(info.shape) > axis and info.shape[axis] == size:
            return
        raise SourceError(
            f"`{tensor}` has another shape than its place in the model",
            code="shape-mismatch",
            where=f"{info.file}, {tensor}",
            expected=f"{size} {'rows' if axis == 0 else 'columns'}",
            found=str(list(info.shape)),
        )


def head_size(model: Model, layer: Layer) -> int:
    """Return the length of a value head, from the columns of the linear that reads the heads.

    Neither ``head_dim`` (absent, or of q and k alone) nor hidden size / heads says it for every model.
    """
    tensor = f"{layer.attention.writers[0]}.weight"
    info = model.tensors[tensor]
    if len(info.shape) == 2 and info.shape[1] % model.heads == 0:
        return info.shape[1] // model.heads
    raise SourceError(
        f"`{tensor}` does not hold whole heads",
        code="shape-mismatch",
        where=f"{info.file}, {tensor}",
        expected=f"a multiple of {model.heads} columns, one part a head",
        found=str(list(info.shape)),
    )


def value_rows(model: Model, layer: Layer, r2: Rotation, size: int) -> Turn:
    """Return the step that rotates the rows of the value heads, wherever the layout puts them."""
    values = model.architecture.values
    name = f"{layer.prefix}{values.module}.weight"
    rows = model.tensors[name].shape[0]
    if values.layout == "latent":
        nope = model.number("qk_nope_head_dim")
        expected = model.heads * (nope + size)
        turn = Turn(0, r2, stride=nope + size, count=model.heads, offset=nope)
    elif values.layout == "after_q_and_k":
        expected = (model.heads + 2 * model.kv_heads) * size
        turn = Turn(0, r2, start=(model.heads + model.kv_heads) * size, stride=size, count=model.kv_heads)
    else:
        expected = model.kv_heads * size
        turn = Turn(0, r2, stride=size, count=model.kv_heads)
    if rows == expected:
        return turn
    raise SourceError(
        f"`{name}` does not hold the heads that the config counts",
        code="shape-mismatch",
        where=f"{model.tensors[name].file}, {name}",
        expected=f"{expected} rows",
        found=str(list(model.tensors[name].shape)),
    )
