"""w4pack: 4-bit checkpoints in the order that tensor cores read them. Names are imported on first use."""

__version__ = "0.1.0"
