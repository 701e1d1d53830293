"""A picture of what a token, and a request, costs the process in the middle: bars, as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from benchmarks.goals import Summary
from benchmarks.measure import Result
from benchmarks.works import BY_KEY

WORKS = ("paced-128x50-4", "paced-512x25-4", "full-128", "one-64")
_BAR, _GAP, _LABELS, _BARS, _VALUES = 16, 6, 270, 460, 90
_OURS, _BARE, _PEERS = "#2b6cb0", "#a0aec0", "#dd6b20"


def colour(target: str) -> str:
    return _OURS if target.startswith("head") else _BARE if target.startswith("bare") else _PEERS


def bars(summary: Summary, work: str, top: int) -> tuple[list[str], int]:
    """One chart, cheapest first, on a logarithmic scale; its elements, and where it ends."""
    costs = [(cost, target) for target in summary.targets if (cost := summary.cost(work, target))]
    unit = "request" if BY_KEY[work].per_request else "token"
    parts = [_text(0, top + 14, f"{BY_KEY[work].title}: CPU, µs per {unit}", bold=True)]
    top += 24
    if not costs:
        return parts, top
    least = math.log10(min(costs)[0]) - 0.3
    wide = _BARS / max(math.log10(max(costs)[0]) - least, 0.1)
    for cost, target in sorted(costs):
        width = (math.log10(cost) - least) * wide
        parts.append(_text(_LABELS - 8, top + 12, target, end=True))
        fill = colour(target)
        parts.append(
            f'<rect x="{_LABELS}" y="{top}" width="{width:.1f}" height="{_BAR}" rx="2" fill="{fill}"/>'
        )
        parts.append(_text(_LABELS + width + 6, top + 12, f"{cost:,.1f}"))
        top += _BAR + _GAP
    return parts, top + 14


def _text(x: float, y: float, text: str, *, bold: bool = False, end: bool = False) -> str:
    more = ' font-weight="bold"' if bold else ""
    more += ' text-anchor="end"' if end else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{more}>{escape(text)}</text>'


def drawn(results: Sequence[Result]) -> str:
    summary, parts, top = Summary(results), list[str](), 10
    for work in WORKS:
        more, top = bars(summary, work, top)
        parts += more
    width = _LABELS + _BARS + _VALUES
    runs = 1 + max((result.run for result in results), default=0)
    legend = f"ours blue, bare relays grey, peers orange; logarithmic; medians of {runs}"
    parts.append(_text(0, top + 10, legend))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top + 24}" '
        f'viewBox="-10 0 {width + 10} {top + 24}" font-family="sans-serif" font-size="12">\n'
        f'<rect x="-10" width="{width + 10}" height="{top + 24}" fill="white"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )
