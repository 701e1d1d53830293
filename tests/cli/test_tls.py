"""What the commands say of TLS: what listens there, why it cannot be called, and which option helps."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from fleet.v1 import admin_service_pb2 as admin
from fleet.v1 import admin_service_pb2_grpc as admin_grpc
from fleet_service.tls import ServerTls
from tests.certificates import Authority
from tests.cli.conftest import Fleet


class _Operators:
    """What `fleet nodes` and `fleet doctor` ask for."""

    async def ListNodes(self, request: admin.ListNodesRequest, context: object) -> admin.ListNodesResponse:
        node = admin.Node(name="n", address="n:1", state=admin.NODE_STATE_UP, lanes=8)
        node.models.add(name="demo")
        return admin.ListNodesResponse(nodes=[node], books_balance=True)

    async def ProbeNodes(self, request: admin.ProbeNodesRequest, context: object) -> admin.ProbeNodesResponse:
        return admin.ProbeNodesResponse(probes=[admin.NodeProbe(name="n", address="n:1", reachable=True)])


@asynccontextmanager
async def listener(tls: ServerTls | None) -> AsyncIterator[str]:
    """A listener for callers and operators; its address."""
    server = grpc.aio.server()
    servicer: Any = type("Operators", (_Operators, admin_grpc.AdminServiceServicer), {})()
    admin_grpc.add_AdminServiceServicer_to_server(servicer, server)
    healthy = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    for service in ("", "fleet.v1.FleetService"):
        await healthy.set(service, health_pb2.HealthCheckResponse.SERVING)
    if tls:
        port = server.add_secure_port("127.0.0.1:0", tls.credentials())
    else:
        port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def serving(authority: Authority, *hosts: str, expired: bool = False, asks: bool = False) -> ServerTls:
    pair = authority.issue(f"head-{len(hosts)}-{expired}-{asks}", *hosts, expired=expired)
    return ServerTls(pair.cert, pair.key, authority.ca if asks else None)


async def test_what_is_wrong_with_tls_is_told_with_the_option_that_helps(
    authority: Authority, tmp_path: Path, fleet: Fleet
) -> None:
    ca, stranger = ("--tls-ca", str(authority.ca)), Authority(tmp_path, "stranger")
    for tls, given, told, advice in (
        (serving(authority), (), "closes the connection", "may speak TLS: name the CA that signed"),
        (None, ca, "it does not speak TLS", "or only for this listener: --admin-address http://127.0.0.1:"),
        (serving(authority), ("--tls-ca", str(stranger.ca)), "signed by nobody", "with --tls-ca FILE"),
        (serving(authority, "other.example"), ca, "for another name", "by the name in its certificate"),
        (serving(authority, expired=True), ca, "has expired", "give the head a new one"),
        (serving(authority, asks=True), ca, "closes the connection", "--tls-cert FILE --tls-key FILE"),
    ):
        async with listener(tls) as address:
            ended = await fleet(*given, "nodes", "--admin-address", address)
            assert ended.code == 1
            assert f"fleet: something listens at {address}, but" in ended.err
            assert told in ended.err
            assert advice in ended.err
            assert "start one" not in ended.err


async def test_credentials_count_before_the_command_after_it_and_after_a_subcommand(
    authority: Authority, fleet: Fleet
) -> None:
    mine = authority.issue("mine")
    shown = ("--tls-ca", str(authority.ca), "--tls-cert", str(mine.cert), "--tls-key", str(mine.key))
    async with listener(serving(authority, asks=True)) as address:
        at = ("--admin-address", address)
        for words in (
            (*shown, "nodes", *at),
            ("nodes", *at, *shown),
            ("nodes", *at, "probe", *shown),
            ("nodes", *shown, "probe", *at),
            (*shown[:2], "nodes", *at, *shown[2:]),
        ):
            assert (await fleet(*words)).code == 0, words
        token = ("nodes", *at, *shown, "--access-token-file", "no-such-file")
        assert "the access token cannot be read from no-such-file" in (await fleet(*token)).err


async def test_the_doctor_passes_where_only_callers_have_tls(authority: Authority, fleet: Fleet) -> None:
    async with listener(serving(authority)) as callers, listener(None) as operators:
        both = ("--tls-ca", str(authority.ca), "--address", callers)
        ended = await fleet("doctor", *both, "--admin-address", f"http://{operators}")
        assert (ended.code, ended.err) == (0, "")
        refused = await fleet("doctor", *both, "--admin-address", operators)
        assert (refused.code, f"--admin-address http://{operators}" in refused.err) == (1, True)
        plain = await fleet("doctor", "--address", callers, "--admin-address", operators)
        assert "something listens at" in plain.out
        assert "what to do: it may speak TLS" in plain.out


async def test_an_address_with_https_is_called_with_tls(authority: Authority, fleet: Fleet) -> None:
    async with listener(serving(authority)) as address:
        ended = await fleet("nodes", "--admin-address", f"https://{address}")
        assert (ended.code, "signed by nobody" in ended.err) == (1, True)
