"""The artifact's ``online`` records as the runtime reads them: see ``convert.dialects.online``, which holds
the one parser, for the converter too."""

from w4pack.convert.dialects.online import (
    ACT_SITES,
    BITS,
    HADAMARD_SITES,
    ActQuant,
    Clips,
    Factors,
    Hadamard,
    KVQuant,
    Online,
    Settings,
    parse,
)

__all__ = [
    "ACT_SITES",
    "BITS",
    "HADAMARD_SITES",
    "ActQuant",
    "Clips",
    "Factors",
    "Hadamard",
    "KVQuant",
    "Online",
    "Settings",
    "parse",
]
