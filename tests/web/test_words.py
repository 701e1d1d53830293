"""What the page says of drained nodes, of rates and of how a generation ended."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from playwright.async_api import Browser, expect

from fleet.v1 import admin_service_pb2 as admin
from tests.e2e.callers import Reading, generate, open_session_on
from tests.e2e.harness import World, prompt
from tests.e2e.local_nodes import local_nodes
from tests.failing_journal import FULL, FailingJournal
from tests.web.browsing import a_browser, a_tab
from tests.web.served import served


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with a_browser() as started:
        yield started


async def test_a_drained_node_is_called_drained_everywhere(world: World, browser: Browser) -> None:
    nodes = await local_nodes(world, 2)
    async with served(world, *nodes) as page, a_tab(browser, page) as tab:
        drain = admin.DrainNodeRequest(node="node-1", note="new fan", by="olga")
        async for message in page.server.admin.DrainNode(drain):
            if message.drain.state == admin.DRAIN_STATE_DRAINED:
                break
        card = tab.page.locator('[data-node="node-1"]')
        await expect(card).to_contain_text("Drained by olga: new fan")
        await expect(card).not_to_contain_text("ordoned")
        await tab.page.get_by_role("button", name="Explain").click()
        row = tab.page.locator("#explained tbody tr", has_text="node-1")
        await expect(row).to_contain_text("left out: drained")
        # The other one is the last for new work, and who would take it away is told.
        await tab.page.get_by_role("button", name="Drain node-2").click()
        await expect(tab.page.locator("#ask-text")).to_contain_text("the last node that takes new work")
        await tab.page.keyboard.press("Escape")


async def test_a_story_ends_with_its_end_and_a_rate_is_that_of_busy_times(
    world: World, browser: Browser
) -> None:
    nodes = await world.start_nodes(1, "--decode-rate", "200")
    async with served(world, *nodes) as page, a_tab(browser, page) as tab:
        await open_session_on(page.server, nodes[0], prompt(10), "chat-1")
        assert (await Reading(generate(page.server, "chat-1", 60, "answer-1")).end()).reason == "LENGTH"
        await expect(tab.page.locator("#session-rows tr")).to_have_count(1)
        await tab.open_story("chat-1")
        turns = tab.page.locator("#story .turns li")
        await expect(turns.last).to_contain_text("finished: length")
        await expect(tab.page.locator("#story .turns")).to_contain_text("attempt 1 on node-1 over")
        await expect(turns.last).to_contain_text("finished: length")
        await expect(tab.page.locator('[data-node="node-1"] .facts')).to_contain_text("tokens/s when busy")


async def test_a_store_that_fails_is_told_while_it_does(world: World, browser: Browser) -> None:
    nodes = await local_nodes(world, 1)
    async with served(world, *nodes) as page, a_tab(browser, page, width=360) as tab:
        await expect(tab.page.locator("#live")).to_have_text("live")
        page.server.head.journal = journal = FailingJournal()
        journal.trouble = FULL
        told = tab.page.locator("#counts .wrong")
        await expect(told).to_contain_text(f"Nothing can be kept on disk: {FULL}; new work is refused")
        await expect(told).to_be_visible()
        await expect(tab.page.locator("#said")).to_contain_text("Nothing can be kept on disk")
        await tab.fits()
        journal.trouble = None
        await expect(told).to_have_count(0)


async def test_a_session_that_generates_is_used_now(world: World, browser: Browser) -> None:
    nodes = await local_nodes(world, 1)
    async with served(world, *nodes) as page, a_tab(browser, page) as tab:
        await open_session_on(page.server, nodes[0], prompt(10), "chat-1")
        reading = Reading(generate(page.server, "chat-1", 4000, "answer-1"))
        await reading.until_tokens(1)
        used = tab.page.locator("#session-rows td").last
        await expect(used).to_have_text("now")
        page.server.head.generations.cancel("answer-1", None)
        await reading.end()
        await expect(used).to_contain_text("ago")


async def test_no_placeholder_is_cut(world: World, browser: Browser) -> None:
    nodes = await local_nodes(world, 1)
    async with served(world, *nodes) as page, a_tab(browser, page) as tab:
        await expect(tab.page.locator("#node-list > li")).to_have_count(1)
        cut = await tab.page.evaluate(
            """[...document.querySelectorAll('#fleet input[placeholder]')].filter((field) => {
                const style = getComputedStyle(field);
                const pen = document.createElement('canvas').getContext('2d');
                pen.font = style.font;
                const room = field.clientWidth - 2 * parseFloat(style.paddingLeft);
                return pen.measureText(field.placeholder).width > room;
            }).map((field) => field.placeholder)"""
        )
        assert cut == []
