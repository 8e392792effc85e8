"""The formats page is enough to write a reader: its tables are the code's, its reader reads an artifact."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from w4pack.convert import convert, formats
from w4pack.convert.core.scheme import QuantScheme

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "reference" / "formats.md").read_text(encoding="utf-8")
DEMO = ROOT / "examples" / "demo-gptq"

SCHEMES = [
    QuantScheme(4, 64, True, False, 256, 512, "F16"),
    QuantScheme(4, 64, False, False, 256, 512, "F16"),
    QuantScheme(8, 32, False, False, 128, 256, "F16"),
    QuantScheme(4, 128, True, True, 256, 512, "F16"),
    QuantScheme(4, -1, True, False, 384, 256, "F16"),
    QuantScheme(4, 32, False, False, 80, 72, "F16"),  # off the artifact's tile
]


def table(layout: str) -> dict[str, tuple[str, str]]:
    """Return suffix -> (dtype, shape expression) of a layout's table."""
    section = PAGE.partition(f"### {layout}\n")[2].partition("\n##")[0]
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (\(.*?\)) \|", section, re.MULTILINE)
    return {name: (dtype, shape) for name, dtype, shape in rows}


def sizes(scheme: QuantScheme) -> dict[str, object]:
    k, n, g = scheme.in_features, scheme.out_features, scheme.group_size
    kp, np_ = -(-k // 64) * 64, -(-n // 64) * 64
    groups = 1 if g == -1 else -(-k // g)
    width = k if g == -1 else g
    m = 1 if width >= 128 else 2 if width >= 64 else 4
    z = m * math.ceil(math.ceil(groups / 8) / m)
    values = {"K": k, "N": n, "b": scheme.bits, "g": g, "G": groups, "Z": z}
    return values | {"Kp": kp, "Np": np_, "Gp": 1 if g == -1 else -(-kp // g), "ceil": math.ceil}


@pytest.mark.parametrize("layout", list(formats.FORMATS))
def test_tables_are_what_the_layouts_write(layout: str) -> None:
    rows, module, seen = table(layout), formats.get(layout), 0
    for scheme in SCHEMES:
        held = layout == "gptq" or module.limits(scheme) is None
        if not held:
            continue
        seen += 1
        specs = module.specs(scheme)
        assert set(specs) <= set(rows)
        for suffix, (dtype, shape) in specs.items():
            wanted_dtype, expression = rows[suffix]
            wanted = eval(expression.replace("'", "p"), {"__builtins__": {}}, sizes(scheme))
            assert shape == wanted, (layout, suffix, scheme)
            assert dtype == (scheme.scale_dtype if wanted_dtype == "s" else wanted_dtype)
    assert seen


def documented_reader() -> Any:
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(code, "formats.md", "exec"), names)
    return names["read_linear"]


def gptq_weight(tensors: dict[str, np.ndarray], name: str) -> np.ndarray:
    """Decode a symmetric 4-bit GPTQ linear, code by code."""
    words = tensors[f"{name}.qweight"].view(np.uint32)
    codes = np.stack([words >> np.uint32(4 * i) & np.uint32(15) for i in range(8)], axis=1)
    codes = codes.reshape(-1, words.shape[1]).astype(np.float32)
    scales = tensors[f"{name}.scales"].astype(np.float32)
    return ((codes - 8) * scales[tensors[f"{name}.g_idx"]]).T


def test_documented_reader_reads_an_artifact(tmp_path: Path) -> None:
    convert(DEMO, tmp_path / "out")
    read, source = documented_reader(), load_file(DEMO / "model.safetensors")
    names = sorted(n.removesuffix(".qweight") for n in source if n.endswith(".qweight"))
    assert len(names) == 14
    for name in names:
        assert np.array_equal(read(tmp_path / "out", name), gptq_weight(source, name)), name


@pytest.mark.parametrize(
    "case",
    ["gptqmodel-w4g32-asym-mini-llama", "gptqmodel-w8g32-asym-desc-llama", "gptqmodel-w4gm1-offtile-llama"],
)
@pytest.mark.shared
def test_documented_reader_reads_zeros_8_bit_and_padding(case: str, shared: Path, tmp_path: Path) -> None:
    folder = shared / "fixtures" / case
    convert(folder, tmp_path / "out")
    read, expected = documented_reader(), load_file(folder / "expected.safetensors")
    names = [n.removesuffix(".W") for n in expected if n.endswith(".W")]
    assert names
    for name in names:
        found = read(tmp_path / "out", name).astype(expected[f"{name}.W"].dtype)
        assert np.array_equal(found + 0, expected[f"{name}.W"] + 0), name
