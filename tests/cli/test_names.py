"""Names whose addresses are nodes: in the settings, in the commands, and in what `fleet doctor` finds."""

from __future__ import annotations

import asyncio
import json

import pytest

from fleet.v1 import admin_service_pb2 as admin
from fleet_service.addresses import node_entry, split_name
from fleet_service.app import Addresses, StopRequest, serve
from fleet_service.cli.findings import Callers, HeadSeen, Severity, findings, healthy
from fleet_service.client import FleetClient
from fleet_service.config import FleetConfig, LinksConfig, ListenConfig
from fleet_service.config_sources import ConfigError, load
from fleet_service.runtime.settings import DiscoverySettings
from node_stub.reference import StubModel
from node_stub.stub_node import StubNode, StubSettings
from tests.cli.conftest import Fleet
from tests.cli.scripted_head import ScriptedHead
from tests.ports import quiet_port

PODS = admin.DnsName(
    name="dns:///pods.example:8454",
    addresses=["10.0.0.1:8454", "10.0.0.2:8454", "[2001:db8::1]:8454"],
    other_ways=["[2001:db8::1]:8454"],
    removed=["10.0.0.2:8454"],
    left_out=2,
    failure="the DNS server gives no answer",
)
SHOWN = (
    "dns:///pods.example:8454: 3 addresses; 1 lead to nodes connected by another one; 1 removed;"
    " 2 left out, by a limit; not looked up: the DNS server gives no answer"
)

# ---------------------------------------------------------------------------------------------- settings


def test_a_name_stands_among_the_nodes_with_its_port() -> None:
    loaded = load(environ={"FLEET_NODES": "10.0.0.7, dns:///Pods.Example, dns:///pods.example:9000"})
    assert loaded.config.nodes == (
        "10.0.0.7:8454",
        "dns:///pods.example:8454",
        "dns:///pods.example:9000",
    )


@pytest.mark.parametrize(
    "text,parts",
    [
        ("dns:///pods", ("pods", 8454)),
        ("dns:///pods.default.svc.cluster.local.:1", ("pods.default.svc.cluster.local.", 1)),
        ("dns:///_grpc._tcp.x-y:65535", ("_grpc._tcp.x-y", 65535)),
        ("dns:///1and1.example", ("1and1.example", 8454)),
    ],
)
def test_names_are_taken_apart(text: str, parts: tuple[str, int]) -> None:
    assert split_name(text) == parts
    assert node_entry(text) == f"dns:///{parts[0]}:{parts[1]}"


@pytest.mark.parametrize(
    "text,why",
    [
        ("dns:///", "must be dns:///NAME:PORT, for example dns:///nodes.example:8454"),
        ("dns:pods", "must be dns:///NAME:PORT"),
        ("dns:///a b", "must be dns:///NAME:PORT"),
        ("dns:///-a", "must be dns:///NAME:PORT"),
        ("dns:///a..b", "must be dns:///NAME:PORT"),
        ("dns:///" + ".".join(["a" * 63] * 5), "must be dns:///NAME:PORT"),
        ("dns:///pods:port", "must be dns:///NAME:PORT"),
        ("dns:///pods:0", "must have a port from 1 to 65535, unlike dns:///pods:0"),
        ("dns:///pods:65536", "must have a port from 1 to 65535"),
        ("dns://10.0.0.53/pods:1", "the system's DNS is asked, no other server can be named"),
        ("dns:///10.0.0.1:8454", "write an address in numbers without dns:///"),
        ("dns:///[::1]:8454", "write an address in numbers without dns:///"),
        ("dns:///::1", "write an address in numbers without dns:///"),
        ("dns:///8454", "write an address in numbers without dns:///"),
    ],
)
def test_a_name_that_cannot_be_one_is_refused_with_what_it_must_be(text: str, why: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(environ={"FLEET_NODES": f"a,{text}"})
    assert why in str(refused.value)
    assert "(environment FLEET_NODES)" in str(refused.value)


def test_more_names_than_may_be_and_a_name_given_twice_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"nodes must not have more names than links\.max_dns_names"):
        load(environ={"FLEET_NODES": "dns:///a,dns:///b", "FLEET_LINKS__MAX_DNS_NAMES": "1"})
    with pytest.raises(ConfigError, match="must name each node once, unlike dns:///a:8454"):
        load(environ={"FLEET_NODES": "dns:///a,dns:///A:8454"})


def test_every_number_of_looking_names_up_is_a_setting_with_its_default() -> None:
    assert LinksConfig().discovery_settings() == DiscoverySettings()


async def test_the_settings_in_effect_show_names(head: ScriptedHead, fleet: Fleet) -> None:
    ended = await fleet("config", "--set", "nodes=dns:///pods.example", "--set", "links.dns_refresh_s=3")
    assert ended.code == 0
    assert 'nodes = ["dns:///pods.example:8454"]' in ended.out
    assert "dns_refresh_s = 3.0 " in ended.out
    refused = await fleet("config", "--set", "nodes=dns:///")
    assert refused.code == 2
    assert "must be dns:///NAME:PORT" in refused.err


# ---------------------------------------------------------------------------------------------- commands


async def test_names_are_listed_below_the_nodes_with_what_became_of_their_addresses(
    head: ScriptedHead, fleet: Fleet
) -> None:
    node = admin.Node(
        name="pod-1",
        address="10.0.0.1:8454",
        state=admin.NODE_STATE_UP,
        found_by=PODS.name,
        unlisted=True,
    )
    head.replies["ListNodes"] = admin.ListNodesResponse(nodes=[node], books_balance=True, names=[PODS])
    ended = await fleet("nodes")
    assert ended.code == 0
    assert ended.out.splitlines()[-2:] == [
        "pod-1: no new work: no more listed by dns:///pods.example:8454",
        SHOWN,
    ]
    shown = json.loads((await fleet("nodes", "--json")).out)
    assert shown["names"][0]["failure"] == PODS.failure
    assert (shown["nodes"][0]["found_by"], shown["nodes"][0]["unlisted"]) == (PODS.name, True)


async def test_a_head_with_a_name_and_no_node_yet_shows_the_name(head: ScriptedHead, fleet: Fleet) -> None:
    name = admin.DnsName(name=PODS.name, failure="name not found")
    head.replies["ListNodes"] = admin.ListNodesResponse(books_balance=True, names=[name])
    ended = await fleet("nodes")
    assert (ended.out, ended.err) == (f"{PODS.name}: 0 addresses; not looked up: name not found\n", "")


async def test_a_name_is_added_and_removed_by_the_commands_for_nodes(
    head: ScriptedHead, fleet: Fleet
) -> None:
    head.replies["AddNode"] = admin.AddNodeResponse(name=PODS)
    head.replies["RemoveNode"] = admin.RemoveNodeResponse(name=PODS)
    added = await fleet("nodes", "add", "dns:///pods.example")
    assert (added.code, added.out) == (0, SHOWN + "\n")
    removed = await fleet("nodes", "remove", PODS.name)
    assert (removed.code, removed.out) == (0, f"removed {PODS.name} and the nodes that only it lists\n")
    assert head.requests("AddNode")[0].address == PODS.name
    as_json = await fleet("nodes", "remove", PODS.name, "--json")
    assert json.loads(as_json.out)["name"] == PODS.name
    wrong = await fleet("nodes", "add", "dns://10.0.0.53/pods")
    assert wrong.code == 2
    assert "no other server can be named" in " ".join(wrong.err.replace("│", " ").split())


# ------------------------------------------------------------------------------------------------ doctor

WELL = HeadSeen(Callers.SERVING, "", books_balance=True)
NODE = admin.Node(name="a", address="a:1", state=admin.NODE_STATE_UP, models=[{"name": "demo"}])


def test_a_name_that_cannot_be_looked_up_is_an_error_only_where_nothing_is_known_from_before() -> None:
    never = admin.DnsName(name=PODS.name, failure="name not found")
    lately = admin.DnsName(name=PODS.name, failure="name not found", addresses=["a:1", "b:1"])
    (found,) = findings(WELL, [NODE], {}, [never])
    assert (found.severity, found.what) == (
        Severity.ERROR,
        f"{PODS.name} cannot be looked up: name not found",
    )
    assert "check the name" in found.do
    (found,) = findings(WELL, [NODE], {}, [lately])
    assert (found.severity, found.what) == (
        Severity.WARNING,
        f"{PODS.name} cannot be looked up: name not found; 2 addresses known from before",
    )
    assert findings(WELL, [NODE], {}, [admin.DnsName(name=PODS.name, addresses=["a:1"])]) == []


def test_addresses_that_are_left_out_are_told_with_the_limits() -> None:
    (found,) = findings(WELL, [NODE], {}, [admin.DnsName(name=PODS.name, addresses=["a:1"], left_out=1)])
    assert (found.severity, found.what) == (
        Severity.WARNING,
        f"1 address of {PODS.name} left out by a limit",
    )
    assert "links.max_addresses_per_name or head.max_nodes" in found.do


def test_a_node_that_is_no_more_listed_is_noted_and_nothing_wrong() -> None:
    leaving = admin.Node(name="b", address="b:1", found_by=PODS.name, unlisted=True)
    leaving.MergeFrom(admin.Node(state=admin.NODE_STATE_UP, models=[{"name": "demo"}]))
    (found,) = findings(WELL, [NODE, leaving], {})
    assert (found.severity, found.node) == (Severity.NOTE, "b")
    assert found.what == f"no more listed by {PODS.name}, so it gets no new work"
    assert healthy([found])


# -------------------------------------------------------------------------------------------- a real head


async def test_a_served_head_asks_the_system_for_its_names() -> None:
    port = quiet_port()
    settings = StubSettings(address=f"localhost:{port}", identity="here", models=[(StubModel("demo"), 4096)])
    async with StubNode(settings):
        stop = StopRequest()
        ready: asyncio.Future[Addresses] = asyncio.get_running_loop().create_future()
        config = FleetConfig(
            nodes=(f"dns:///localhost:{port}",),
            listen=ListenConfig(callers="127.0.0.1:0", admin="127.0.0.1:0"),
        )
        serving = asyncio.create_task(serve(config, ready=ready.set_result, stop=stop))
        where = await ready
        async with FleetClient(where.callers, where.admin) as client:
            listed = await client.ask(client.admin.ListNodes(admin.ListNodesRequest()))
        stop.ask()
        await serving
    assert "here" in {node.name for node in listed.nodes}
    assert [name.name for name in listed.names] == [f"dns:///localhost:{port}"]
