"""Owns the picture of a benchmark: bars of each arm at each length of prompt, as SVG. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from moe_proxy.bench.result import Result, Row

_LABEL, _BARS, _VALUE, _PAD = 210, 400, 90, 16
_BAR, _GAP, _HEAD = 16, 4, 30
_COLOURS = ("#2a78d6", "#1baf7a", "#eda100", "#4a3aa7", "#e87ba4", "#008300")
_STOCK = "#8a8984"
_PANELS = (
    ("decode_per_s", "decode, tokens/s (more is better)", 1.0),
    ("prompt_per_s", "prompt, tokens/s (more is better)", 1.0),
    ("first_token_s", "time to first token, ms (less is better)", 1000.0),
)


@dataclass(frozen=True)
class _Bar:
    label: str
    value: float
    colour: str


def chart(result: Result, title: str) -> str:
    """The medians of ``result`` as an SVG document, ``title`` above."""
    rows = list(result.rows())
    lines: list[str] = []
    y = _PAD + 20
    for quantity, name, factor in _PANELS:
        bars = [
            _Bar(f"{row.arm.name}, {row.prompt_tokens}", value * factor, _colour(result, row))
            for row in rows
            if (value := row.median[quantity]) is not None
        ]
        if bars:
            y += _HEAD
            lines.append(_text(_PAD, y - 8, name, weight="bold"))
            lines += _panel(bars, y)
            y += len(bars) * (_BAR + _GAP)
    width, height = _LABEL + _BARS + _VALUE + 2 * _PAD, y + _PAD + 14
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
        f' viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#fcfcfb"/>',
        _text(_PAD, _PAD + 8, title, weight="bold"),
    ]
    foot = _text(
        _PAD, height - 10, "medians; after each arm's name the tokens of the prompt", colour="#6b6a66"
    )
    return "\n".join([*head, *lines, foot, "</svg>", ""])


def _panel(bars: Sequence[_Bar], top: int) -> list[str]:
    most = max(bar.value for bar in bars) or 1.0
    lines: list[str] = []
    for index, bar in enumerate(bars):
        y = top + index * (_BAR + _GAP)
        length = max(1.0, bar.value / most * _BARS)
        lines.append(_text(_PAD + _LABEL - 6, y + _BAR - 4, bar.label, anchor="end"))
        lines.append(
            f'<rect x="{_PAD + _LABEL}" y="{y}" width="{length:.1f}" height="{_BAR}" rx="2"'
            f' fill="{bar.colour}"/>'
        )
        value = f"{bar.value:.0f}" if bar.value >= 100 else f"{bar.value:.1f}"
        lines.append(_text(_PAD + _LABEL + length + 6, y + _BAR - 4, value))
    return lines


def _colour(result: Result, row: Row) -> str:
    if row.arm.kind == "stock":
        return _STOCK
    paged = [arm.name for arm in result.arms if arm.kind == "paged"]
    return _COLOURS[paged.index(row.arm.name) % len(_COLOURS)]


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal", colour: str = "#1f1f1d"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}" fill="{colour}">'
        f"{escape(text)}</text>"
    )
