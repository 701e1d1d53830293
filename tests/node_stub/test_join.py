"""A node that dials its head: what the head sees, and what people at the node are told."""

from __future__ import annotations

import asyncio
import random
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from fleet.v1 import link_pb2 as link_pb
from node_stub.faults import Action, Fault, Point
from node_stub.join import Backoff, JoinRefusedError, JoinSettings
from node_stub.link import LinkLimits
from node_stub.reference import StubModel, reference_tokens
from node_stub.stub_engine import EngineSettings
from node_stub.stub_node import StubNode, StubSettings
from node_stub.tls import TlsFiles, server_credentials
from tests.certificates import Authority
from tests.node_stub.join_support import JoinHead
from tests.node_stub.link_support import PATIENCE_S
from tests.node_stub.support import PROMPT, eventually, head_of

ANSWER = reference_tokens(StubModel("stub"), 0, PROMPT, 200)
PACED = EngineSettings(decode_tokens_per_s=200, prefill_tokens_per_s=0)


@pytest.fixture
async def head() -> AsyncIterator[JoinHead]:
    async with JoinHead() as head:
        yield head


def joining(head: JoinHead, **fields: float) -> StubSettings:
    join = replace(JoinSettings(head.address), **fields)  # type: ignore[arg-type] # all of them are times
    return StubSettings(identity="n1", engine=PACED, join=join)


async def test_a_joined_node_serves_as_a_dialed_one_does(head: JoinHead) -> None:
    async with StubNode(joining(head)) as node:
        link = await head.next_link()
        assert link.hello
        assert (link.hello.identity, link.hello.incarnation) == ("n1", node.node.settings.incarnation)
        await link.bind()
        assert (await link.run(100)).tokens == ANSWER[:100]
        await eventually(lambda: node.told == [f"joined {head.address}: head head"])


async def test_a_head_that_went_away_is_dialed_until_it_is_back_and_runs_go_on(head: JoinHead) -> None:
    async with StubNode(joining(head, cap_s=0.2, again_cap_s=0.2)) as node:
        link = await head.next_link()
        await link.bind()
        tokens = (await link.tokens((await link.start(200)).handle, 5)).tokens
        await head.stop()
        await eventually(lambda: any(line.startswith(f"left {head.address}") for line in node.told))
        dials = head.dials
        await head.start()
        again = await head.next_link()
        assert head.dials == dials + 1
        assert again.hello
        assert again.hello.incarnation == node.node.settings.incarnation
        accepted = await again.start(200 - len(tokens), prefix_token_ids=tokens, first_index=len(tokens))
        assert accepted.resumed
        assert tokens + (await again.finished(accepted.handle)).tokens == ANSWER
        said = [line.partition(" ")[0] for line in node.told]
        assert (said[:2], said[-1], said.count("joined")) == (["joined", "left"], "joined", 2), node.told


async def test_a_link_that_the_head_ends_is_dialed_anew(head: JoinHead) -> None:
    async with StubNode(joining(head)):
        for n in range(3):
            link = await head.next_link()
            await link.bind(session=f"s{n}")
            link.end()
        assert head.dials >= 3


async def test_a_head_that_is_not_there_yet_is_dialed_quietly() -> None:
    async with JoinHead() as head:
        await head.stop()
        async with StubNode(joining(head, cap_s=0.05)) as node:
            await eventually(lambda: len(node.told) == 1)
            assert node.told[0].startswith(f"cannot join {head.address}")
            assert "dialing on" in node.told[0]
            await head.start()
            await (await head.next_link()).bind()
            await eventually(lambda: len(node.told) == 2)


async def test_a_living_node_of_the_same_identity_is_told_and_waited_for(head: JoinHead) -> None:
    head.refuse = (grpc.StatusCode.ALREADY_EXISTS, "IDENTITY_IN_USE")
    async with StubNode(joining(head, cap_s=0.1)) as node:
        await eventually(lambda: head.dials >= 3)
        assert len(node.told) == 1
        assert "IDENTITY_IN_USE" in node.told[0]
        assert "another --identity" in node.told[0]
        head.refuse = None
        await (await head.next_link()).bind()
        await eventually(lambda: node.told[-1].startswith("joined"))


@pytest.mark.parametrize(
    "said",
    [
        "identity n1 is in use by a living node at n:1; give this one another with --identity, or stop that",
        "this run of node n1 was silent and has been replaced; restart it",
    ],
)
async def test_what_a_head_advises_about_an_identity_is_told_as_it_is_and_once(
    head: JoinHead, said: str
) -> None:
    head.refuse, head.words = (grpc.StatusCode.ALREADY_EXISTS, "IDENTITY_IN_USE"), said
    async with StubNode(joining(head)) as node:
        await eventually(lambda: bool(node.told))
        assert node.told[0] == f"refused by {head.address}: {said}; asking again every 30 s"


async def test_why_a_dial_came_to_nothing_is_told_in_words(tmp_path: Path) -> None:
    """Of TLS, too: a node without --tls-ca at a head with it, and what else may differ."""
    authority, stranger = Authority(tmp_path), Authority(tmp_path, "stranger")
    served, other = authority.issue("head"), authority.issue("other", "other.example")
    tls = TlsFiles(served.cert, served.key)
    for server_tls, files, told in (
        (tls, None, "it closes the connection; it may speak TLS: name what signed its certificate with"),
        (replace(tls, ca=authority.ca), TlsFiles(ca=authority.ca), "give --tls-cert and --tls-key"),
        (tls, TlsFiles(ca=stranger.ca), "not signed by what --tls-ca names"),
        (TlsFiles(other.cert, other.key), TlsFiles(ca=authority.ca), "for another name than the one dialed"),
        (None, TlsFiles(ca=authority.ca), "does not speak TLS there; leave --tls-ca out"),
    ):
        server = grpc.aio.server()
        place = "127.0.0.1:0"
        port = (
            server.add_secure_port(place, server_credentials(server_tls))
            if server_tls
            else server.add_insecure_port(place)
        )
        await server.start()
        settings = StubSettings(identity="n1", join=JoinSettings(f"127.0.0.1:{port}", files))
        async with StubNode(settings) as node:
            await eventually(lambda node=node: bool(node.told))  # type: ignore[misc] # its default is no argument
            assert told in node.told[0]
            assert "dialing on" in node.told[0]
            assert "last error" not in node.told[0]
        await server.stop(0)
    async with StubNode(StubSettings(identity="n1", join=JoinSettings("127.0.0.1:1"))) as node:
        await eventually(lambda: bool(node.told))
        assert node.told[0] == "cannot join 127.0.0.1:1: nothing listens there; dialing on"


async def test_a_refused_token_ends_the_joining(head: JoinHead) -> None:
    head.refuse = (grpc.StatusCode.UNAUTHENTICATED, "FLEET_TOKEN_REFUSED")
    node = StubNode(joining(head))
    await node.start()
    with pytest.raises(JoinRefusedError) as caught:
        await asyncio.wait_for(node.join_ended(), PATIENCE_S)
    assert head.dials == 1
    with pytest.raises(JoinRefusedError):
        await node.stop()
    assert "FLEET_TOKEN_REFUSED" in str(caught.value)


async def test_a_head_that_breaks_the_contract_is_left_and_dialed_again(head: JoinHead) -> None:
    async with StubNode(joining(head)) as node:
        link = await head.next_link()
        await link.send(link_pb.HeadFrame(type=77, must_understand=True))  # type: ignore[arg-type]
        again = await head.next_link()
        await again.bind()
        assert any("must be understood" in line for line in node.told)


async def test_a_head_that_says_no_hello_is_left(head: JoinHead) -> None:
    settings = StubSettings(join=JoinSettings(head.address), link_limits=LinkLimits(hello_timeout_s=0.1))
    async with StubNode(settings) as node:
        await eventually(lambda: head.dials >= 2)
        assert "no hello" in node.told[0]


async def test_a_dropped_or_cut_link_is_dialed_anew_when_it_may(head: JoinHead) -> None:
    async with StubNode(joining(head)) as node:
        link = await head.next_link()
        await link.bind()
        for action, delay_ms in ((Action.DROP_LINK, 0), (Action.CUT_LINK, 300)):
            node.set_faults(Fault(Point.AFTER_TOKENS, action, after_tokens=5, times=1, delay_ms=delay_ms))
            loop = asyncio.get_running_loop()
            accepted = await link.start(200, action.name)
            start_s = loop.time()
            link = await head.next_link()
            assert loop.time() - start_s >= delay_ms / 1000
            resumed = await link.start(195, action.name, prefix_token_ids=ANSWER[:5], first_index=5)
            assert (accepted.handle, resumed.resumed) == (accepted.handle, True)
            assert (await link.finished(resumed.handle)).tokens == ANSWER[5:]


@pytest.mark.parametrize("seed", range(5))
def test_dials_are_spread_and_grow_to_their_cap(seed: int) -> None:
    backoff = Backoff(JoinSettings("head:1"), random.Random(seed))
    waits = [backoff.next_s() for _ in range(40)]
    assert 0 <= waits[0] <= 0.1
    assert all(0.05 * 2**n <= wait <= 0.1 * 2**n for n, wait in enumerate(waits[1:8], 1))
    assert all(15 <= wait <= 30 for wait in waits[10:])
    assert len(set(waits)) == 40
    backoff.joined()
    assert backoff.next_s() <= 0.1
    assert all(backoff.next_s() <= 1.0 for _ in range(40))
    assert 15 <= backoff.next_s(identity_in_use=True) <= 30


# ------------------------------------------------------------------------------------------- a real process


@asynccontextmanager
async def joined_process(address: str, *flags: str) -> AsyncIterator[asyncio.subprocess.Process]:
    node = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "node_stub", "--model", "stub", "--join", address, *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield node
    finally:
        if node.returncode is None:
            node.kill()
        await node.wait()


async def line_of(stream: asyncio.StreamReader | None, start: str) -> str:
    assert stream
    async with asyncio.timeout(PATIENCE_S):
        while line := (await stream.readline()).decode():
            if line.startswith(start):
                return line.strip()
    raise AssertionError(f"no line starts with {start!r}")


async def test_the_command_says_where_it_joins_and_where_its_control_is(head: JoinHead) -> None:
    flags = ("--identity", "n9", "--decode-rate", "100")
    async with joined_process(head.address, *flags) as node:
        ready = await line_of(node.stdout, "fleet-node:")
        told, control = ready.rsplit(" ", 1)
        assert told == f"fleet-node: n9 joins {head.address}, control on"
        link = await head.next_link()
        await link.bind()
        assert await line_of(node.stderr, "fleet-node:") == f"fleet-node: joined {head.address}: head head"
        async with head_of(control) as plain:
            assert [each.session_id for each in (await plain.holdings()).holdings] == ["s"]
        accepted = await link.start(50)
        await link.tokens(accepted.handle, 1)
        node.send_signal(signal.SIGTERM)
        assert (await link.finished(accepted.handle)).tokens == ANSWER[:50], "what runs may end"
        link.end()
        assert await node.wait() == 0


async def test_the_command_ends_with_2_when_the_token_is_refused(head: JoinHead) -> None:
    head.refuse = (grpc.StatusCode.UNAUTHENTICATED, "FLEET_TOKEN_REFUSED")
    async with joined_process(head.address) as node:
        _, stderr = await asyncio.wait_for(node.communicate(), PATIENCE_S)
        assert node.returncode == 2
        assert f"fleet-node: {head.address} refuses this node (FLEET_TOKEN_REFUSED)" in stderr.decode()
        assert "Traceback" not in stderr.decode()
