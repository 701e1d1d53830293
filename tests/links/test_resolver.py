"""The system's resolver: what its answers and failures become, and that a slow one holds nobody up."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from fleet_service.links.resolver import SystemResolver
from fleet_service.runtime.protocols import ResolveError

Found = list[tuple[Any, ...]]


def answers(*hosts: str) -> Callable[..., Found]:
    """A getaddrinfo that knows these."""

    def look_up(name: str, port: int, **_: object) -> Found:
        return [
            (socket.AF_INET6, socket.SOCK_STREAM, 6, "", (host, port, 0, 0))
            if ":" in host
            else (socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port))
            for host in hosts
        ]

    return look_up


def fails(error: Exception) -> Callable[..., Found]:
    def look_up(*_: object, **__: object) -> Found:
        raise error

    return look_up


class Slow:
    """A getaddrinfo that answers when it is told to."""

    def __init__(self) -> None:
        self.calls = 0
        self.go = threading.Event()

    def __call__(self, name: str, port: int, **options: object) -> Found:
        self.calls += 1
        self.go.wait(30)
        return answers("10.0.0.1")(name, port)


@asynccontextmanager
async def slow() -> AsyncIterator[Slow]:
    look_up = Slow()
    try:
        yield look_up
    finally:
        look_up.go.set()


async def test_all_addresses_of_a_name_are_given_once_each() -> None:
    resolver = SystemResolver(answers("10.0.0.1", "2001:db8::1", "10.0.0.1"))
    assert await resolver.resolve("pods.example", 8454) == ("10.0.0.1:8454", "[2001:db8::1]:8454")


async def test_the_system_is_asked_for_both_families() -> None:
    asked: list[Any] = []

    def look_up(*args: object, **options: object) -> Found:
        asked.append((args, options))
        return answers("10.0.0.1")("", 0)

    await SystemResolver(look_up).resolve("pods.example", 9000)
    assert asked == [
        (("pods.example", 9000), {"type": socket.SOCK_STREAM, "flags": socket.AI_ADDRCONFIG}),
    ]


async def test_the_machine_s_own_name_is_known() -> None:
    assert "127.0.0.1:8454" in await SystemResolver().resolve("localhost", 8454)


@pytest.mark.parametrize(
    "error,why",
    [
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "name not found"),
        (socket.gaierror(socket.EAI_AGAIN, "Temporary failure"), "the DNS server gives no answer"),
        (socket.gaierror(socket.EAI_NODATA, "No address"), "the name has no addresses"),
        (socket.gaierror(socket.EAI_MEMORY, "Memory allocation failure"), "memory allocation failure"),
        (UnicodeError("label too long"), "it is no host name"),
    ],
)
async def test_a_failure_is_told_in_plain_words(error: Exception, why: str) -> None:
    with pytest.raises(ResolveError) as told:
        await SystemResolver(fails(error)).resolve("pods.example", 8454)
    assert str(told.value) == why


async def test_a_name_under_way_is_not_looked_up_twice_and_serves_all_who_ask() -> None:
    async with slow() as look_up:
        resolver = SystemResolver(look_up)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await resolver.resolve("pods.example", 8454)
        both = [asyncio.ensure_future(resolver.resolve("pods.example", 8454)) for _ in range(2)]
        await asyncio.sleep(0)
        look_up.go.set()
        assert await asyncio.gather(*both) == [("10.0.0.1:8454",)] * 2
        assert look_up.calls == 1
        assert await resolver.resolve("pods.example", 8454) == ("10.0.0.1:8454",)
        assert look_up.calls == 2


def test_a_look_up_without_an_answer_does_not_hold_up_the_end() -> None:
    look_up = Slow()

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await SystemResolver(look_up).resolve("pods.example", 8454)

    asyncio.run(give_up())
    # The loop is closed, and the look-up is still under way.
    (thread,) = [each for each in threading.enumerate() if each.name == "look up pods.example"]
    assert thread.daemon
    look_up.go.set()
    thread.join(30)
    assert not thread.is_alive()
