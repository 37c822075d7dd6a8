"""A few curves over steps as one small SVG: for documents, which load no script."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

WIDTH: Final = 340
HEIGHT: Final = 170
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 30, 28
COLOURS: Final = ("#2a6fb0", "#c4622d")


@dataclass(frozen=True)
class Panel:
    """One plot; every curve has a value for each step, None where there is none."""

    title: str
    curves: Sequence[tuple[str, Sequence[float | None]]]
    low: float
    high: float


def step_chart(steps: Sequence[int], panels: Sequence[Panel]) -> str:
    """The panels beside each other; equal input gives equal bytes."""
    width = WIDTH * len(panels)
    body = "\n".join(
        f'<g transform="translate({WIDTH * index} 0)">\n{_panel(steps, panel)}\n</g>'
        for index, panel in enumerate(panels)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" width="{width}" '
        f'height="{HEIGHT}" font-family="sans-serif" font-size="11" fill="#333">\n'
        f'<rect width="{width}" height="{HEIGHT}" fill="#fff"/>\n{body}\n</svg>\n'
    )


def _panel(steps: Sequence[int], panel: Panel) -> str:
    right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM
    span = max(len(steps) - 1, 1)

    def at(index: int, value: float) -> str:
        x = _LEFT + (right - _LEFT) * index / span
        y = bottom - (bottom - _TOP) * (value - panel.low) / (panel.high - panel.low)
        return f"{x:.1f},{y:.1f}"

    parts = [
        f'<text x="{_LEFT}" y="15" font-weight="bold">{escape(panel.title)}</text>',
        f'<path d="M{_LEFT} {_TOP}V{bottom}H{right}" fill="none" stroke="#999"/>',
        f'<text x="{_LEFT - 5}" y="{_TOP + 4}" text-anchor="end">{panel.high:g}</text>',
        f'<text x="{_LEFT - 5}" y="{bottom + 4}" text-anchor="end">{panel.low:g}</text>',
        f'<text x="{_LEFT}" y="{HEIGHT - 10}">step {steps[0]}</text>',
        f'<text x="{right}" y="{HEIGHT - 10}" text-anchor="end">{steps[-1]}</text>',
    ]
    for number, (name, values) in enumerate(panel.curves):
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join(at(i, v) for i, v in enumerate(values) if v is not None)
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
        parts.append(
            f'<text x="{right}" y="{15 + 13 * number}" text-anchor="end" fill="{colour}">'
            f"{escape(name)}</text>"
        )
    return "\n".join(parts)
