"""What an operator reads off the metrics, compared with what was done to a real head with real nodes."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from fleet.v1 import admin_service_pb2 as admin_pb
from fleet.v1 import fleet_service_pb2 as pb
from fleet.v1 import types_pb2
from fleet_service.domain.failures import FailureClass
from tests.e2e.callers import (
    Reading,
    complete,
    cordon,
    generate,
    open_session,
    open_session_on,
    read_all,
    uncordon,
)
from tests.e2e.harness import PATIENCE_S, HeadServer, NodeProcess, World, prompt, until
from tests.e2e.local_nodes import local_nodes
from tests.e2e.refused import refusal_of
from tests.telemetry.scraping import Scrape, Scraper, new_metrics, scraper_of

SERVICE = "fleet.v1.FleetService"
N = 40
"""Tokens of an answer here."""

EVER = 4000
"""Tokens that take until somebody ends the generation."""


@dataclass
class Watched:
    """A head and its metrics."""

    server: HeadServer
    scraper: Scraper

    async def scrape(self) -> Scrape:
        """A scrape once the head has nothing in hand: a caller has its answer before the call has ended."""

        async def quiet() -> Scrape:
            while True:
                scrape = await self.scraper.scrape()
                calls = scrape.of("fleet_rpcs_in_flight")
                connections = scrape.of("fleet_rpcs_in_flight", method=f"{SERVICE}/Connect")
                if calls == connections and not scrape["fleet_generations_running"]:
                    return scrape

        return await asyncio.wait_for(quiet(), PATIENCE_S)

    async def until(self, condition: Callable[[Scrape], bool], what: str) -> Scrape:
        give_up = time.monotonic() + PATIENCE_S
        while True:
            scrape = await self.scraper.scrape()
            if condition(scrape):
                return scrape
            assert time.monotonic() < give_up, f"no scrape showed: {what}"


@asynccontextmanager
async def watched(world: World, *nodes: NodeProcess, **settings: object) -> AsyncIterator[Watched]:
    metrics = new_metrics()
    server = await world.head(
        *nodes,
        observer=metrics.fleet_observer,
        rpc_observer=metrics.rpc_observer,
        **settings,  # type: ignore[arg-type]
    )
    async with scraper_of(metrics, server.head) as scraper:
        yield Watched(server, scraper)


def calls(scrape: Scrape) -> dict[tuple[str, str], float]:
    """How many calls ended, by the method's name and the code."""
    counted = scrape.samples("fleet_rpc_duration_seconds_count")
    return {(method.rpartition("/")[2], code): count for (code, method), count in counted.items()}


def not_zero(samples: dict[tuple[str, ...], float]) -> dict[str, float]:
    return {value: count for (value,), count in samples.items() if count}


def true_states(server: HeadServer) -> dict[str, int]:
    """Every session looked at, as the metrics must not."""
    views, token = server.head.list_sessions(1000, "", None, "")
    assert not token
    return dict(Counter(view.state.value for view in views))


def told_states(scrape: Scrape) -> dict[str, float]:
    return not_zero(scrape.samples("fleet_sessions"))


async def test_what_was_asked_is_counted_exactly(world: World) -> None:
    nodes = await world.start_nodes(2)
    async with watched(world, *nodes) as head:
        server = head.server
        for salt in range(3):
            await read_all(complete(server, prompt(20, salt), N))

        session = await open_session(server, prompt(10, 7))
        cancelled = Reading(generate(server, session, EVER, "to-cancel"))
        await cancelled.until_tokens(3)
        await server.fleet.CancelGeneration(pb.CancelGenerationRequest(generation_id="to-cancel"))
        assert (await cancelled.end()).reason == "CANCELLED"

        assert (await refusal_of(complete(server, [1], 4, model="nowhere"))).reason == "MODEL_NOT_FOUND"
        with pytest.raises(grpc.aio.AioRpcError):
            await server.fleet.GetSession(pb.GetSessionRequest(session_id="nobody"))
        invented: Any = server.channels[0].unary_unary(f"/{SERVICE}/Invented")
        with pytest.raises(grpc.aio.AioRpcError):
            await invented(b"")

        scrape = await head.scrape()
        tokens = 3 * N + len(cancelled.answer.tokens)
        assert calls(scrape) == {
            ("Complete", "OK"): 3,
            ("Complete", "NOT_FOUND"): 1,
            ("CreateSession", "OK"): 1,
            ("Generate", "OK"): 1,
            ("CancelGeneration", "OK"): 1,
            ("GetSession", "NOT_FOUND"): 1,
            ("unknown", "UNIMPLEMENTED"): 1,
        }
        assert not_zero(scrape.samples("fleet_placements_total", policy="load-aware")) == {
            "PLACED": 4,
            "MODEL_NOT_FOUND": 1,
        }
        assert not_zero(scrape.samples("fleet_generations_total")) == {"LENGTH": 3, "CANCELLED": 1}
        assert scrape["fleet_attempts_total"] == 4
        assert not_zero(scrape.samples("fleet_attempt_failures_total")) == {}
        assert scrape["fleet_output_tokens_total"] == tokens
        assert scrape["fleet_time_to_first_token_seconds_count"] == 4
        assert scrape["fleet_generation_mean_inter_token_gap_seconds_count"] == 4
        assert scrape["fleet_generation_longest_inter_token_gap_seconds_count"] == 4
        assert scrape["fleet_generation_duration_seconds_count"] == 4
        assert not_zero(scrape.samples("fleet_queue_wait_seconds_count")) == {"INTERACTIVE": 4}
        assert scrape["fleet_generations_kept"] == 4
        assert scrape["fleet_session_context_tokens"] == 10
        assert told_states(scrape) == true_states(server) == {"bound": 1}
        assert scrape["fleet_books_balance"] == 1
        assert scrape["fleet_head_ready"] == 1
        assert scrape["fleet_head_draining"] == 0


async def test_times_are_of_the_generation_that_took_them(world: World) -> None:
    (node,) = await local_nodes(world, 1, decode_rate=200.0)
    async with watched(world, node) as head:
        answer = await read_all(complete(head.server, prompt(20), N))
        scrape = await head.scrape()
        timings = answer.finished.timings
        assert scrape["fleet_generation_duration_seconds_sum"] == pytest.approx(
            timings.total_ms / 1000, abs=0.002
        )
        assert scrape["fleet_time_to_first_token_seconds_sum"] == pytest.approx(
            timings.first_token_ms / 1000, abs=0.02
        )
        gap_s = scrape["fleet_generation_mean_inter_token_gap_seconds_sum"]
        assert 0 < gap_s * (N - 1) <= (timings.total_ms - timings.first_token_ms) / 1000 + 0.002
        assert scrape["fleet_generation_longest_inter_token_gap_seconds_sum"] >= gap_s


async def test_a_failover_is_an_attempt_a_failure_and_a_gap(world: World) -> None:
    one, two = await world.start_nodes(2)
    async with watched(world, one, two) as head:
        server = head.server
        session = await open_session_on(server, one, prompt(20))
        reading = Reading(generate(server, session, N))
        await reading.until_tokens(5)
        await one.kill()
        answer = await reading.end()
        assert (answer.reason, len(answer.moves)) == ("LENGTH", 1)
        scrape = await head.scrape()
        assert scrape["fleet_attempts_total"] == 2
        assert not_zero(scrape.samples("fleet_attempt_failures_total")) == {"link_lost": 1}
        assert not_zero(scrape.samples("fleet_failover_gap_seconds_count")) == {"LINK_LOST": 1}
        gap_s = scrape.of("fleet_failover_gap_seconds_sum", cause="LINK_LOST")
        assert gap_s == pytest.approx(answer.moves[0].gap_ms / 1000, abs=0.002)
        assert not_zero(scrape.samples("fleet_placements_total", policy="load-aware")) == {"PLACED": 2}
        assert not_zero(scrape.samples("fleet_generations_total")) == {"LENGTH": 1}
        assert scrape["fleet_output_tokens_total"] == N
        assert scrape.of("fleet_node_failures_total", node=one.identity, failure="link_lost") == 1
        down = await head.until(lambda scrape: scrape.of("fleet_nodes", state="down") == 1, "node-1 is down")
        assert down.samples("fleet_node_state", node=one.identity) == {
            ("connecting",): 0,
            ("down",): 1,
            ("suspect",): 0,
            ("up",): 0,
        }
        assert down.of("fleet_node_state", node=two.identity, state="up") == 1


async def test_a_generation_that_no_node_can_go_on_with_is_refused_once(world: World) -> None:
    (node,) = await world.start_nodes(1)
    async with watched(world, node, placement_wait_s=1.0) as head:
        session = await open_session(head.server, prompt(20))
        reading = Reading(generate(head.server, session, EVER))
        await reading.until_tokens(2)
        await node.kill()
        assert (await reading.end()).reason == "ERROR"
        scrape = await head.scrape()
        # It was looked for four times a second; the caller was refused once.
        assert not_zero(scrape.samples("fleet_placements_total", policy="load-aware")) == {
            "PLACED": 1,
            "NO_ELIGIBLE_NODE": 1,
        }
        assert not_zero(scrape.samples("fleet_generations_total")) == {"ERROR": 1}
        assert not_zero(scrape.samples("fleet_generation_errors_total")) == {"NO_ELIGIBLE_NODE": 1}
        assert scrape["fleet_head_ready"] == 0


async def test_sessions_are_told_by_state_whatever_becomes_of_their_nodes(world: World) -> None:
    one, two = await local_nodes(world, 2, decode_rate=50.0)
    async with watched(world, one, two) as head:
        server = head.server

        async def agree() -> dict[str, int]:
            """No await between the two: one moment is compared."""
            gauges = await server.head.gauges()
            true = true_states(server)
            assert {state.value: count for state, count in gauges.sessions.items() if count} == true
            return true

        sessions = [await open_session_on(server, node, prompt(5)) for node in (one, one, one, two)]
        assert await agree() == {"bound": 4}
        await server.fleet.ParkSession(pb.ParkSessionRequest(session_id=sessions[0]))
        await server.fleet.ParkSession(pb.ParkSessionRequest(session_id=sessions[0]))
        assert await agree() == {"bound": 3, "parked": 1}
        running = Reading(generate(server, sessions[1], EVER))
        await running.until_tokens(1)
        assert await agree() == {"bound": 2, "parked": 1, "generating": 1}
        await one.kill()
        known = server.head.fleet.find(one.identity)
        assert known is not None
        await until(lambda: not known.usable, "the head knows that the node is gone")
        assert await agree() == {"bound": 1, "unbound": 1, "parked": 1, "generating": 1}
        await running.until(lambda answer: bool(answer.moves))
        assert await agree() == {"bound": 1, "unbound": 1, "parked": 1, "generating": 1}
        await server.fleet.ResumeSession(pb.ResumeSessionRequest(session_id=sessions[0]))
        assert await agree() == {"bound": 2, "unbound": 1, "generating": 1}
        await one.start()
        await until(lambda: known.usable, "the node is back")
        assert await agree() == {"bound": 2, "unbound": 1, "generating": 1}
        await running.leave()
        scrape = await head.scrape()
        assert told_states(scrape) == await agree() == {"bound": 3, "unbound": 1}
        for session in sessions:
            await server.fleet.FinishSession(pb.FinishSessionRequest(session_id=session))
        assert await agree() == {}


async def test_a_queue_s_length_and_waits_are_told(world: World) -> None:
    (node,) = await local_nodes(world, 1, lanes=1, decode_rate=100.0)
    async with watched(world, node) as head:
        server = head.server
        first = Reading(complete(server, prompt(5), EVER))
        await first.until_tokens(1)
        waiting = [
            Reading(complete(server, prompt(5, salt), 2, qos_class=types_pb2.QOS_CLASS_BACKGROUND))
            for salt in (1, 2)
        ]
        full = await head.until(
            lambda scrape: scrape.of("fleet_node_queue_length", node=node.identity) == 2, "two wait"
        )
        here = {"node": node.identity}
        assert full.of("fleet_node_attempts_running", **here) == full.of("fleet_node_lanes", **here) == 1
        assert full.of("fleet_node_reservations", **here) == full["fleet_generations_running"] == 3
        assert full.of("fleet_rpcs_in_flight", method=f"{SERVICE}/Complete") == 3
        assert full["fleet_books_balance"] == 1
        assert not_zero(full.samples("fleet_queue_wait_seconds_count")) == {"INTERACTIVE": 1}
        await first.leave()
        for reading in waiting:
            assert (await reading.end()).reason == "LENGTH"
        scrape = await head.scrape()
        assert not_zero(scrape.samples("fleet_queue_wait_seconds_count")) == {
            "INTERACTIVE": 1,
            "BACKGROUND": 2,
        }
        assert scrape.of("fleet_queue_wait_seconds_sum", qos="BACKGROUND") > 0
        assert calls(scrape) == {("Complete", "CANCELLED"): 1, ("Complete", "OK"): 2}
        assert scrape.of("fleet_node_queue_length", **here) == 0


async def test_what_moved_out_of_a_queue_was_no_attempt(world: World) -> None:
    one, two = await local_nodes(world, 2, lanes=1, decode_rate=100.0)
    async with watched(world, one, two, rebalance_ratio=0.0) as head:
        server = head.server
        await cordon(server, two)
        plug = Reading(complete(server, prompt(5), EVER))
        await plug.until_tokens(1)
        waiting = Reading(complete(server, prompt(5, 1), 3))
        await head.until(lambda scrape: scrape.of("fleet_node_queue_length", node=one.identity) == 1, "waits")
        await uncordon(server, two)
        await one.kill()
        assert (await waiting.end()).reason == "LENGTH"
        await plug.leave()
        scrape = await head.scrape()
        assert scrape.of("fleet_attempt_failures_total", failure=FailureClass.EVICTED.value) == 1
        assert scrape.of("fleet_failover_gap_seconds_count") <= 1, "only what ran can have a gap"


async def test_a_node_that_is_removed_leaves_no_series(world: World) -> None:
    one, two = await local_nodes(world, 2)
    async with watched(world, one, two) as head:
        before = await head.scrape()
        assert before.label_values("node") == {one.identity, two.identity}
        assert before.of("fleet_node_kv_blocks", node=one.identity) > 0
        assert before.of("fleet_nodes") == 2
        await head.server.admin.CordonNode(admin_pb.CordonNodeRequest(node=two.identity))
        assert (await head.scrape()).of("fleet_node_cordoned", node=two.identity) == 1
        await head.server.admin.RemoveNode(admin_pb.RemoveNodeRequest(node=one.identity))
        after = await head.scrape()
        assert after.label_values("node") == {two.identity}
        assert after.of("fleet_nodes") == 1


async def test_books_that_do_not_balance_are_told_at_once_and_remembered(world: World) -> None:
    (node,) = await local_nodes(world, 1)
    async with watched(world, node) as head:
        assert (await head.scrape())["fleet_books_imbalances_total"] == 0
        known = head.server.head.fleet.find(node.identity)
        assert known is not None
        known.reservations += 1
        assert (await head.scrape())["fleet_books_balance"] == 0
        wrong = await head.until(lambda scrape: scrape["fleet_books_imbalances_total"] > 0, "a tick saw it")
        assert wrong["fleet_books_balance"] == 0
        known.reservations -= 1
        right = await head.scrape()
        assert right["fleet_books_balance"] == 1
        assert right["fleet_books_imbalances_total"] >= wrong["fleet_books_imbalances_total"]


async def test_a_standstill_of_the_head_shows_as_lag(world: World) -> None:
    (node,) = await local_nodes(world, 1)
    async with watched(world, node) as head:
        before = await head.until(lambda scrape: scrape["fleet_event_loop_lag_seconds_count"] > 1, "measured")
        time.sleep(0.4)
        seen = before["fleet_event_loop_lag_seconds_count"]
        after = await head.until(
            lambda scrape: scrape["fleet_event_loop_lag_seconds_count"] > seen + 1, "measured again"
        )
        late = {
            edge: after.of("fleet_event_loop_lag_seconds_bucket", le=edge)
            - before.of("fleet_event_loop_lag_seconds_bucket", le=edge)
            for edge in ("0.25", "+Inf")
        }
        assert late["+Inf"] - late["0.25"] >= 1
