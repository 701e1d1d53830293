"""`fleet serve --metrics-listen`: the endpoint of a head as an operator starts it."""

from __future__ import annotations

import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from examples.processes import Children
from tests.cli.conftest import Fleet
from tests.cli.ended import Ended
from tests.quiet_head import QUIET, start_head
from tests.telemetry.scraping import Scraper


@pytest.fixture
async def children(tmp_path: Path) -> AsyncIterator[Children]:
    async with Children(tmp_path) as started:
        yield started


def scraper_at(line: str) -> Scraper:
    found = re.search(r", metrics on http://127\.0\.0\.1:(\d+)/metrics$", line)
    assert found, line
    return Scraper(int(found[1]))


@pytest.mark.parametrize("traced", [False, True])
async def test_a_head_says_where_its_metrics_are_and_serves_them(children: Children, *, traced: bool) -> None:
    # Nobody collects the traces; they are made all the same.
    tracing = ("--otlp-endpoint", "http://127.0.0.1:1") if traced else ()
    head, line = await start_head(
        children,
        *("--metrics-listen", "127.0.0.1:0", "--policy", "least-loaded"),
        *("--set", "head.head_id=head-7", *tracing),
    )
    scraper = scraper_at(line)
    scrape = await scraper.scrape()
    labels = scrape.families["fleet_head_info"].samples[0].labels
    assert (labels["head_id"], labels["policy"], labels["fleet_id"]) == ("head-7", "least-loaded", "default")
    assert scrape["fleet_head_ready"] == 0
    assert scrape.of("fleet_nodes") == 0
    assert scrape["process_resident_memory_bytes"] > 0
    head.process.send_signal(signal.SIGTERM)
    assert await head.process.wait() == 0
    with pytest.raises(OSError, match="refused"):
        await scraper.scrape()


async def test_nothing_is_served_unasked(children: Children) -> None:
    _head, line = await start_head(children)
    assert re.fullmatch(r"fleet: serving callers on [\d.:]+, admin on [\d.:]+", line)


async def test_a_port_that_is_taken_ends_the_start_and_says_what_to_do(
    children: Children, fleet: Fleet
) -> None:
    _head, line = await start_head(children, "--metrics-listen", "127.0.0.1:0")
    taken = f"127.0.0.1:{scraper_at(line).port}"
    ended: Ended = await fleet("serve", *QUIET, "--metrics-listen", taken)
    assert (ended.code, ended.out) == (1, "")
    assert ended.err == (
        f"fleet: cannot listen on {taken}: the port is in use; "
        "choose another with --metrics-listen (setting listen.metrics)\n"
    )


async def test_an_address_that_is_none_is_refused_with_an_example(fleet: Fleet) -> None:
    ended: Ended = await fleet("serve", *QUIET, "--metrics-listen", "8458")
    assert ended.code == 2
    assert 'listen.metrics = "8458"' in ended.err
    assert "must be host:port, for example 127.0.0.1:8458" in ended.err
