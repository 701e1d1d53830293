"""Bugs to plant in how the head keeps its nodes: links that come back, identities, terms, silence.

As in planted.py, each replaces a method of the runtime or the domain while it is open.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from fleet_service.domain.commands import HeldSession, Run
from fleet_service.domain.failures import Failure
from fleet_service.domain.node_types import NodeHello, Report
from fleet_service.runtime import silence, tender
from fleet_service.runtime.admission import CHALLENGE_S, Admission
from fleet_service.runtime.attempt import Attempt
from fleet_service.runtime.fleet import Fleet
from fleet_service.runtime.join_desk import JoinDesk
from fleet_service.runtime.node import Node
from fleet_service.runtime.protocols import LinkError, LinkListener, NodeLink
from fleet_service.runtime.sessions import Sessions
from fleet_service.runtime.tender import Tender
from tests.sim.planting import replaced


@contextmanager
def _rest_is_off_by(indexes: int) -> Iterator[None]:
    right = Attempt._rest_of

    def wrong(self: Attempt, command: Run) -> Run:
        rest = right(self, command)
        return replace(rest, first_index=max(0, rest.first_index + indexes))

    with replaced(Attempt, "_rest_of", wrong):
        yield


@contextmanager
def a_run_is_taken_up_one_index_too_late() -> Iterator[None]:
    """Rule 1: after a blip the node is asked for what follows the next token."""
    with _rest_is_off_by(1):
        yield


@contextmanager
def a_run_is_taken_up_one_index_too_early() -> Iterator[None]:
    """Rule 1: after a blip the node is asked for the last token once more."""
    with _rest_is_off_by(-1):
        yield


@contextmanager
def a_run_that_could_go_on_is_given_up() -> Iterator[None]:
    """Failures: a link that blips costs a prefill, though its node has kept the run."""

    async def wrong(_: Attempt) -> None:
        return

    with replaced(Attempt, "_link_again", wrong):
        yield


@contextmanager
def a_session_leaves_its_node_with_every_answer() -> Iterator[None]:
    """Failures: what is to be done after a loss is done at every end, and each turn costs a prefill."""
    right = Attempt.run

    async def wrong(self: Attempt, dispatched: Callable[[Attempt], None]) -> Failure:
        try:
            return await right(self, dispatched)
        finally:
            self.generation.session.unbind()

    with replaced(Attempt, "run", wrong):
        yield


@contextmanager
def what_a_node_holds_for_nobody_is_not_revoked() -> Iterator[None]:
    """Rule 10: a head that starts anew leaves the sessions of the one before it where they are."""

    def wrong(_: Sessions, __: Node, ___: Sequence[HeldSession]) -> list[HeldSession]:
        return []

    with replaced(Sessions, "orphans", wrong):
        yield


@contextmanager
def what_a_node_holds_is_revoked_though_it_is_bound_there() -> Iterator[None]:
    """Links: on a connect, every session that the node holds is taken for an orphan."""

    def wrong(_: Sessions, __: Node, held: Sequence[HeldSession]) -> list[HeldSession]:
        return list(held)

    with replaced(Sessions, "orphans", wrong):
        yield


@contextmanager
def a_clone_of_a_living_node_is_taken_in() -> Iterator[None]:
    """Failures: nobody asks whether the node that has the identity lives."""

    async def wrong(_: Admission, __: Node | None, ___: NodeHello) -> None:
        return

    with replaced(Admission, "_contest", wrong):
        yield


@contextmanager
def a_run_that_was_replaced_may_come_back() -> Iterator[None]:
    """Failures: the incarnation that a newcomer has replaced is barred, and that is forgotten."""
    right = Admission._bar

    def wrong(self: Admission, holder: Node) -> None:
        right(self, holder)
        self._barred.clear()

    with replaced(Admission, "_bar", wrong):
        yield


@contextmanager
def a_challenge_is_lost_while_the_head_stands_still() -> Iterator[None]:
    """Rule 13: an answer that the head had no time to read was none."""

    async def wrong(_: Admission, link: NodeLink) -> bool:
        try:
            async with asyncio.timeout(CHALLENGE_S):
                await link.ping()
        except (LinkError, TimeoutError):
            return False
        return True

    with replaced(Admission, "_lives", wrong):
        yield


class _ToNewest:
    """A LinkListener that tells whichever was the last to listen at its address of the link's end."""

    def __init__(self, newest: dict[str, LinkListener], address: str) -> None:
        self._newest = newest
        self._address = address
        self._own = newest[address]

    def on_sign(self) -> None:
        self._own.on_sign()

    def on_report(self, report: Report, models: Any) -> None:
        self._own.on_report(report, models)

    def on_leaving(self) -> None:
        self._own.on_leaving()

    def on_lost(self, error: LinkError) -> None:
        self._newest[self._address].on_lost(error)


@contextmanager
def a_late_goodbye_takes_the_new_link_down() -> Iterator[None]:
    """Links: the end of a link that was replaced is taken for the end of the one that replaced it."""
    right, newest = JoinDesk.connect, {}

    async def wrong(self: JoinDesk, address: str, introduction: Any, listener: LinkListener) -> NodeLink:
        newest[address] = listener
        return await right(self, address, introduction, _ToNewest(newest, address))

    with replaced(JoinDesk, "connect", wrong):
        yield


@contextmanager
def an_identity_is_kept_twice_at_one_address() -> Iterator[None]:
    """Words: a node that dials in again, having been dialed in between, is made known a second time."""
    right = Fleet.at

    def wrong(self: Fleet, address: str) -> Node | None:
        return None if address.startswith("joined:") else right(self, address)

    with replaced(Fleet, "at", wrong):
        yield


@contextmanager
def a_new_head_s_term_is_not_above_the_old_one() -> Iterator[None]:
    """Fencing: what the nodes say of the epochs they have seen is not listened to."""

    def wrong(_: Admission, __: int) -> None:
        return

    right = Admission.__init__

    def deaf(self: Admission, *arguments: Any, **named: Any) -> None:
        right(self, *arguments, **named)
        self._raise_term = lambda _epoch: None

    with replaced(Admission, "__init__", deaf), replaced(Fleet, "raise_term_above", wrong):
        yield


@contextmanager
def the_silence_of_many_is_believed() -> Iterator[None]:
    """Rule 13: when many nodes fall silent together, all that runs there moves at once."""
    with replaced(silence, "in_doubt", lambda *_: False):
        yield


@contextmanager
def the_head_s_own_stall_is_held_against_the_nodes() -> Iterator[None]:
    """Rule 13: what was not heard, or not read yet, while the head did not run counts as silence."""

    def wrong(_: Tender, __: float) -> None:
        return

    with replaced(Tender, "_excuse", wrong), replaced(tender, "LET_IN_S", 0.0):
        yield


PLANTED_IN_FLEET = (
    a_run_is_taken_up_one_index_too_late,
    a_run_is_taken_up_one_index_too_early,
    a_run_that_could_go_on_is_given_up,
    a_session_leaves_its_node_with_every_answer,
    what_a_node_holds_for_nobody_is_not_revoked,
    what_a_node_holds_is_revoked_though_it_is_bound_there,
    a_clone_of_a_living_node_is_taken_in,
    a_run_that_was_replaced_may_come_back,
    a_challenge_is_lost_while_the_head_stands_still,
    a_late_goodbye_takes_the_new_link_down,
    an_identity_is_kept_twice_at_one_address,
    a_new_head_s_term_is_not_above_the_old_one,
    the_silence_of_many_is_believed,
    the_head_s_own_stall_is_held_against_the_nodes,
)
