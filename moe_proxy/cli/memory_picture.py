"""Owns how a forecast looks in a terminal: bars of memory, and a start's few lines. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from moe_proxy.cli.units import bytes_text
from moe_proxy.forecast import Forecast, HitRate, Memory, Part

# Letters tell the parts apart where there is no colour.
_LOOKS = {
    "experts": ("E", "green"),
    "dense weights": ("D", "blue"),
    "KV cache": ("K", "magenta"),
    "compute buffers": ("C", "yellow"),
    "staging": ("S", "cyan"),
    "driver": ("V", "red"),
    "reserve": ("R", "bright_black"),
    "token embeddings": ("T", "blue"),
    "free": (".", "bright_black"),
}


def shares(sizes: Sequence[int], cells: int) -> list[int]:
    """``cells`` handed out in proportion to ``sizes``.

    What is not nothing gets one at least, if there are enough.
    """
    total = sum(sizes)
    if not total or cells <= 0:
        return [0] * len(sizes)
    exact = [size * cells / total for size in sizes]
    given = [max(int(share), 1 if size else 0) for share, size in zip(exact, sizes, strict=True)]
    by_rest = sorted(range(len(sizes)), key=lambda i: given[i] - exact[i])
    for index in by_rest:
        if sum(given) < cells and sizes[index]:
            given[index] += 1
    while sum(given) > cells:
        given[max(range(len(given)), key=given.__getitem__)] -= 1
    return given


def bar(title: str, memory: Memory, width: int, *, letters: bool) -> list[Text]:
    """A line with the bar of ``width`` cells, and one for each part: its mark, name, size and share."""
    parts = [part for part in (*memory.parts, Part("free", memory.free_bytes)) if part.size_bytes]
    cells = shares([part.size_bytes for part in parts], width)
    line = Text(f"{title:5s}{bytes_text(memory.total_bytes):>10s}  ")
    for part, count in zip(parts, cells, strict=True):
        letter, colour = _LOOKS[part.name]
        line.append((letter if letters else "█") * count, style=colour)
    lines = [line]
    for part in parts:
        letter, colour = _LOOKS[part.name]
        share = f"{100 * part.size_bytes / max(memory.total_bytes, 1):.1f} %"
        row = Text("  ")
        row.append(letter if letters else "█", style=colour)
        row.append(f" {part.name:17s}{bytes_text(part.size_bytes):>10s} {share:>8s}")
        lines.append(row)
    if memory.over_bytes:
        lines.append(Text(f"  {bytes_text(memory.over_bytes)} more than there is", style="bold red"))
    return lines


def hit_text(hits: HitRate) -> str:
    """The expected hit rate and what it is from."""
    if hits.least > 0.9995:
        return "100%"
    if not hits.from_map:
        return f"at least {hits.mean:.0%}"
    spread = "" if hits.most - hits.least < 0.005 else f" ({hits.least:.0%} to {hits.most:.0%} by domain)"
    return f"about {hits.mean:.0%}{spread}"


def speed_text(tokens_per_s: float) -> str:
    """Tokens per second, not more digits than an estimate has."""
    return f"{tokens_per_s:.0f} t/s" if tokens_per_s >= 10 else f"{tokens_per_s:.1f} t/s"


def expected_speed_text(expected: Forecast) -> str:
    """The speed to expect; without a GPU nothing but reading is in it, so that it is a bound."""
    return f"{'about' if expected.vram else 'at most'} {speed_text(expected.tokens_per_s)}"


def short(expected: Forecast) -> list[str]:
    """What ``start`` says of it: where memory goes, and what to expect."""
    memory, name = (expected.vram, "VRAM") if expected.vram else (expected.ram, "RAM")
    assert memory is not None
    parts = sorted(memory.parts, key=lambda part: part.name != "experts")
    listed = ", ".join(f"{part.name} {bytes_text(part.size_bytes)}" for part in parts if part.size_bytes)
    lines = [f"{name} {bytes_text(memory.total_bytes)}: {listed}."]
    if memory.over_bytes:
        lines.append(
            f"Warning: that is about {bytes_text(memory.over_bytes)} more than there is: lower --ctx-size."
        )
    return [
        *lines,
        f"To expect: {hit_text(expected.hits)} of picks resident, {expected_speed_text(expected)};"
        " an estimate, moe-proxy plan says from what.",
    ]
