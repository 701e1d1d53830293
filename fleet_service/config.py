"""The settings of a head: every name, what it means, its default and what it must be.

`fleet_service.config_sources` reads them from a file, the environment and flags. All values are immutable.
Durations end in `_s` (seconds), sizes in `_bytes`, `_tokens` counts tokens.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError
from pydantic_settings import NoDecode

from fleet_service.addresses import (
    ADMIN_PORT,
    CALLERS_PORT,
    JOIN_PORT,
    METRICS_PORT,
    PAGE_PORT,
    is_name,
    node_entry,
    split_address,
)
from fleet_service.exposure import exposed
from fleet_service.runtime.settings import DiscoverySettings, HeadSettings
from fleet_service.tls import ClientTls, ServerTls

_RUNTIME = HeadSettings()
_DISCOVERY = DiscoverySettings()


def _callers_address(text: str) -> str:
    return _listen_address(text, CALLERS_PORT)


def _admin_address(text: str) -> str:
    return _listen_address(text, ADMIN_PORT)


def _join_address(text: str) -> str:
    return _listen_address(text, JOIN_PORT) if text else text


def _metrics_address(text: str) -> str:
    return _listen_address(text, METRICS_PORT) if text else text


def _page_address(text: str) -> str:
    return _listen_address(text, PAGE_PORT) if text else text


def _listen_address(text: str, usual_port: int) -> str:
    host, port = split_address(text, example_port=usual_port)
    return f"{host}:{port}"


def _node_addresses(addresses: tuple[str, ...]) -> tuple[str, ...]:
    whole = [node_entry(address) for address in addresses]
    twice = sorted(address for address, times in Counter(whole).items() if times > 1)
    if twice:
        raise ValueError(f"must name each node once, unlike {', '.join(twice)}")
    return tuple(whole)


def _split_list(value: Any) -> Any:
    # The environment and flags have no lists: "a, b" stands for ["a", "b"].
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


CallersAddress = Annotated[str, AfterValidator(_callers_address)]
JoinAddress = Annotated[str, AfterValidator(_join_address)]
MetricsAddress = Annotated[str, AfterValidator(_metrics_address)]
PageAddress = Annotated[str, AfterValidator(_page_address)]
AdminAddress = Annotated[str, AfterValidator(_admin_address)]
NodeAddresses = Annotated[
    tuple[str, ...], NoDecode, BeforeValidator(_split_list), AfterValidator(_node_addresses)
]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9._:-]{1,128}$")]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class ListenConfig(_Section):
    """Where the head listens."""

    callers: CallersAddress = f"127.0.0.1:{CALLERS_PORT}"
    """Address for callers, host:port; port 0 lets the system choose"""
    admin: AdminAddress = f"127.0.0.1:{ADMIN_PORT}"
    """Address for operators, host:port; port 0 lets the system choose"""
    join: JoinAddress = ""
    """Address for nodes that dial in, host:port; empty = none may"""
    metrics: MetricsAddress = ""
    """Address for Prometheus, host:port (8458 by custom), served at /metrics; empty = no metrics"""
    page: PageAddress = ""
    """Address for the operators' web page, host:port (8459 by custom); empty = no page"""
    page_generations_kept: int = Field(2000, ge=1, le=100_000)
    """Generations whose story the page can tell, the last ones; some 2 KB each"""
    reflection: bool = True
    """Answer gRPC reflection, so that tools can list the services"""
    max_message_bytes: int = Field(16 * 1024 * 1024, ge=64 * 1024, le=256 * 1024 * 1024)
    """Largest request the head takes"""
    max_request_tokens: int = Field(1_048_576, ge=1, le=64 * 1024 * 1024)
    """Most token ids in one request"""
    max_engine_options_bytes: int = Field(64 * 1024, ge=0, le=1024 * 1024)
    """Largest engine options of a session"""
    max_open_calls: int = Field(16_384, ge=1, le=1_000_000)
    """Calls that may be open at once on one connection of Connect"""

    @model_validator(mode="after")
    def _apart(self) -> Self:
        if self.callers == self.admin and split_address(self.callers)[1] != 0:
            raise ValueError("listen.callers and listen.admin must differ")
        return self


class HeadConfig(_Section):
    """How the head places, watches and limits; the numbers of runtime.settings.HeadSettings."""

    fleet_id: Name = _RUNTIME.fleet_id
    """Fleet that the head and its nodes belong to"""
    head_id: Name = _RUNTIME.head_id
    """Name of this head, its own among the heads of the fleet"""

    policy: Literal["load-aware", "least-loaded", "round-robin"] = "load-aware"
    """How a node is chosen among those that could take the work"""
    pool_high_pct: int = Field(_RUNTIME.pool_high_pct, ge=1, le=100)
    """KV occupancy from which a node counts as hot, in percent"""
    expected_output_tokens: int = Field(_RUNTIME.expected_output_tokens, ge=1, le=1_000_000)
    """Output that the placement expects of a generation that does not say"""
    compare_all_nodes: int = Field(_RUNTIME.compare_all_nodes, ge=0, le=1_000_000)
    """Nodes of a model up to which a placement compares all of them; of more, it compares some"""
    queue_limit_per_node: int = Field(_RUNTIME.queue_limit_per_node, ge=0, le=100_000)
    """Generations that may wait at the head for one node"""
    lanes_per_node: int = Field(_RUNTIME.lanes_per_node, ge=0, le=4096)
    """Generations dispatched to a node at once; 0 = as many as the node says it has"""
    max_lanes_per_node: int = Field(_RUNTIME.max_lanes_per_node, ge=1, le=4096)
    """Most lanes a node is believed to have"""
    default_lanes: int = Field(_RUNTIME.default_lanes, ge=1, le=4096)
    """Lanes of a node that does not say"""
    busy_backoff_s: float = Field(_RUNTIME.busy_backoff_s, gt=0, le=60)
    """How long a node that said BUSY without a time is passed over"""
    placement_wait_s: float = Field(_RUNTIME.placement_wait_s, gt=0, le=3600)
    """How long a running generation waits for any node before it ends with ERROR"""

    silence_s: float = Field(_RUNTIME.silence_s, gt=0, le=3600)
    """Silence of a node after which it gets no new work and its generations move"""
    report_stale_s: float = Field(_RUNTIME.report_stale_s, gt=0, le=3600)
    """Age from which a report's load figures no longer count"""
    relink_s: float = Field(_RUNTIME.relink_s, gt=0, le=60)
    """How long a lost link may take to come back before the node is down"""
    redial_min_s: float = Field(_RUNTIME.redial_min_s, gt=0, le=60)
    """First wait before a node that is down is dialed again"""
    redial_max_s: float = Field(_RUNTIME.redial_max_s, gt=0, le=600)
    """Longest wait before a node that is down is dialed again"""
    command_timeout_s: float = Field(_RUNTIME.command_timeout_s, gt=0, le=600)
    """How long a node may take to answer a command"""
    lease_s: float = Field(_RUNTIME.lease_s, gt=0, le=3600)
    """How long a node serves this head's sessions without hearing from it"""
    lease_renew_s: float = Field(_RUNTIME.lease_renew_s, gt=0, le=3600)
    """Age from which a lease is renewed; less than head.lease_s"""
    generation_stall_s: float = Field(_RUNTIME.generation_stall_s, gt=0, le=86_400)
    """Time without a token or a change after which a generation moves"""
    replays_at_once: int = Field(_RUNTIME.replays_at_once, ge=1, le=4096)
    """Generations whose prompt a node prefills again at once, after a failure elsewhere"""

    default_max_new_tokens: int = Field(_RUNTIME.default_max_new_tokens, ge=1, le=10_000_000)
    """Most tokens of a generation that does not say"""
    max_new_tokens_limit: int = Field(_RUNTIME.max_new_tokens_limit, ge=1, le=10_000_000)
    """Most tokens a generation may ask for"""
    default_wall_s: float = Field(_RUNTIME.default_wall_s, gt=0, le=604_800)
    """Most time of a generation that does not say"""
    max_wall_s: float = Field(_RUNTIME.max_wall_s, gt=0, le=604_800)
    """Most time a generation may ask for"""
    default_disconnect_grace_s: float = Field(_RUNTIME.default_disconnect_grace_s, ge=0, le=86_400)
    """How long the last reader may be gone before its generation is cancelled"""
    default_orphan_timeout_s: float = Field(_RUNTIME.default_orphan_timeout_s, gt=0, le=604_800)
    """How long a generation that goes on without readers may do so"""
    finished_kept_s: float = Field(_RUNTIME.finished_kept_s, ge=0, le=86_400)
    """How long a finished generation can still be read"""
    cancel_held_s: float = Field(_RUNTIME.cancel_held_s, ge=0, le=3600)
    """How long a cancel waits for a generation that was not asked for yet"""

    idle_unbind_s: float = Field(_RUNTIME.idle_unbind_s, gt=0, le=604_800)
    """Idle time after which a session gives up its place on its node"""
    session_expiry_s: float = Field(_RUNTIME.session_expiry_s, gt=0, le=31_536_000)
    """Idle time after which a session is gone"""
    request_id_kept_s: float = Field(_RUNTIME.request_id_kept_s, gt=0, le=31_536_000)
    """How long a request_id is remembered"""
    tick_s: float = Field(_RUNTIME.tick_s, gt=0, le=60)
    """Period of the background work"""
    rebalance_ratio: float = Field(_RUNTIME.rebalance_ratio, ge=0, le=1)
    """Waiting work moves when it would be done elsewhere in less than this part of the time; 0 = never"""

    max_nodes: int = Field(_RUNTIME.max_nodes, ge=1, le=1_000_000)
    """Most nodes"""
    max_sessions: int = Field(_RUNTIME.max_sessions, ge=1, le=100_000_000)
    """Most sessions"""
    max_generations: int = Field(_RUNTIME.max_generations, ge=1, le=10_000_000)
    """Most generations, running and kept"""
    max_readers_per_generation: int = Field(_RUNTIME.max_readers_per_generation, ge=1, le=100_000)
    """Most readers of one generation"""
    max_context_tokens: int = Field(_RUNTIME.max_context_tokens, ge=1, le=1_000_000_000)
    """Longest context of a session"""
    max_request_ids: int = Field(_RUNTIME.max_request_ids, ge=1, le=100_000_000)
    """Most request_ids remembered"""
    max_held_cancels: int = Field(_RUNTIME.max_held_cancels, ge=1, le=10_000_000)
    """Most cancels that wait for their generation"""
    max_watchers: int = Field(_RUNTIME.max_watchers, ge=1, le=10_000)
    """Most streams of WatchFleet and DrainNode at once"""
    watch_events_kept: int = Field(_RUNTIME.watch_events_kept, ge=0, le=1_000_000)
    """Most events kept for a WatchFleet stream until it is read; the oldest go first"""
    max_total_context_tokens: int = Field(_RUNTIME.max_total_context_tokens, ge=1, le=1_000_000_000_000)
    """Most tokens that the contexts of all sessions have together; 4 bytes each"""
    max_finished_tokens: int = Field(_RUNTIME.max_finished_tokens, ge=0, le=1_000_000_000_000)
    """Most tokens that all finished generations kept have together; the oldest go first"""

    @model_validator(mode="after")
    def _agree(self) -> Self:
        for low, high in (
            ("redial_min_s", "redial_max_s"),
            ("default_max_new_tokens", "max_new_tokens_limit"),
            ("default_wall_s", "max_wall_s"),
        ):
            if getattr(self, low) > getattr(self, high):
                raise ValueError(f"head.{low} must be at most head.{high}")
        if self.lease_renew_s >= self.lease_s:
            raise ValueError("head.lease_renew_s must be less than head.lease_s")
        return self

    def runtime_settings(self) -> HeadSettings:
        """The same numbers as the runtime takes them."""
        return HeadSettings(
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(HeadSettings)}
        )


class LinksConfig(_Section):
    """Connections from the head to its nodes."""

    connect_timeout_s: float = Field(5.0, gt=0, le=600)
    """How long connecting to a node may take"""
    handshake_timeout_s: float = Field(10.0, gt=0, le=600)
    """How long a node may take to answer the handshake"""
    report_period_s: float = Field(2.0, gt=0, le=600)
    """Longest time between two reports asked of a node; less than head.silence_s"""
    keepalive_time_s: float = Field(15.0, ge=1, le=3600)
    """Quiet time after which a connection is pinged"""
    keepalive_timeout_s: float = Field(5.0, gt=0, le=600)
    """How long a keepalive ping may go unanswered"""
    ping_timeout_s: float = Field(5.0, gt=0, le=600)
    """How long any HTTP/2 ping may go unanswered"""
    max_message_bytes: int = Field(16 * 1024 * 1024, ge=64 * 1024, le=256 * 1024 * 1024)
    """Largest message to or from a node"""
    multiplexed: bool = True
    """Nodes that can are served over one stream; false: every node by plain RPCs"""
    dns_refresh_s: float = Field(_DISCOVERY.dns_refresh_s, ge=0.1, le=3600)
    """How often the addresses of a name in nodes are looked up anew, give or take a fifth"""
    dns_timeout_s: float = Field(_DISCOVERY.dns_timeout_s, gt=0, le=600)
    """How long looking up a name may take"""
    max_dns_names: int = Field(_DISCOVERY.max_dns_names, ge=0, le=10_000)
    """Most names whose addresses are nodes"""
    max_addresses_per_name: int = Field(_DISCOVERY.max_addresses_per_name, ge=1, le=100_000)
    """Most addresses of a name that become nodes"""

    def discovery_settings(self) -> DiscoverySettings:
        """The numbers of looking names up, as the runtime takes them."""
        return DiscoverySettings(
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(DiscoverySettings)}
        )


def _check_whole(section: BaseModel, *needed: str, given: tuple[str, ...]) -> None:
    """Raises ValueError when some of what is needed is missing, though some is given."""
    there = [name for name in given if getattr(section, name)]
    missing = [name for name in needed if name not in there]
    if there and missing:
        raise ValueError(f"{' and '.join(there)} given without {' and '.join(missing)}: TLS needs both")


class ServerTlsConfig(_Section):
    """TLS of a listener; its files are read again whenever they change."""

    cert_file: str = ""
    """Certificate (PEM, with its chain) of the listener; empty = no TLS"""
    key_file: str = ""
    """Its key (PEM)"""
    client_ca_file: str = ""
    """Certificates (PEM) that must have signed those of clients; empty = clients need none"""

    def files(self) -> ServerTls | None:
        """The files, unread; None = no TLS."""
        if not self.cert_file:
            return None
        ca = Path(self.client_ca_file) if self.client_ca_file else None
        return ServerTls(Path(self.cert_file), Path(self.key_file), ca)

    @model_validator(mode="after")
    def _whole(self) -> Self:
        _check_whole(self, "cert_file", "key_file", given=("cert_file", "key_file", "client_ca_file"))
        return self


class NodeTlsConfig(_Section):
    """TLS of the connections to nodes; the files are read at each dial."""

    enabled: bool = False
    """Dial nodes with TLS"""
    ca_file: str = ""
    """Certificates (PEM) that must have signed those of nodes; empty = the usual public ones"""
    cert_file: str = ""
    """Certificate (PEM) of the head, for nodes that ask for one; empty = none"""
    key_file: str = ""
    """Its key (PEM)"""
    server_name: str = ""
    """Name in the certificates of nodes, where it is not the one dialed"""

    def files(self) -> ClientTls | None:
        """The files, unread; None = no TLS."""
        if not self.enabled:
            return None
        ca, cert, key = (
            Path(name) if name else None for name in (self.ca_file, self.cert_file, self.key_file)
        )
        return ClientTls(ca, cert, key, self.server_name)

    @model_validator(mode="after")
    def _whole(self) -> Self:
        _check_whole(self, "cert_file", "key_file", given=("cert_file", "key_file"))
        others = [name for name in ("ca_file", "cert_file", "server_name") if getattr(self, name)]
        if others and not self.enabled:
            raise ValueError(f"node_tls.enabled must be true for node_tls.{others[0]} to count")
        return self


class StoreConfig(_Section):
    """What outlives the head."""

    durability: Literal["strict", "relaxed", "memory"] = "strict"
    """strict: nothing is told before it is on disk; relaxed: told at once, on disk within 50 ms; memory:
    nothing outlives the head"""
    folder: str = ""
    """Folder of the head's own for what is kept on disk; empty = one by its head_id among those of the user
    (docs/durability.md says where)"""


class TelemetryConfig(_Section):
    """Traces by OTLP/gRPC."""

    otlp_endpoint: str = Field("", pattern=r"^(https?://)?[A-Za-z0-9._\[\]:-]+:[0-9]{1,5}/?$|^$")
    """Where spans go, http://host:port (4317 by custom); empty = no traces"""
    sampling_ratio: float = Field(1.0, ge=0, le=1)
    """Part of the traces that are kept, where the caller has not decided"""


class LogConfig(_Section):
    """The log, on standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severity that is logged"""
    format: Literal["json", "console"] = "console"
    """One JSON object per line, or lines for people"""


class FleetConfig(_Section):
    """All settings of a head."""

    nodes: NodeAddresses = ()
    """Nodes to connect to at the start, each as host:port, or as dns:///name:port for all the addresses of a
    name (the port is 8454 where it is left out)"""
    shutdown_grace_s: float = Field(30.0, ge=0, le=86_400)
    """How long running generations may go on after the head was told to stop"""
    token_file: str = ""
    """File of the fleet token, as `fleet token` makes it, which nodes must know; empty = none"""
    access_file: str = ""
    """File of those who may call, as `fleet access` makes it; empty = everybody who can connect"""
    insecure_no_auth: bool = False
    """Listen beyond this machine though nobody is asked who he is"""
    listen: ListenConfig = ListenConfig()
    """Where the head listens"""
    head: HeadConfig = HeadConfig()
    """How the head places, watches and limits"""
    links: LinksConfig = LinksConfig()
    """Connections to nodes"""
    store: StoreConfig = StoreConfig()
    """What outlives the head"""
    node_tls: NodeTlsConfig = NodeTlsConfig()
    """TLS of the connections to nodes"""
    join_tls: ServerTlsConfig = ServerTlsConfig()
    """TLS of the listener for nodes that dial in"""
    callers_tls: ServerTlsConfig = ServerTlsConfig()
    """TLS of the callers' listener"""
    admin_tls: ServerTlsConfig = ServerTlsConfig()
    """TLS of the operators' listener"""
    telemetry: TelemetryConfig = TelemetryConfig()
    """Traces"""
    log: LogConfig = LogConfig()
    """The log"""

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.links.report_period_s >= self.head.silence_s:
            raise ValueError("links.report_period_s must be less than head.silence_s")
        if lines := exposed(self):
            raise PydanticCustomError("exposed", "{lines}", {"lines": "\n".join(lines)})
        if len(self.nodes) > self.head.max_nodes:
            raise ValueError("nodes must not be more than head.max_nodes")
        if sum(map(is_name, self.nodes)) > self.links.max_dns_names:
            raise ValueError("nodes must not have more names than links.max_dns_names")
        return self
