"""The head dies under load, again and again, alone or with a node: every answer goes on, to the token."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from pathlib import Path

import pytest

from fleet.v1 import fleet_service_pb2 as pb
from fleet.v1 import types_pb2
from fleet_service.client import FleetClient, Reattached
from tests.e2e.restarts import (
    SPEC,
    Durable,
    expected,
    generation_spec,
    until_so,
)

NODES = 16
STREAMS = 50


class Follower:
    """A caller that reads an answer to its end with the shipped client, whatever becomes of the head."""

    def __init__(self, client: FleetClient, number: int, tokens: int) -> None:
        self.context = [number + 3, 17, number + 5]
        self.wanted = tokens
        self.tokens: list[int] = []
        self.finished = pb.Finished()
        self.longest_gap_s = 0.0
        self.reattached: list[Reattached] = []
        self._last_s = 0.0
        self._task = asyncio.create_task(self._read(client, number))

    async def _read(self, client: FleetClient, number: int) -> None:
        request = pb.CompleteRequest(
            session=SPEC,
            token_ids=self.context,
            spec=generation_spec(self.wanted),
            generation_id=f"load-{number}",
        )
        async for event in client.complete(request, self.reattached.append):
            if event.HasField("finished"):
                self.finished = event.finished
            if not event.HasField("tokens"):
                continue
            assert event.tokens.first_index == len(self.tokens)
            self.tokens += event.tokens.token_ids
            now_s = time.monotonic()
            self.longest_gap_s = max(self.longest_gap_s, now_s - (self._last_s or now_s))
            self._last_s = now_s

    async def until_tokens(self, count: int) -> None:
        async def there() -> bool:
            if self._task.done():
                self._task.result()
            return len(self.tokens) >= min(count, self.wanted)

        await until_so(there, f"{count} tokens were read")

    async def answer(self) -> tuple[str, list[int]]:
        """How it ended, and all its tokens."""
        await self._task
        return types_pb2.FinishReason.Name(self.finished.reason), self.tokens

    @property
    def right_answer(self) -> tuple[str, list[int]]:
        return "FINISH_REASON_LENGTH", expected(self.context, self.wanted)


async def test_fifty_answers_on_sixteen_nodes_outlive_the_head(
    durable: Durable, capsys: pytest.CaptureFixture[str]
) -> None:
    await asyncio.gather(*(durable.node(f"n-{i}", joins=i % 2 == 1, rate=20) for i in range(NODES)))
    await durable.start()
    await durable.met_all()
    clients = [await durable.client() for _ in range(5)]
    readers = [Follower(clients[i % 5], i, 60) for i in range(STREAMS)]
    await asyncio.gather(*(reader.until_tokens(5) for reader in readers))
    await durable.kill()
    killed_s = time.monotonic()
    await durable.start()
    served_s = time.monotonic()
    await durable.met_all()
    met_s = time.monotonic()
    answers = await asyncio.gather(*(reader.answer() for reader in readers))
    assert answers == [reader.right_answer for reader in readers]
    gaps_s = sorted(reader.longest_gap_s for reader in readers)
    with capsys.disabled():
        sys.stdout.write(
            f"\nserving {served_s - killed_s:.2f} s after the kill, all nodes {met_s - served_s:.2f} s later;"
            f" gaps {gaps_s[0]:.2f} to {gaps_s[-1]:.2f} s, median {gaps_s[STREAMS // 2]:.2f} s\n"
        )
    assert sum(bool(reader.reattached) for reader in readers) > STREAMS // 2
    await durable.ends_quiet()


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_twenty_restarts_in_a_row_lose_nothing(durable: Durable) -> None:
    await asyncio.gather(*(durable.node(f"n-{i}", joins=i % 2 == 1, rate=20) for i in range(NODES)))
    await durable.start()
    await durable.met_all()
    clients = [await durable.client() for _ in range(5)]
    readers = [Follower(clients[i % 5], i, 900) for i in range(STREAMS)]
    for restart in range(20):
        have = [len(reader.tokens) for reader in readers]
        await asyncio.gather(*(reader.until_tokens(n + 5) for reader, n in zip(readers, have, strict=True)))
        await (durable.kill() if restart % 4 else durable.stop())
        await durable.start()
    answers = await asyncio.gather(*(reader.answer() for reader in readers))
    assert answers == [reader.right_answer for reader in readers]
    assert all(len(reader.reattached) >= 5 for reader in readers)
    await durable.ends_quiet()


@pytest.mark.slow
@pytest.mark.parametrize("joins", [False, True], ids=["dialed", "joined"])
async def test_the_head_and_a_node_die_together(durable: Durable, joins: bool) -> None:
    flags = ("--join", f"127.0.0.1:{durable.join}") if joins else ()
    doomed = await durable.node_process("doomed", "--lanes", "8", *flags, rate=20)
    await durable.start()
    await durable.met_all()
    client = await durable.client()
    readers = [Follower(client, i, 60) for i in range(6)]
    await asyncio.gather(*(reader.until_tokens(3) for reader in readers))
    await durable.node("heir", joins=joins, rate=50)
    await asyncio.gather(durable.kill(), doomed.kill())
    await durable.start()
    answers = await asyncio.gather(*(reader.answer() for reader in readers))
    assert answers == [reader.right_answer for reader in readers]
    assert all(reader.finished.attempts >= 2 for reader in readers)  # none was over before the two died
    await durable.ends_quiet()


@pytest.mark.slow
async def test_the_head_is_killed_again_while_it_recovers(durable: Durable) -> None:
    """Before its listeners open, at several moments, and as soon as they have."""
    for name in ("a", "b"):
        await durable.node(name, joins=name == "b", rate=20)
    await durable.start()
    await durable.met_all()
    client = await durable.client()
    readers = [Follower(client, i, 200) for i in range(8)]
    await asyncio.gather(*(reader.until_tokens(3) for reader in readers))
    store = durable.folder / "data"

    async def listens() -> bool:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", durable.callers)
        except OSError:
            return False
        writer.close()
        return True

    await durable.kill()
    for moment in range(4):
        before = _newest_change_ns(store)
        again = await durable.launch()
        if moment == 0:  # it has the store, and has written its term at most

            async def began(before: int = before) -> bool:
                return _newest_change_ns(store) > before

            await until_so(began, "the head has begun to recover")
        else:
            await until_so(listens, "the listeners are open")
        again.send_signal(signal.SIGKILL)
        await again.wait()
    await durable.start()
    answers = await asyncio.gather(*(reader.answer() for reader in readers))
    assert answers == [reader.right_answer for reader in readers]
    assert all(reader.reattached for reader in readers)
    await durable.ends_quiet()


def _newest_change_ns(folder: Path) -> int:
    return max(each.stat().st_mtime_ns for each in folder.iterdir())
