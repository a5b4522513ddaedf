# SPDX-License-Identifier: Apache-2.0
"""Small inline SVG charts for reports: no library, no script, sharp at any size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

BAR_HEIGHT = 26
ROW_HEIGHT = 38
LABEL_WIDTH = 250
PLOT_WIDTH = 430
VALUE_WIDTH = 130


@dataclass(frozen=True)
class Bar:
    """One bar with its spread; all values in the chart's unit."""

    label: str
    value: float
    low: float
    high: float
    color: str


@dataclass(frozen=True)
class Stack:
    """One bar made of parts `(name, share, color)`; the shares add up to at most 1."""

    label: str
    parts: tuple[tuple[str, float, str], ...]
    note: str = ""


def bar_chart(bars: Sequence[Bar], *, unit: str, title: str) -> str:
    """Horizontal bars from zero, each with a whisker from its lowest to its highest repetition."""
    scale = PLOT_WIDTH / (max((bar.high for bar in bars), default=0.0) or 1.0)
    rows = []
    for row, bar in enumerate(bars):
        top = row * ROW_HEIGHT + 6
        middle = top + BAR_HEIGHT / 2
        left, right = LABEL_WIDTH + bar.low * scale, LABEL_WIDTH + bar.high * scale
        rows.append(
            _row_label(bar.label, middle)
            + f'<rect x="{LABEL_WIDTH}" y="{top}" width="{max(bar.value * scale, 1):.1f}" '
            f'height="{BAR_HEIGHT}" rx="3" fill="{bar.color}"/>'
            f'<path d="M{left:.1f} {middle}H{right:.1f}M{left:.1f} {middle - 5}v10'
            f'M{right:.1f} {middle - 5}v10" class="whisker"/>'
            f'<text x="{max(right, LABEL_WIDTH + bar.value * scale) + 8:.1f}" y="{middle}" class="value">'
            f"{bar.value:.2f} {escape(unit)}</text>"
        )
    return _svg(rows, title)


def stack_chart(stacks: Sequence[Stack], *, title: str) -> str:
    """Horizontal bars of full width, divided into named shares."""
    rows = []
    for row, stack in enumerate(stacks):
        top = row * ROW_HEIGHT + 6
        middle = top + BAR_HEIGHT / 2
        left = float(LABEL_WIDTH)
        cells = [_row_label(stack.label, middle)]
        for name, share, color in stack.parts:
            width = share * PLOT_WIDTH
            if width < 0.2:
                continue
            cells.append(
                f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{BAR_HEIGHT}" fill="{color}">'
                f"<title>{escape(name)}: {share:.1%}</title></rect>"
            )
            left += width
        note = f'<text x="{LABEL_WIDTH + PLOT_WIDTH + 8}" y="{middle}" class="value">{escape(stack.note)}</text>'
        rows.append("".join(cells) + note)
    return _svg(rows, title)


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """Names `(name, color)` with a patch of their color, as HTML."""
    items = "".join(f'<span><i style="background:{color}"></i>{escape(name)}</span>' for name, color in entries)
    return f'<p class="legend">{items}</p>'


def _row_label(label: str, middle: float) -> str:
    return f'<text x="{LABEL_WIDTH - 12}" y="{middle}" class="label">{escape(label)}</text>'


def _svg(rows: Sequence[str], title: str) -> str:
    width = LABEL_WIDTH + PLOT_WIDTH + VALUE_WIDTH
    height = len(rows) * ROW_HEIGHT + 6
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title, quote=True)}">'
        + "".join(rows)
        + "</svg>"
    )
