"""A place on another node, kept for a generation that goes on where it is until the place is taken."""

from __future__ import annotations

from collections.abc import Callable

from fleet_service.runtime.generation import Generation
from fleet_service.runtime.node import Node
from fleet_service.runtime.reservation import Grant, Reservation
from fleet_service.runtime.session import Binding


class Place:
    """A reservation and a binding, counted on their node from the choice on: to be taken, or given back.

    `ready`: it may be taken while the generation is well where it is. `seen_alive`: the node has just
    answered. `on_taken` is told when the generation comes.
    """

    __slots__ = ("_binding", "_generation", "_gone", "_on_taken", "ready", "reservation", "seen_alive")

    def __init__(
        self,
        generation: Generation,
        reservation: Reservation,
        binding: Binding,
        on_taken: Callable[[], None],
    ) -> None:
        self.reservation = reservation
        reservation.kept = True
        self.ready = False
        self.seen_alive = False
        self._generation = generation
        self._binding = binding
        self._on_taken = on_taken
        self._gone = False

    @property
    def node(self) -> Node:
        return self.reservation.node

    @property
    def good(self) -> bool:
        """It can be taken: its node has not sent it away."""
        granted = self.reservation.granted
        sent_away = granted.done() and (granted.cancelled() or granted.result() is not Grant.LANE)
        return not self._gone and not sent_away and self.node.usable and self.node.open_to_work

    def take(self) -> Reservation:
        """The session is bound here from now on, and owes its old node a revoke."""
        self._gone = True
        self.reservation.kept = False
        self._generation.session.take_binding(self._binding)
        self._on_taken()
        return self.reservation

    def release(self) -> None:
        """Give it back, unless it was taken. Idempotent."""
        if not self._gone:
            self._gone = True
            self._binding.dropped(self._generation.session_id)
            self.reservation.release()
