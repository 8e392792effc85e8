"""One rotation as a record: its size, its factors, its signs, and the digest that says it is this one.

``y = x Q`` on row vectors, ``Q = diag(signs) (I ⊗ H_b) / √b`` with contiguous blocks of b. Where the all-ones
vector has to stay what it is (LayerNorm), ``Q`` is multiplied by one reflection. The record goes to JSON; a
loader applies the factors that are written in it, never a rule of its own.
"""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from w4pack.convert.rotate.orders import Factors, block_order, factors

GLOBAL = 2**32 - 1  # in place of a layer's index, for a rotation of the whole model
# Which signs are drawn: the second word of the seed. Rotations without signs have no row.
KINDS = {"r1": 1, "r2": 2, "r3": 3, "r4": 4, "heads": 5, "q_latent": 6, "kv_latent": 7, "nope": 8}


@dataclass(frozen=True, slots=True)
class Rotation:
    """One orthogonal matrix.

    kind     ``r1`` residual stream, ``r2`` value heads, ``r3`` q and k, ``r4`` MLP, ``heads`` across heads,
             ``q_latent``, ``kv_latent``, ``nope`` of low-rank attention; ``r1_online`` in front of readers of
             a stream that cannot be rotated itself
    layer    index of the decoder layer, or -1 for the whole model
    n        length of the vectors
    block    order of the Hadamard matrix; n / block copies of it stand on the diagonal
    factors  (order, construction) of each Kronecker factor of a block, in order, the last runs fastest
    signs    hex of the signs' bits (1 for +1, first sign in the lowest bit of the first byte), or None
    ones     the all-ones vector is fixed
    """

    kind: str
    layer: int
    n: int
    block: int
    factors: tuple[tuple[int, str], ...]
    signs: str | None
    ones: bool = False

    @property
    def digest(self) -> str:
        """sha256 of the canonical JSON of everything that decides the matrix."""
        value: dict[str, Any] = {
            "n": self.n,
            "factors": [[m, kind] for m, kind in self.factors],
            "block": self.block,
            "signs": self.signs,
        }
        if self.ones:
            value["fixes"] = "ones"
        return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def sign_vector(self) -> "NDArray[np.int8] | None":
        """Return the signs as +1 and -1, or None."""
        if self.signs is None:
            return None
        bits = np.unpackbits(np.frombuffer(bytes.fromhex(self.signs), np.uint8), bitorder="little")
        return (2 * bits[: self.n].astype(np.int8) - 1).astype(np.int8)

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON values, digest included."""
        return {
            "kind": self.kind,
            "layer": None if self.layer < 0 else self.layer,
            "n": self.n,
            "block": self.block,
            "factors": [[m, kind] for m, kind in self.factors],
            "signs": self.signs,
            **({"fixes": "ones"} if self.ones else {}),
            "digest": self.digest,
        }


def make_rotation(
    kind: str, n: int, layer: int = -1, *, seed: int | None = None, parts: int = 1, ones: bool = False
) -> Rotation | None:
    """Return the rotation of one site, or None where nothing but the identity exists (n odd).

    seed   draws the signs; None: no signs
    parts  number of equal ranges that must not be mixed (tensor parallelism)
    """
    block = block_order(n // parts)
    found = factors(block)
    if block == 1 or found is None:
        return None
    return Rotation(kind, layer, n, block, _plain(found), _signs(seed, kind, layer, n), ones)


def _plain(found: Factors) -> tuple[tuple[int, str], ...]:
    return tuple((m, kind) for m, kind in found)


def _signs(seed: int | None, kind: str, layer: int, n: int) -> str | None:
    """Draw n signs. PCG64 and SeedSequence give the same bits in every version of numpy, on every machine."""
    if seed is None:
        return None
    words = [seed, KINDS[kind], GLOBAL if layer < 0 else layer]
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence(words)))
    bits = generator.integers(0, 2, n).astype(np.uint8)
    return np.packbits(bits, bitorder="little").tobytes().hex()
