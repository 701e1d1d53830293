"""TLS between head and nodes, whichever dials: causes are told, and new certificates taken as they come."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from fleet_service.links.dialer import FleetDialer
from fleet_service.links.settings import LinkSettings
from fleet_service.runtime.protocols import HandshakeRefusedError, LinkLostError
from fleet_service.tls import ClientTls, ServerTls, TlsError
from node_stub.join import JoinSettings
from node_stub.stub_node import StubNode, StubSettings
from node_stub.tls import TlsError as NodeTlsError
from node_stub.tls import TlsFiles
from tests.certificates import Authority, Pair
from tests.links.scripted_link import PATIENT, RecordingDesk, join_address
from tests.links.scripted_node import INTRODUCTION, RecordingListener


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def at_node(pair: Pair, ca: Path | None = None) -> StubSettings:
    return StubSettings(tls=TlsFiles(pair.cert, pair.key, ca))


def at_head(ca: Path, pair: Pair | None = None, server_name: str = "") -> LinkSettings:
    cert, key = (pair.cert, pair.key) if pair else (None, None)
    return replace(PATIENT, tls=ClientTls(ca, cert, key, server_name))


async def encrypted(node: StubNode, settings: LinkSettings) -> bool:
    link = await FleetDialer(settings).connect(node.address, INTRODUCTION, RecordingListener())
    await link.ping()
    await link.close()
    return link.hello.encrypted


@pytest.mark.parametrize("multiplexed", [True, False], ids=["link", "plain"])
async def test_a_dialed_node_is_spoken_with_over_tls(authority: Authority, multiplexed: bool) -> None:
    async with StubNode(at_node(authority.issue("node"))) as node:
        assert await encrypted(node, replace(at_head(authority.ca), multiplexed=multiplexed))


async def test_a_node_that_asks_for_a_certificate_takes_heads_that_have_one(authority: Authority) -> None:
    async with StubNode(at_node(authority.issue("node"), authority.ca)) as node:
        assert await encrypted(node, at_head(authority.ca, authority.issue("head")))
        with pytest.raises(LinkLostError, match="a node that takes no such certificate of the head does"):
            await encrypted(node, at_head(authority.ca))


async def test_what_is_wrong_with_a_nodes_certificate_is_told_by_its_cause(
    authority: Authority, tmp_path: Path
) -> None:
    stranger = Authority(tmp_path, "stranger")
    cases = [
        (authority.issue("expired", expired=True), "", "its certificate has expired"),
        (authority.issue("elsewhere", "example.org"), "", "its certificate is for another name"),
        (stranger.issue("unknown"), "", "its certificate is signed by nobody that is believed"),
        (authority.issue("good"), "example.org", "its certificate is for another name"),
        (authority.issue("named", "example.org"), "example.org", ""),
        (None, "", "it does not speak TLS"),
    ]
    for pair, server_name, told in cases:
        async with StubNode(at_node(pair) if pair else StubSettings()) as node:
            settings = at_head(authority.ca, server_name=server_name)
            if not told:
                assert await encrypted(node, settings)
                continue
            with pytest.raises(LinkLostError) as lost:
                await encrypted(node, settings)
            assert str(lost.value) == f"cannot connect to {node.address}: {told}"


async def test_a_head_without_tls_is_told_what_the_node_may_want(authority: Authority) -> None:
    async with StubNode(at_node(authority.issue("node"))) as node:
        with pytest.raises(LinkLostError, match="closed at once, as a node with TLS does"):
            await encrypted(node, PATIENT)


async def test_a_nodes_certificate_is_renewed_without_a_restart(authority: Authority) -> None:
    pair = authority.issue("node", expired=True)
    async with StubNode(at_node(pair)) as node:
        with pytest.raises(LinkLostError, match="its certificate has expired"):
            await encrypted(node, at_head(authority.ca))
        authority.issue("node")
        assert await encrypted(node, at_head(authority.ca))
        pair.cert.write_text("half a certif")
        assert await encrypted(node, at_head(authority.ca))  # the one before is served on


async def test_a_heads_files_are_read_again_at_each_dial(authority: Authority, tmp_path: Path) -> None:
    settings = at_head(authority.ca)
    other = Authority(tmp_path, "other")
    async with StubNode(at_node(other.issue("node"))) as node:
        with pytest.raises(LinkLostError, match="signed by nobody that is believed"):
            await encrypted(node, settings)
        authority.ca.write_bytes(other.ca.read_bytes())
        assert await encrypted(node, settings)
        authority.ca.unlink()
        with pytest.raises(HandshakeRefusedError, match="cannot be read: No such file"):
            await encrypted(node, settings)


async def test_a_joining_node_speaks_tls_and_checks_who_the_head_is(
    authority: Authority, tmp_path: Path
) -> None:
    pair, desk = authority.issue("head"), RecordingDesk()
    other = Authority(tmp_path, "other")
    node_pair = authority.issue("node")
    async with AsyncExitStack() as stack:
        listens = join_address(desk, tls=ServerTls(pair.cert, pair.key, authority.ca))
        address = await stack.enter_async_context(listens)
        good = JoinSettings(address, TlsFiles(node_pair.cert, node_pair.key, authority.ca))
        async with StubNode(StubSettings(join=good)):
            hello, link = await desk.offers.get()
            assert hello.encrypted
            await link.close()
        doubtful = JoinSettings(address, TlsFiles(node_pair.cert, node_pair.key, other.ca))
        async with StubNode(StubSettings(join=doubtful)) as node:
            why = "the head's certificate is not signed by what --tls-ca names"
            assert await node.tells("cannot join") == f"cannot join {address}: {why}; dialing on"
        async with StubNode(StubSettings(join=JoinSettings(address))) as node:
            assert "dialing on" in await node.tells("cannot join")
    assert desk.offers.empty()


async def test_the_join_listeners_certificate_is_renewed_without_a_restart(authority: Authority) -> None:
    pair, desk = authority.issue("head", expired=True), RecordingDesk()
    async with join_address(desk, tls=ServerTls(pair.cert, pair.key)) as address:
        settings = JoinSettings(address, TlsFiles(ca=authority.ca), cap_s=0.2)
        async with StubNode(StubSettings(join=settings)) as node:
            assert "the head's certificate has expired" in await node.tells("cannot join")
            authority.issue("head")
            _, link = await desk.offers.get()
            await link.close()


@pytest.mark.parametrize("side", ["head", "node"])
def test_files_that_are_no_certificate_with_its_key_are_named(
    authority: Authority, tmp_path: Path, side: str
) -> None:
    good, other = authority.issue("good"), authority.issue("other")
    empty = tmp_path / "empty.pem"
    empty.touch()
    missing = tmp_path / "missing.pem"

    def check(cert: Path, key: Path, ca: Path | None = None) -> str:
        error: type[Exception] = TlsError if side == "head" else NodeTlsError
        with pytest.raises(error) as told:
            (ServerTls(cert, key, ca) if side == "head" else TlsFiles(cert, key, ca)).check()
        return str(told.value)

    assert check(missing, good.key) == f"{missing} cannot be read: No such file or directory"
    assert check(good.cert, other.key).startswith(
        f"{good.cert} and {other.key} are no certificate with its key"
    )
    assert check(empty, good.key).startswith(f"{empty} and {good.key} are no certificate with its key")
    assert check(good.cert, good.key, empty).startswith(f"{empty} holds no certificates")
