"""`fleet serve --page-listen`: the page of a head as an operator starts it."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import ssl
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from examples.processes import Children
from fleet_service.config import FleetConfig
from tests.certificates import Authority
from tests.e2e.harness import PATIENCE_S
from tests.quiet_head import start_head
from tests.web.served import call_bytes


@pytest.fixture
async def children(tmp_path: Path) -> AsyncIterator[Children]:
    async with Children(tmp_path) as started:
        yield started


def page_at(line: str) -> str:
    found = re.search(r", page on (https?://127\.0\.0\.1:\d+/)$", line)
    assert found, line
    return found[1]


def post(url: str, body: bytes = b"{}", tls: ssl.SSLContext | None = None) -> Any:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"}, method="POST")
    with urllib.request.urlopen(request, context=tls, timeout=30) as answer:
        return answer.read()


@pytest.mark.parametrize("with_metrics", [False, True])
async def test_a_head_says_where_its_page_is_and_serves_it(children: Children, *, with_metrics: bool) -> None:
    metrics = ("--metrics-listen", "127.0.0.1:0") if with_metrics else ()
    head, line = await start_head(children, "--page-listen", "127.0.0.1:0", *metrics)
    url = page_at(line)
    with urllib.request.urlopen(url, timeout=30) as answer:
        assert b'<script type="module" src="page.js">' in answer.read()
    assert b'"may_operate":true' in post(f"{url}api/GetAbout")
    head.process.send_signal(signal.SIGTERM)
    assert await head.process.wait() == 0


async def test_a_head_that_is_watched_ends_as_soon_as_one_that_is_not(children: Children) -> None:
    head, line = await start_head(children, "--page-listen", "127.0.0.1:0")
    port = int(page_at(line).rpartition(":")[2].strip("/"))
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(call_bytes("WatchFleet", {}, "", {}))
    await reader.readuntil(b"data: ")
    head.process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(head.process.wait(), PATIENCE_S) == 0
    with contextlib.suppress(ConnectionResetError):
        await reader.read()
    writer.transport.abort()
    assert "Traceback" not in head.log.read_text()


async def test_over_tls_it_is_served_with_the_operators_certificate(
    children: Children, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    pair = authority.issue("head")
    tls = ("--set", f"admin_tls.cert_file={pair.cert}", "--set", f"admin_tls.key_file={pair.key}")
    _head, line = await start_head(children, "--page-listen", "127.0.0.1:0", *tls)
    url = page_at(line)
    assert url.startswith("https://")
    assert b'"head_id"' in post(f"{url}api/GetAbout", tls=ssl.create_default_context(cafile=authority.ca))


async def test_nothing_is_served_unasked(children: Children) -> None:
    _head, line = await start_head(children)
    assert "page" not in line


@pytest.mark.parametrize(
    "settings, lacks",
    [
        ({}, "access_file"),
        ({"access_file": "a"}, "admin_tls.cert_file"),
        ({"admin_tls": {"cert_file": "c", "key_file": "k"}}, "access_file"),
        ({"access_file": "a", "admin_tls": {"cert_file": "c", "key_file": "k"}}, ""),
        ({"admin_tls": {"cert_file": "c", "key_file": "k", "client_ca_file": "ca"}}, ""),
        ({"insecure_no_auth": True}, ""),
    ],
)
def test_beyond_this_machine_it_needs_tls_and_to_know_who_calls(settings: dict[str, Any], lacks: str) -> None:
    listen = {"page": "0.0.0.0:8459"}
    if lacks:
        with pytest.raises(ValidationError, match=rf"listen\.page is 0\.0\.0\.0:8459.*{re.escape(lacks)}"):
            FleetConfig(listen=listen, **settings)
    else:
        assert FleetConfig(listen=listen, **settings).listen.page == "0.0.0.0:8459"


def test_on_this_machine_it_needs_neither() -> None:
    assert FleetConfig().listen.page == ""
    assert FleetConfig(listen={"page": "127.0.0.1:8459"}).listen.page == "127.0.0.1:8459"
    with pytest.raises(ValidationError, match=r"for example 127\.0\.0\.1:8459"):
        FleetConfig(listen={"page": "8459"})
