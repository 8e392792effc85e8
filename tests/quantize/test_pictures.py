"""Pictures of the report: the numbers are where the lines go, and the card shows them."""

from __future__ import annotations

import math
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from quantize.test_outputs import manifest, quantize
from runner import run
from w4pack.convert.quantize import pictures

SPACE = "{http://www.w3.org/2000/svg}"


def lines(svg: str) -> list[list[tuple[float, float]]]:
    """Return the points of each line."""
    found = ElementTree.fromstring(svg).iter(f"{SPACE}polyline")
    return [[tuple(map(float, p.split(","))) for p in line.get("points", "").split()] for line in found]  # type: ignore[misc]


def test_lines_go_where_the_numbers_are() -> None:
    svg = pictures.over_layers("a < b", {"q & k": [1e-3, 1e-2, 1e-1], "down": [1e-2, 1e-2, 1e-2]})
    (first, second) = lines(svg)
    assert [x for x, _ in first] == [x for x, _ in second]
    assert first[1][0] - first[0][0] == pytest.approx(first[2][0] - first[1][0], abs=0.11)
    # equal factors are equal heights, and up is more
    assert (
        first[0][1] - first[1][1] == pytest.approx(first[1][1] - first[2][1], abs=0.11)
        and first[2][1] < first[0][1]
    )
    assert first[1][1] == second[0][1] == second[2][1]
    assert all(
        0 <= x <= pictures.WIDTH and 0 <= y <= pictures.HEIGHT for line in (first, second) for x, y in line
    )
    words = [t.text for t in ElementTree.fromstring(svg).iter(f"{SPACE}text")]
    assert words[0] == "a < b" and "q & k" in words and {"0", "1", "2", "0.01"} <= set(words)


@pytest.mark.parametrize("values", [[], [0.0], [math.nan, math.inf, -1.0], [3.0]])
def test_numbers_without_a_logarithm_are_left_out(values: list[float]) -> None:
    (points,) = lines(pictures.over_layers("x", {"y": values}))
    assert len(points) == (1 if values == [3.0] else 0)


def test_the_card_shows_the_pictures_of_its_model(llama: Path, book: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    quantize(llama, out, "--rotate", "offline", text=book).expect(0)
    value = manifest(out)
    card = (out / "README.md").read_text()
    assert re.findall(r"!\[[^]]+\]\((\S+)\)", card) == [
        "quantization-errors.svg",
        "quantization-outliers.svg",
    ]
    errors = lines((out / "quantization-errors.svg").read_text())
    assert len(errors) == 7 and all(len(line) == 2 for line in errors)  # kinds of linears, layers
    downs = [entry["error"] for name, entry in value["layers"].items() if name.endswith("down_proj")]
    # the first kind by name; its two heights are as far apart as the logarithms
    grid = lines(pictures.over_layers("x", {"down": downs}))[0]
    assert (grid[0][1] < grid[1][1]) == (errors[0][0][1] < errors[0][1][1])
    outliers = value["quantization"]["outliers"]
    assert len(outliers["source"]) == len(outliers["rotated"]) == 2
    assert all(v >= 1 for found in outliers.values() for v in found)
    assert set(value["files"]) >= {"quantization-errors.svg", "quantization-outliers.svg"}
    run("verify", out).expect(0)
    quantize(llama, tmp_path / "plain", text=book).expect(0)
    assert not (tmp_path / "plain" / "quantization-outliers.svg").exists()
