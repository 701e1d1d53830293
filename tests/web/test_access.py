"""Who may look, who may change something, and that no other site can do it for them."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from fleet_service.access_file import Entry, add_entry, new_token, remove_entry
from fleet_service.domain.access import Caller, Permission
from fleet_service.tls import ServerTls
from fleet_service.web.calls import ADMIN_METHODS, OWN_METHODS
from tests.certificates import Authority, Pair
from tests.e2e.harness import World
from tests.e2e.local_nodes import local_nodes
from tests.web.served import Reply, Served, allowed, call_bytes, served, taken_apart

CALL, READ, OPERATE = Permission.CALL, Permission.READ, Permission.OPERATE
CHANGES = ("CordonNode", "DrainNode", "UncordonNode")
READS = tuple({*ADMIN_METHODS, *OWN_METHODS} - {*CHANGES})
NODE = {"node": "node-1"}


@asynccontextmanager
async def guarded(world: World, file: Path) -> AsyncIterator[Served]:
    if not file.exists():
        allowed(file, "somebody", READ)
    async with served(world, *await local_nodes(world, 1), access=file, sign_in="token") as page:
        yield page


def cordoned(page: Served) -> bool:
    return page.server.head.operators.get_node("node-1").cordoned


async def test_without_a_token_only_the_files_are_to_be_had(world: World, tmp_path: Path) -> None:
    async with guarded(world, tmp_path / "access.toml") as page:
        assert (await page.get("/")).status == 200
        assert (await page.get("/page.json")).json() == {"sign_in": "token"}
        for method in (*ADMIN_METHODS, *OWN_METHODS):
            for token in ("", new_token(), "Bearer", "x" * 4000):
                reply = await page.call(method, NODE, token)
                assert (reply.status, reply.reason) == (401, "CREDENTIALS_REFUSED")
                assert reply.headers["WWW-Authenticate"] == "Bearer"
        for value in ("Basic YTpi", "Bearer", "Bearer  ", "Bearer a, Bearer b"):
            reply = await page.call("GetAbout", authorization=value)
            assert reply.status == 401
        assert not cordoned(page)


async def test_each_permission_opens_what_it_is_for(world: World, tmp_path: Path) -> None:
    file = tmp_path / "access.toml"
    async with guarded(world, file) as page:
        calls, reads, operates = (allowed(file, str(may), may) for may in (CALL, READ, OPERATE))
        await _until_known(page, operates)
        for method in (*ADMIN_METHODS, *OWN_METHODS):
            reply = await page.call(method, NODE, calls)
            assert (reply.status, reply.reason) == (403, "PERMISSION_DENIED")
        for method in CHANGES:
            reply = await page.call(method, NODE, reads)
            assert (reply.status, reply.reason) == (403, "PERMISSION_DENIED")
        assert not cordoned(page)
        about = (await page.call("GetAbout", token=reads)).json()
        assert (about["caller"], about["may_operate"]) == ("read", False)
        assert (await page.call("ListSessions", token=reads)).status == 200
        assert (await page.call("ExplainPlacement", {"spec": {"model": "m"}}, reads)).status == 200
        async with page.feed(reads) as feed:
            assert (await feed.until(lambda feed: feed.messages)).nodes.keys() == {"node-1"}
        assert (await page.call("GetAbout", token=operates)).json()["may_operate"] is True
        reply = await page.call("CordonNode", {**NODE, "note": "new fan", "by": "somebody else"}, operates)
        assert reply.json()["node"]["cordoned_by"] == "operate"
        assert cordoned(page)


async def _until_known(page: Served, token: str) -> None:
    """The file is looked at once a second."""
    async with asyncio.timeout(30):
        while (await page.call("GetAbout", token=token)).status != 200:
            await asyncio.sleep(0.05)


FROM_ELSEWHERE = (
    ({"origin": "https://evil.example"}, 403),
    ({"origin": "null"}, 403),
    ({"origin": "http://127.0.0.1:1"}, 403),
    ({"sec_fetch_site": "cross-site"}, 403),
    ({"sec_fetch_site": "same-site"}, 403),
    ({"content_type": "text/plain"}, 415),
    ({"content_type": "application/x-www-form-urlencoded"}, 415),
    ({"content_type": ""}, 415),
)


@pytest.mark.parametrize("headers, code", FROM_ELSEWHERE)
async def test_another_site_can_do_nothing_with_a_browser_that_shows_it(
    world: World, tmp_path: Path, headers: dict[str, str], code: int
) -> None:
    async with served(world, *await local_nodes(world, 1)) as page:
        for method in (*ADMIN_METHODS, *OWN_METHODS):
            reply = await page.call(method, NODE, **headers)
            assert reply.status == code
        assert not cordoned(page)


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8459", "127.0.0.1.evil.example", "localhost.evil", "", "a,127.0.0.1"],
)
async def test_a_name_that_a_stranger_points_at_this_machine_opens_nothing(world: World, host: str) -> None:
    async with served(world, *await local_nodes(world, 1)) as page:
        for method in (*ADMIN_METHODS, *OWN_METHODS):
            assert (await page.call(method, NODE, host=host)).status == 421
        assert not cordoned(page)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LocalHost:80", "[::1]:8459", "10.0.0.7:8459"])
async def test_by_its_number_or_as_localhost_it_answers(world: World, host: str) -> None:
    async with served(world, *await local_nodes(world, 1)) as page:
        reply = await page.call(
            "CordonNode", NODE, host=host, origin=f"http://{host}", sec_fetch_site="same-origin"
        )
        assert reply.status == 200
        assert cordoned(page)


async def test_with_tokens_any_name_will_do_but_no_other_site(world: World, tmp_path: Path) -> None:
    file = tmp_path / "access.toml"
    token = allowed(file, "oncall", OPERATE)
    async with guarded(world, file) as page:
        at = {"host": "fleet.example"}
        assert (await page.call("GetAbout", token=token, **at)).status == 200
        assert (await page.call("GetAbout", token=token, origin="https://fleet.example", **at)).status == 200
        assert (await page.call("GetAbout", token=token, origin="https://evil.example", **at)).status == 403


# TLS


async def call_over_tls(page: Served, authority: Authority, method: str, pair: Pair | None) -> Reply:
    context = ssl.create_default_context(cafile=authority.ca)
    if pair is not None:
        context.load_cert_chain(pair.cert, pair.key)
    reader, writer = await asyncio.open_connection("127.0.0.1", page.port, ssl=context)
    writer.write(call_bytes(method, NODE, "", {}))
    answer = await reader.read()
    writer.close()
    return taken_apart(answer)


async def test_a_certificate_that_the_file_names_is_as_good_as_a_token(world: World, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    head = authority.issue("head")
    file = tmp_path / "access.toml"
    add_entry(file, Entry(Caller("ops", frozenset({OPERATE})), certificate="ops.example"))
    tls = ServerTls(head.cert, head.key, authority.ca).ssl_context()
    nodes = await local_nodes(world, 1)
    async with served(world, *nodes, access=file, sign_in="token or certificate", tls=tls) as page:
        known, unknown = authority.issue("ops", "ops.example"), authority.issue("other", "other.example")
        reply = await call_over_tls(page, authority, "CordonNode", known)
        assert (reply.status, reply.json()["node"]["cordoned_by"]) == (200, "ops")
        assert (await call_over_tls(page, authority, "GetAbout", unknown)).status == 401
        with pytest.raises((ssl.SSLError, OSError, AssertionError)):
            await call_over_tls(page, authority, "GetAbout", None)


async def test_a_new_certificate_is_served_without_a_restart_and_a_broken_one_is_not(
    world: World, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    head = authority.issue("head")
    tls = ServerTls(head.cert, head.key).ssl_context()
    async with served(world, tls=tls) as page:

        async def serial() -> str:
            context = ssl.create_default_context(cafile=authority.ca)
            _reader, writer = await asyncio.open_connection("127.0.0.1", page.port, ssl=context)
            shown = writer.get_extra_info("ssl_object").getpeercert()
            writer.transport.abort()
            return str(shown["serialNumber"])

        first = await serial()
        assert await serial() == first
        authority.issue("head")
        second = await serial()
        assert second != first
        head.cert.write_text("nonsense")
        assert await serial() == second
        plain = await page.exchange(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        assert b"HTTP" not in plain


async def test_what_a_token_may_is_not_remembered_beyond_its_removal(world: World, tmp_path: Path) -> None:
    file = tmp_path / "access.toml"
    token = allowed(file, "oncall", READ)
    async with guarded(world, file) as page:
        assert (await page.call("GetAbout", token=token)).status == 200
        remove_entry(file, "oncall")
        async with asyncio.timeout(30):
            while (await page.call("GetAbout", token=token)).status != 401:
                await asyncio.sleep(0.05)


def test_the_token_is_nowhere_in_the_page_but_in_the_tabs_memory() -> None:
    script = "".join(file.read_text() for file in Path("fleet_service/web/static").glob("*.js"))
    assert "sessionStorage.setItem(KEY, value)" in script
    assert "localStorage.setItem(THEME" in script
    assert script.count("localStorage.setItem") == 1
    assert json.dumps("cookie") not in script
    assert "document.cookie" not in script
