"""Tables of what was measured: each figure as the median of its runs, with the least and the most."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from benchmarks.goals import Summary, goals
from benchmarks.measure import Result
from benchmarks.plan import Spread, spread
from benchmarks.works import BY_KEY

if TYPE_CHECKING:
    from benchmarks.suite import Everything

_NONE = "–"
_AT_PACE = 0.95


def line_of(result: Result) -> str:
    """One run, while it all goes on."""
    parts = [f"{result.work:16} {result.target:40} run {result.run + 1}"]
    parts.append(f"{result.tokens_per_s:9,.0f} tokens/s")
    if result.us_per_token is not None:
        parts.append(f"{result.us_per_token:8.2f} µs/token")
    if result.us_per_request is not None:
        parts.append(f"{result.us_per_request:8.1f} µs/request")
    if result.way_p50_ms is not None and result.way_p99_ms is not None:
        parts.append(f"way {result.way_p50_ms:.2f} / {result.way_p99_ms:.2f} ms")
    parts.append(f"driver {result.driver_share:.2f} of a core, late {result.lag_p99_ms:.1f} ms")
    if result.lost:
        parts.append(f"LOST {result.lost}: {result.failure[:120]}")
    return "  ".join(parts)


def number(value: float | None) -> str:
    """With three digits that say something."""
    if value is None:
        return _NONE
    if value and abs(value) < 10:
        return f"{value:.2f}"
    return f"{value:,.1f}" if abs(value) < 100 else f"{value:,.0f}"


def spread_text(value: Spread | None) -> str:
    if value is None:
        return _NONE
    if value.least == value.most:
        return number(value.middle)
    return f"{number(value.middle)} ({number(value.least)}–{number(value.most)})"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """As Markdown has it, with columns that line up."""
    every = [list(head), *map(list, rows)]
    widths = [max(len(row[i]) for row in every) for i in range(len(head))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in every
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


_Value = Callable[[Result], float | None]


def work_table(summary: Summary, key: str, targets: Sequence[str]) -> str:
    per_request = BY_KEY[key].per_request
    cost = "µs/request" if per_request else "µs/token"
    rate = "requests/s" if per_request else "tokens/s"
    head = [
        "through", f"CPU, {cost}", rate, "way p50, ms", "way p99, ms", "first p50, ms", "first p99, ms",
        "added p50, ms", "added p99, ms", "RSS, MB", "driver", "late p99, ms", "note",
    ]  # fmt: skip
    rows = [_work_row(summary, key, target, per_request=per_request) for target in targets]
    return table(head, [row for row in rows if row])


def _work_row(summary: Summary, key: str, target: str, *, per_request: bool) -> list[str]:
    results = summary.of(key, target)
    if not results:
        return []

    def over(value: _Value) -> str:
        return spread_text(spread([value(result) for result in results]))

    def middle(value: _Value) -> str:
        found = spread([value(result) for result in results])
        return number(found.middle if found else None)

    return [
        target,
        over(lambda r: r.us_per_request if per_request else r.us_per_token),
        middle(lambda r: r.requests_per_s if per_request else r.tokens_per_s),
        over(lambda r: r.way_p50_ms),
        middle(lambda r: r.way_p99_ms),
        middle(lambda r: r.first_p50_ms),
        middle(lambda r: r.first_p99_ms),
        number(summary.added_ms(key, target, 50)),
        number(summary.added_ms(key, target, 99)),
        middle(lambda r: r.rss_mb),
        f"{max(r.driver_share for r in results):.2f}",
        middle(lambda r: r.lag_p99_ms),
        note_of(results),
    ]


def overview(summary: Summary, value: Callable[[str, str], float | None]) -> str:
    """One figure of each work and target."""
    keys = [key for key in BY_KEY if any(summary.of(key, target) for target in summary.targets)]
    rows = [[target, *(number(value(key, target)) for key in keys)] for target in summary.targets]
    return table(["through", *keys], [row for row in rows if set(row[1:]) != {_NONE}])


def note_of(results: Sequence[Result]) -> str:
    notes = []
    if any(result.driver_limits for result in results):
        notes.append("the driver may limit it")
    work = BY_KEY[results[0].work]
    reached = spread([result.tokens_per_s for result in results])
    if reached and reached.middle < work.slots * work.rate * _AT_PACE:
        notes.append("not at the pace of its nodes")
    if lost := sum(result.lost for result in results):
        failure = next(result.failure for result in results if result.failure)
        notes.append(f"{lost} calls failed: {failure[:60]}")
    batches = spread([result.calls_per_message for result in results])
    answers = spread([result.replies_per_message for result in results])
    if batches and answers:
        notes.append(f"{number(batches.middle)} calls, {number(answers.middle)} ends per message")
    return "; ".join(notes)


def text(everything: Everything) -> str:
    """All of it."""
    summary = Summary(everything.results)
    about = everything.about
    parts = [
        (
            f"{about.runs} runs; {about.cores} cores, {about.processor}; load average "
            f"{about.load_average_before:.1f} before, {about.load_average_after:.1f} after"
        ),
        ", ".join(f"{name} {version}" for name, version in about.versions.items()),
    ]
    if everything.results:
        parts += [
            "\nCPU of the middle, µs per token, or per one-token request",
            overview(summary, summary.cost),
        ]
    for key in dict.fromkeys(result.work for result in everything.results):
        parts += [f"\n{BY_KEY[key].title}", work_table(summary, key, summary.targets)]
    if everything.skipped:
        parts += [
            "\nskipped",
            table(["what", "why"], [[k, " ".join(v.split())[:200]] for k, v in everything.skipped.items()]),
        ]
    if everything.placement:
        rows = [
            [f"{c.nodes:,}", number(c.mean_us), number(c.p50_ms), number(c.p99_ms)]
            for c in everything.placement
        ]
        parts += ["\na choice among nodes", table(["nodes", "CPU, µs (mean)", "p50, ms", "p99, ms"], rows)]
    if everything.failover:
        parts += ["\na node's end under 100 streams", _failover_table(everything)]
    if everything.memory:
        rows = [
            [m.target, m.what, f"{m.number:,}", f"{m.bytes_each:,.1f}", number(m.rss_mb)]
            for m in everything.memory
        ]
        parts += ["\nmemory", table(["through", "of", "number", "bytes each", "RSS, MB"], rows)]
    rows = [[g.what, g.target, g.reached, g.verdict] for g in goals(everything)]
    parts += ["\ntargets", table(["what", "target", "reached", ""], rows)]
    return "\n".join(parts)


def _failover_table(everything: Everything) -> str:
    head = [
        "through", "node", "touched", "cut short", "stuck", "gap p50, ms", "gap p99, ms", "used again, s",
    ]  # fmt: skip
    rows = [
        [
            each.target, each.how, str(each.touched), str(each.cut), str(each.stuck), number(each.gap_p50_ms),
            number(each.gap_p99_ms), number(each.again_s) if each.how == "killed" else "",
        ]
        for each in everything.failover
    ]  # fmt: skip
    return table(head, rows)
