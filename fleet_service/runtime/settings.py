"""Every number the runtime works by, with its name (design: Numbers). Seconds, tokens and counts; immutable.

fleet_service.config reads them from file, environment and flags; tests and the simulation make their own.
"""

from __future__ import annotations

from dataclasses import dataclass

from fleet_service.domain.placement import EXACT_LIMIT


@dataclass(frozen=True, slots=True)
class HeadSettings:
    """Settings of one head."""

    fleet_id: str = "default"
    head_id: str = "head-1"

    # Placement
    policy: str = "load-aware"
    pool_high_pct: int = 90
    expected_output_tokens: int = 256
    compare_all_nodes: int = EXACT_LIMIT  # of one model; of more, some are compared
    queue_limit_per_node: int = 256
    lanes_per_node: int = 0  # 0 = the node's own
    max_lanes_per_node: int = 64
    default_lanes: int = 8
    busy_backoff_s: float = 0.25
    placement_wait_s: float = (
        30.0  # how long a running generation waits for any node before it ends with ERROR
    )

    # Nodes
    silence_s: float = 6.0
    report_stale_s: float = 10.0
    relink_s: float = 0.3
    redial_min_s: float = 0.1
    redial_max_s: float = 1.0
    command_timeout_s: float = 5.0
    lease_s: float = 60.0
    lease_renew_s: float = 40.0
    generation_stall_s: float = 60.0
    replays_at_once: int = 4  # re-prefills after a failure, per node

    # Generations
    default_max_new_tokens: int = 2048
    max_new_tokens_limit: int = 131_072
    default_wall_s: float = 600.0
    max_wall_s: float = 86_400.0
    default_disconnect_grace_s: float = 0.0
    default_orphan_timeout_s: float = 600.0
    finished_kept_s: float = 600.0
    cancel_held_s: float = 60.0

    # Sessions and housekeeping
    idle_unbind_s: float = 600.0
    session_expiry_s: float = 86_400.0
    request_id_kept_s: float = 86_400.0
    tick_s: float = 1.0
    rebalance_ratio: float = 0.5

    # Limits
    max_nodes: int = 4096
    max_sessions: int = 1_000_000
    max_generations: int = 100_000
    max_readers_per_generation: int = 64
    max_context_tokens: int = 4_000_000
    max_request_ids: int = 1_000_000
    max_held_cancels: int = 10_000
    max_watchers: int = 64
    watch_events_kept: int = 1_000  # for each watcher, until it reads them
    max_total_context_tokens: int = 500_000_000  # of all sessions together; 4 bytes each
    max_finished_tokens: int = 50_000_000  # of all finished generations kept


@dataclass(frozen=True, slots=True)
class DiscoverySettings:
    """How the addresses of names are looked up."""

    dns_refresh_s: float = 10.0
    dns_timeout_s: float = 5.0
    max_dns_names: int = 64
    max_addresses_per_name: int = 1024
