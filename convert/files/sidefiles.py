"""What travels byte for byte, and what stays behind with a reason.

A deny-list: a file that no rule names is copied, whatever it is called. Weights that do not belong to the
model, indexes and the quantizer's config files would mislead a loader of the output, so they are the rules.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

from w4pack.convert.files.weightset import WeightSet

# config.json and these are written anew, or dropped: a stale one would describe another checkpoint
REWRITTEN = (
    "config.json",
    "quantize_config.json",
    "quant_config.json",
    "quantization_config.json",
    "hf_quant_config.json",
    "w4pack.json",
)
WEIGHT_SUFFIXES = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".gguf",
    ".ggml",
    ".h5",
    ".msgpack",
    ".onnx",
    ".onnx_data",
    ".ckpt",
    ".npz",
    ".tflite",
    ".mlmodel",
    ".pte",
    ".ot",
    ".nemo",
)
PARTIAL_SUFFIXES = (".incomplete", ".part", ".crdownload")
MACHINE_FILES = (".DS_Store", "Thumbs.db")
# patterns of names, any of which holds a tokenizer's vocabulary
TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.*",
    "*.spm",
    "spiece.model",
    "*.tiktoken",
    "tekken.json",
)
SHARED_FOLDER = "original/"  # Llama repositories keep the first release's weights and their settings here


def sort_files(
    files: Mapping[str, int],
    weights: WeightSet,
    skipped: Iterable[tuple[str, str]] = (),
) -> tuple[dict[str, int], list[tuple[str, int, str]]]:
    """Divide ``files`` into side files (name -> size) and those left out (name, size, reason).

    The model's own weights, its index and the files that are written anew are in neither.
    """
    consumed = {*weights.files, weights.index, *REWRITTEN}
    release = any(name.startswith(SHARED_FOLDER) and name.endswith(WEIGHT_SUFFIXES) for name in files)
    side: dict[str, int] = {}
    left_out = [(name, 0, reason) for name, reason in skipped]
    for name, size in files.items():
        if name in consumed:
            continue
        reason = _reason(name, weights, release)
        if reason is None:
            side[name] = size
        else:
            left_out.append((_shown(name), size, reason))
    return side, left_out


def _reason(name: str, weights: WeightSet, release: bool) -> str | None:
    base = name.rpartition("/")[2]
    if release and name.startswith(SHARED_FOLDER):
        return "weights of another layout, and what belongs to them"
    if name.lower().endswith(WEIGHT_SUFFIXES):
        return "not in the index" if weights.index and "/" not in name else "not a weight file of the model"
    if base.endswith(".index.json"):
        return "index of other weights"
    if (
        base.startswith(".git")
        or base in MACHINE_FILES
        or "__pycache__/" in name
        or ".ipynb_checkpoints/" in name
    ):
        return "belongs to the folder, not to the model"
    if base.endswith(PARTIAL_SUFFIXES):
        return "unfinished download"
    if _shown(name) != name:
        return "file name is not UTF-8"
    return None


def _shown(name: str) -> str:
    """Python carries bytes that are no UTF-8 as half surrogates, which can be neither printed nor stored."""
    return name.encode("utf-8", "backslashreplace").decode("utf-8")


def has_tokenizer(folder: Path) -> bool:
    """Tell whether a folder holds a tokenizer's vocabulary; whether it can be read is not looked at."""
    return any(file.is_file() for pattern in TOKENIZERS for file in folder.glob(pattern))
