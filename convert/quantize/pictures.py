"""Pictures of a report as SVG: lines over the decoder layers, on a logarithmic scale.

Written by hand, so that a report needs no plotting library and is the same text on every machine.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 720, 360  # pixels
LEFT, RIGHT, TOP, BOTTOM = 64, 150, 36, 40  # margins: numbers, legend, title, layers
COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#000000",
)  # told apart by all eyes
STEPS = (1, 2, 5)  # lines of the grid in each power of ten


def over_layers(title: str, series: Mapping[str, Sequence[float]]) -> str:
    """Return an SVG with one line a series; the n-th number is that of decoder layer n.

    Numbers that are not positive and finite are left out: a logarithm does not have them.
    """
    shown = {name: _points(values) for name, values in series.items()}
    found = [value for points in shown.values() for _, value in points]
    low, high = (min(found), max(found)) if found else (1.0, 10.0)
    floor, ceiling = math.log10(low) - 0.05, math.log10(high) + 0.05
    last = max((len(values) for values in series.values()), default=1) - 1

    def x(layer: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * layer / max(last, 1)

    def y(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (ceiling - math.log10(value)) / (ceiling - floor)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="14">{escape(title)}</text>',
    ]
    for value in _grid(floor, ceiling):
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#ddd"/>'
            f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.3g}</text>'
        )
    for layer in _layers(last):
        parts.append(f'<text x="{x(layer):.1f}" y="{HEIGHT - 16}" text-anchor="middle">{layer}</text>')
    for number, (name, points) in enumerate(shown.items()):
        colour, row = COLOURS[number % len(COLOURS)], TOP + 12 + 18 * number
        path = " ".join(f"{x(layer):.1f},{y(value):.1f}" for layer, value in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(
            f'<rect x="{WIDTH - RIGHT + 12}" y="{row - 9}" width="10" height="10" fill="{colour}"/>'
            f'<text x="{WIDTH - RIGHT + 28}" y="{row}">{escape(name)}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def _points(values: Sequence[float]) -> list[tuple[int, float]]:
    return [(n, v) for n, v in enumerate(values) if v > 0 and math.isfinite(v)]


def _grid(floor: float, ceiling: float) -> Iterator[float]:
    """Yield round numbers between two powers of ten."""
    for power in range(math.floor(floor), math.ceil(ceiling) + 1):
        for step in STEPS:
            value = step * 10.0**power
            if floor <= math.log10(value) <= ceiling:
                yield value


def _layers(last: int) -> range:
    """Return the layers whose number is written: about ten of them."""
    return range(0, last + 1, max(1, -(-last // 10)))
