"""The sentences of a model card, per target where they differ. ORG/NAME stands for the repository."""

TITLES = {
    "marlin": "pre-packed Marlin artifact",
    "marlin-legacy": "legacy Marlin checkpoint",
    "gptq": "GPTQ checkpoint",
    "awq": "AWQ checkpoint",
    "compressed-tensors": "compressed-tensors checkpoint",
    "dense": "checkpoint with 16-bit weights",
}

LOSSLESS = """\
Lossless: every weight is what the source's codes, zero points and scales say, bit for bit."""

DEQUANTIZED = """\
Dequantized: every weight is `(code - zero point) * scale`, rounded once to the dtype of the output."""

LOSSY = """\
Not lossless: the linears listed below differ from the source. All others are the same, bit for bit."""

ROTATED = """\
Rotated: Hadamard rotations of the residual stream and of the value heads are folded into the weights, in
float64, each weight rounded once. The model computes what its source computes, up to that rounding, in its
ordinary class; that was proved layer by layer before the weights were written. Outliers are spread, which is
what low-bit quantization wants."""

QUANTIZED = """\
Quantized from 16-bit weights: the linears below have codes of 4 or 8 bit. What was lost is listed under
Quantization."""

UNVERIFIED = """\
`w4pack.json` holds the sha256 of every tensor. `w4pack verify OUT` checks a download against it, and
`w4pack verify OUT --against {source}` compares codes, zero points, scales and order as well.
Not verified yet when this card was written."""

_VLLM = """\
`ORG/NAME` stands for this repository, or for a folder that holds its files.

vLLM:

```
vllm serve ORG/NAME
```"""

_PYTHON = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("ORG/NAME", device_map="auto")
tokenizer = AutoTokenizer.from_pretrained("ORG/NAME")
```"""

_ARTIFACT = """\
The weights lie in the order in which tensor cores read them (layout `marlin-16x64`), so that an engine that
knows the format loads them without repacking. Engines without w4pack stop with an error instead of loading
something else. `ORG/NAME` stands for this repository, or for a folder that holds its files.

```
pip install w4pack
w4pack inspect ORG/NAME                    # what is in it, without a download
w4pack convert ORG/NAME OUT --to gptq      # a portable checkpoint, for stock engines
w4pack unpack ORG/NAME OUT                 # the checkpoint it was made from

pip install 'w4pack[gpu]'
w4pack generate ORG/NAME "PROMPT"          # runs it, in transformers
```"""

_LEGACY = """\
For auto-gptq 0.6 to 0.7.1 and vLLM releases of that time; current engines no longer load this layout.
`w4pack convert ORG/NAME OUT --to gptq` writes a checkpoint that they load."""


def _stock(extra: str | None) -> str:
    needs = f", after `pip install {extra}`" if extra else ""
    return f"{_VLLM}\n\ntransformers{needs}:\n\n{_PYTHON}"


LOADING = {
    "marlin": _ARTIFACT,
    "marlin-legacy": _LEGACY,
    "gptq": _stock("gptqmodel"),
    "awq": _stock("gptqmodel"),
    "compressed-tensors": _stock("compressed-tensors"),
    "dense": _stock(None),
}
