"""How links are made and watched: their numbers, and the channel arguments that follow from them."""

from __future__ import annotations

from dataclasses import dataclass

import grpc

from fleet_service.links import convert
from fleet_service.tls import ClientTls
from fleet_service.token import FleetToken

# How far a node may run ahead of the head in one stream.
_LOOKAHEAD_BYTES = 32 * 1024
_RECONNECT_BACKOFF_MS = 100


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """How links are made and watched. `handshake_timeout_s` counts from the dial on, connecting included.

    `multiplexed`: nodes that announce LINK are served over one stream. `token`: what head and node prove
    to each other to know; None = nothing. `tls`: for nodes that are dialed; None = without.
    """

    connect_timeout_s: float = 5.0
    handshake_timeout_s: float = 10.0
    report_period_s: float = 2.0
    command_timeout_s: float = 5.0
    keepalive_time_s: float = 15.0
    keepalive_timeout_s: float = 5.0
    ping_timeout_s: float = 5.0
    max_message_bytes: int = convert.DEFAULT_MESSAGE_BYTES
    multiplexed: bool = True
    token: FleetToken | None = None
    tls: ClientTls | None = None

    def channel(self, address: str) -> grpc.aio.Channel:
        """A channel to a node, with the certificates of now. Raises TlsError."""
        if self.tls is None:
            return grpc.aio.insecure_channel(address, options=self.channel_options())
        options = [*self.channel_options(), *self.tls.channel_options()]
        return grpc.aio.secure_channel(address, self.tls.credentials(), options=options)

    def channel_options(self) -> list[tuple[str, int]]:
        """Arguments of a channel to a node."""
        ms = convert.milliseconds
        return [
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_retries", 0),
            ("grpc.enable_http_proxy", 0),
            ("grpc.service_config_disable_resolution", 1),
            ("grpc.http2.bdp_probe", 0),
            ("grpc.http2.lookahead_bytes", _LOOKAHEAD_BYTES),
            ("grpc.keepalive_time_ms", ms(self.keepalive_time_s)),
            ("grpc.keepalive_timeout_ms", ms(self.keepalive_timeout_s)),
            ("grpc.http2.ping_timeout_ms", ms(self.ping_timeout_s)),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            # gRPC gives each attempt to connect this long, so here it is the connect timeout.
            ("grpc.min_reconnect_backoff_ms", ms(self.connect_timeout_s)),
            ("grpc.dns_ares_query_timeout", ms(self.connect_timeout_s)),
            ("grpc.initial_reconnect_backoff_ms", _RECONNECT_BACKOFF_MS),
            ("grpc.max_reconnect_backoff_ms", _RECONNECT_BACKOFF_MS),
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.max_send_message_length", self.max_message_bytes),
        ]
