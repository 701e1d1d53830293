"""The page in a real browser, over a real head and nodes: what an operator sees, and what he can do."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from playwright.async_api import Browser, expect

from fleet.v1 import admin_service_pb2 as admin
from fleet_service.access_file import remove_entry
from fleet_service.domain.access import Permission
from tests.e2e.callers import Reading, generate, open_session_on
from tests.e2e.harness import NodeProcess, World, prompt, until
from tests.e2e.local_nodes import local_nodes
from tests.ports import quiet_port
from tests.web.browsing import Tab, a_browser, a_tab
from tests.web.served import Served, allowed, served

EVER = 4000
CONTRAST = (Path(__file__).parent / "contrast.js").read_text()


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with a_browser() as started:
        yield started


async def nodes_shown(tab: Tab, count: int) -> None:
    await expect(tab.page.locator("#node-list > li")).to_have_count(count)
    await expect(tab.page.locator("#live")).to_have_text("live")


async def test_a_node_dies_and_its_session_moves_before_the_operators_eyes(
    world: World, browser: Browser
) -> None:
    nodes = await world.start_nodes(3, "--decode-rate", "50")
    async with served(world, *nodes) as page, a_tab(browser, page) as tab:
        await nodes_shown(tab, 3)
        await tab.page.evaluate("window.notReloaded = true")
        await open_session_on(page.server, nodes[0], prompt(30), "chat-1")
        reading = Reading(generate(page.server, "chat-1", 200, "answer-1"))
        await reading.until_tokens(10)
        await tab.open_story("chat-1")
        story = tab.page.locator("#story")
        await expect(story).to_contain_text("placed on node-1")
        await expect(story.locator(".track .run")).to_have_count(1)

        await nodes[0].kill()
        card = tab.page.locator('[data-node="node-1"]')
        await expect(card.locator(".badge").first).to_have_text("✕ down")
        await expect(tab.page.locator("#said")).to_contain_text("node-1 is down")
        moves = (
            await reading.until(lambda answer: answer.moves and answer.moves[-1].to_node != "node-1")
        ).moves
        move = moves[-1]  # before it, the node may have been tried anew
        told = f"moved from node-1 to {move.to_node} at token {move.next_index}: link lost, gap "
        await expect(story.locator("li.moved").last).to_contain_text(told)
        await expect(story.locator(".track .gap")).to_have_count(len(moves))
        await expect(story.locator(".track .run").last).to_have_text(move.to_node)
        await expect(tab.page.locator("#event-list li.moved").first).to_contain_text(f"chat-1 {told}")
        await expect(tab.page.locator("#session-rows tr")).to_contain_text([move.to_node])

        answer = await reading.end()
        assert answer.reason == "LENGTH"
        await expect(story.locator("summary")).to_contain_text("length, 200 tokens, ")
        # To scale: the gap is as wide, of the whole, as it was long.
        part = await story.locator(".track .gap").last.evaluate("gap => parseFloat(gap.style.width)")
        assert part == pytest.approx(100 * move.gap_ms / answer.finished.timings.total_ms, abs=3.0)
        assert await tab.page.evaluate("window.notReloaded") is True


async def test_a_node_is_cordoned_drained_and_uncordoned_by_the_keyboard_alone(
    world: World, browser: Browser
) -> None:
    nodes = await local_nodes(world, 3)
    async with served(world, *nodes) as page, a_tab(browser, page) as tab:
        await nodes_shown(tab, 3)
        keyboard, card = tab.page.keyboard, tab.page.locator('[data-node="node-2"]')
        await tab.tab_to("Cordon node-2")
        outline = await tab.page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid"
        await keyboard.press("Enter")
        assert await tab.focused() == "ask-note"
        await keyboard.press("Escape")
        assert await tab.focused() == "Cordon node-2"
        assert not page.server.head.operators.get_node("node-2").cordoned
        await keyboard.press("Enter")
        await keyboard.type("<b>new</b> fan")
        await keyboard.press("Enter")
        await expect(card).to_contain_text("Cordoned: <b>new</b> fan")
        await expect(tab.page.locator("#said")).to_have_text("node-2 is cordoned.")
        assert await tab.focused() == "Uncordon node-2"
        await keyboard.press("Enter")
        await expect(card).not_to_contain_text("Cordoned")
        await tab.tab_to("Drain node-2")
        await keyboard.press("Space")
        await keyboard.press("Enter")
        await expect(card).to_contain_text("Drained: it can be stopped.")
        reply = await page.server.admin.GetNode(admin.GetNodeRequest(node="node-2"))
        assert reply.node.drain.state == admin.DRAIN_STATE_DRAINED


async def sign_in(tab: Tab, token: str) -> None:
    await tab.page.get_by_label("Access token").fill(token)
    await tab.page.keyboard.press("Enter")


async def test_who_may_only_look_signs_in_looks_and_changes_nothing(
    world: World, browser: Browser, tmp_path: Path
) -> None:
    file = tmp_path / "access.toml"
    reads = allowed(file, "dashboard", Permission.READ)
    nodes = await local_nodes(world, 2)
    async with served(world, *nodes, access=file, sign_in="token") as page, a_tab(browser, page) as tab:
        await expect(tab.page.get_by_role("heading", name="Sign in")).to_be_visible()
        # Before the token is known, nothing is asked for.
        assert tab.calls() == []
        await sign_in(tab, reads)
        await nodes_shown(tab, 2)
        await expect(tab.page.locator("#who")).to_have_text("dashboard, may look only")
        for button in await tab.page.locator(".card button").all():
            await expect(button).to_be_disabled()
            await expect(button).to_have_attribute("title", "This needs the permission operate.")
        # What the controls would do is refused as well.
        for method in ("CordonNode", "DrainNode", "UncordonNode"):
            reply = await page.call(method, {"node": "node-1"}, reads)
            assert (reply.status, reply.reason) == (403, "PERMISSION_DENIED")
        await tab.page.reload()  # the tab remembers
        await nodes_shown(tab, 2)
        tokens = [await request.header_value("authorization") for request in tab.calls()]
        assert set(tokens) == {f"Bearer {reads}"}
        assert reads not in "".join(request.url for request in tab.requests)
        await tab.page.get_by_role("button", name="Sign out").click()
        await expect(tab.page.get_by_label("Access token")).to_be_visible()
        assert await tab.page.evaluate("Object.values(sessionStorage).join()") == ""


async def test_who_may_operate_does_and_is_named(world: World, browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "access.toml"
    operates = allowed(file, "oncall", Permission.OPERATE)
    nodes = await local_nodes(world, 1)
    async with served(world, *nodes, access=file, sign_in="token") as page, a_tab(browser, page) as tab:
        await sign_in(tab, operates)
        await nodes_shown(tab, 1)
        await tab.page.get_by_role("button", name="Cordon node-1").click()
        await tab.page.get_by_role("button", name="Cordon", exact=True).click()
        await expect(tab.page.locator(".card")).to_contain_text("cordoned")
        assert page.server.head.operators.get_node("node-1").cordoned_by == "oncall"


async def test_a_wrong_token_is_said_to_be_wrong(world: World, browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "access.toml"
    calls = allowed(file, "frontend", Permission.CALL)
    async with served(world, access=file, sign_in="token") as page, a_tab(browser, page) as tab:
        await sign_in(tab, "fleet_nonsense")
        await expect(tab.page.get_by_role("alert")).to_contain_text("not known here")
        await sign_in(tab, calls)
        await expect(tab.page.get_by_role("alert")).to_contain_text("frontend may not read here")
        await expect(tab.page.locator("#fleet")).to_be_hidden()
        # The browser itself notes that the head refused.
        assert len(tab.errors) == 2
        assert all("401" in error or "403" in error for error in tab.errors)
        tab.errors.clear()


async def test_a_page_whose_token_is_taken_back_asks_anew(
    world: World, browser: Browser, tmp_path: Path
) -> None:
    file = tmp_path / "access.toml"
    reads = allowed(file, "dashboard", Permission.READ)
    async with served(world, access=file, sign_in="token") as page, a_tab(browser, page) as tab:
        await sign_in(tab, reads)
        await expect(tab.page.locator("#live")).to_have_text("live")
        remove_entry(file, "dashboard")
        await expect(tab.page.get_by_role("alert")).to_contain_text("may have been taken back")
        await expect(tab.page.get_by_label("Access token")).to_be_visible()
        tab.errors.clear()  # the 401 itself


async def with_a_story(page: Served, nodes: list[NodeProcess]) -> None:
    """A session that has moved, and some others."""
    for number in range(2, 6):
        await open_session_on(page.server, nodes[number % 2], prompt(200 * number), f"chat-{number}")
    await open_session_on(page.server, nodes[0], prompt(30), "chat-1")
    reading = Reading(generate(page.server, "chat-1", 60, "answer-1"))
    await reading.until_tokens(10)
    await nodes[0].kill()
    await reading.end()


@pytest.mark.parametrize("color", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 768, 1440])
async def test_it_can_be_read_on_a_phone_and_a_desk_in_light_and_dark(
    world: World, browser: Browser, width: int, color: str
) -> None:
    nodes = await local_nodes(world, 3)
    async with served(world, *nodes) as page:
        await with_a_story(page, list(nodes))
        async with a_tab(browser, page, width=width, color=color) as tab:
            await nodes_shown(tab, 3)
            await tab.fits()
            # What was before the page was opened is told, too.
            newest = tab.page.locator("#event-list li.moved").first
            await expect(newest).to_contain_text("chat-1 moved from node-1")
            await tab.open_story("chat-1")
            await tab.page.get_by_role("button", name="Explain").click()
            await expect(tab.page.locator("#explained")).to_contain_text("It would go to")
            await tab.fits()
            # Text stands out from what is behind it (WCAG AA), in its words and not by colour alone.
            assert await tab.page.evaluate(CONTRAST) == []


async def test_the_theme_can_be_chosen_and_is_kept(world: World, browser: Browser) -> None:
    async with served(world) as page, a_tab(browser, page, color="light") as tab:
        back = "getComputedStyle(document.documentElement).backgroundColor"
        light = await tab.page.evaluate(back)
        await tab.page.get_by_label("Theme").select_option("dark")
        dark = await tab.page.evaluate(back)
        assert dark != light
        await tab.page.reload()
        await expect(tab.page.locator("#live")).to_have_text("live")
        assert await tab.page.evaluate(back) == dark
        await tab.page.get_by_label("Theme").select_option("system")
        assert await tab.page.evaluate(back) == light
        await tab.page.emulate_media(color_scheme="dark")
        assert await tab.page.evaluate(back) == dark


async def test_everything_has_a_name_for_those_who_hear_the_page(world: World, browser: Browser) -> None:
    nodes = await local_nodes(world, 2)
    async with served(world, *nodes) as page:
        await with_a_story(page, list(nodes))
        async with a_tab(browser, page) as tab:
            await nodes_shown(tab, 2)
            nameless = await tab.page.evaluate(
                """[...document.querySelectorAll('input, select, button, a')].filter((each) =>
                    !(each.labels?.length || each.textContent.trim() || each.getAttribute('aria-label')))
                    .map((each) => each.outerHTML)"""
            )
            assert nameless == []
            assert await tab.page.locator("th:not([scope])").count() == 0
            assert await tab.page.locator("#said").get_attribute("aria-live") == "polite"
            assert await tab.page.evaluate("document.documentElement.lang") == "en"
            await tab.page.emulate_media(reduced_motion="reduce")
            moving = await tab.page.evaluate(
                """[...document.querySelectorAll('*')].filter(
                    (each) => parseFloat(getComputedStyle(each).transitionDuration)).length"""
            )
            assert moving == 0


async def test_a_story_has_an_address_and_stays_until_it_is_closed(world: World, browser: Browser) -> None:
    nodes = await local_nodes(world, 2)
    async with served(world, *nodes) as page:
        await with_a_story(page, list(nodes))
        async with a_tab(browser, page) as tab:
            for address, title in (("session=chat-1", "chat-1"), ("generation=answer-1", "answer-1")):
                await tab.page.goto(f"{page.url}#{address}")
                await expect(tab.page.locator("#story-title")).to_have_text(f"Story of {title}")
                await expect(tab.page.locator("#story details")).to_have_count(1)
            await tab.page.get_by_role("link", name="Nodes").click()
            await expect(tab.page.locator("#story")).to_be_visible()
            await tab.page.go_back()
            await expect(tab.page.locator("#story")).to_be_visible()
            await tab.page.get_by_role("link", name="Close").click()
            await expect(tab.page.locator("#story")).to_be_hidden()
            await tab.page.goto(f"{page.url}#session=%zz<b>nobody</b>")
            await expect(tab.page.locator("#story-body")).to_contain_text("No generation of it is remembered")
            await tab.page.goto(f"{page.url}#session=")
            await expect(tab.page.locator("#story")).to_be_hidden()


async def test_nodes_and_sessions_can_be_looked_for(world: World, browser: Browser) -> None:
    nodes = [
        *await local_nodes(world, 2, labels={"zone": "a"}),
        *await local_nodes(world, 1, labels={"zone": "b"}),
    ]
    async with served(world, *nodes) as page, a_tab(browser, page) as tab:
        await nodes_shown(tab, 3)
        await tab.page.locator("#node-filter").fill("zone=b")
        await expect(tab.page.locator("#node-list > li")).to_have_count(1)
        await tab.page.locator("#node-filter").fill("zone=c")
        await expect(tab.page.locator("#no-nodes")).to_have_text("No node is like that.")
        for number in range(3):
            await open_session_on(page.server, nodes[number], prompt(5), f"chat-{number}")
        rows = tab.page.locator("#session-rows tr")
        await expect(rows).to_have_count(3)
        await tab.page.locator("#session-filter [name=text]").fill("chat-1")
        await expect(rows).to_have_count(1)
        await tab.page.locator("#session-filter [name=text]").fill("")
        await tab.page.get_by_label("State").select_option("parked")
        await expect(tab.page.locator("#no-sessions")).to_be_visible()


async def test_it_comes_back_by_itself_after_the_head_was_away(world: World, browser: Browser) -> None:
    nodes = await local_nodes(world, 1)
    port = quiet_port()
    async with served(world, *nodes, port=port) as page:
        tab_of = a_tab(browser, page)
        tab = await tab_of.__aenter__()
        await nodes_shown(tab, 1)
    await expect(tab.page.locator("#live")).to_have_text("connection lost, trying again")
    async with served(world, *nodes, port=port):
        await expect(tab.page.locator("#live")).to_have_text("live")
        tab.errors.clear()  # the browser notes each try that was refused
        await tab_of.__aexit__(None, None, None)


async def test_a_page_that_is_not_looked_at_costs_the_head_nothing(world: World, browser: Browser) -> None:
    async with served(world, *await local_nodes(world, 1)) as page, a_tab(browser, page) as tab:
        await nodes_shown(tab, 1)
        await tab.page.clock.install()
        await tab.page.evaluate(
            "Object.defineProperty(document, 'hidden', {get: () => true, configurable: true});"
            "document.dispatchEvent(new Event('visibilitychange'))"
        )
        await tab.page.clock.run_for(11_000)
        await expect(tab.page.locator("#live")).to_have_text("paused")
        await until(lambda: page.server.head.fleet.turns.listener is None, "nobody watches any more")
        await tab.page.evaluate(
            "Object.defineProperty(document, 'hidden', {get: () => false, configurable: true});"
            "document.dispatchEvent(new Event('visibilitychange'))"
        )
        await expect(tab.page.locator("#live")).to_have_text("live")


@pytest.mark.slow
async def test_pictures_of_it_for_the_documents(world: World, browser: Browser, tmp_path: Path) -> None:
    """FLEET_E2E_PICTURES names the folder they are kept in, docs/images."""
    folder = Path(os.environ.get("FLEET_E2E_PICTURES", tmp_path))
    nodes = await world.start_nodes(4, "--decode-rate", "60", "--lanes", "3", "--label", "zone=a")
    async with served(world, *nodes) as page:
        async with a_tab(browser, page, width=1080, height=900) as tab:
            await tab.page.emulate_media(reduced_motion="reduce")
            await nodes_shown(tab, 4)
            readings = []
            for number in range(1, 11):
                session_id = await open_session_on(
                    page.server, nodes[number % 4], prompt(90 * number), f"chat-{number}"
                )
                readings.append(Reading(generate(page.server, session_id, 260, f"answer-{number}")))
            await readings[0].until_tokens(70)
            await nodes[1].kill()
            moved = [reading for number, reading in enumerate(readings, start=1) if number % 4 == 1]
            await asyncio.gather(*(reading.until(lambda answer: answer.moves) for reading in moved))
            await page.call("CordonNode", {"node": "node-4", "note": "new driver tonight", "by": "oncall"})
            longest = max(moved, key=lambda reading: reading.answer.moves[0].gap_ms)
            session_id = f"chat-{readings.index(longest) + 1}"
            await tab.open_story(session_id)
            await expect(tab.page.locator("#story li.moved")).to_be_visible()
            await tab.page.evaluate("scrollTo(0, 0)")
            await tab.page.screenshot(path=folder / "page-light.png")
            await asyncio.gather(*(reading.end() for reading in readings))
            await tab.page.get_by_role("link", name="Close").click()
            await tab.page.get_by_role("button", name="Explain").click()
            await expect(tab.page.locator("#explained")).to_contain_text("It would go to")
            await expect(tab.page.locator("#session-rows")).not_to_contain_text("generating")
            await tab.page.emulate_media(color_scheme="dark", reduced_motion="reduce")
            await tab.page.evaluate("document.querySelector('.columns').scrollIntoView()")
            await tab.page.screenshot(path=folder / "page-dark.png")
        async with a_tab(browser, page, width=360, height=1250, color="dark") as phone:
            await nodes_shown(phone, 4)
            await phone.open_story(session_id)
            await phone.page.locator("#node-filter").fill("down")
            await phone.page.evaluate("scrollTo(0, 0)")
            await phone.page.screenshot(path=folder / "page-phone.png")
    for name in ("light", "dark", "phone"):
        assert 10_000 < (folder / f"page-{name}.png").stat().st_size < 200_000
