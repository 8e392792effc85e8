"""What ``build`` compiles for the 4-bit runtime: each module with kernels lists its files in this form."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class File:
    """One kernel: its source below ``csrc``, its entry and defines; ``hot`` ones may not spill."""

    source: str
    entry: str
    defines: tuple[str, ...]
    hot: bool = True
