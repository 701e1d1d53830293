"""Revokes owed to nodes that cannot say what they hold: they outlive their head, the next delivers them."""

from __future__ import annotations

from collections.abc import Callable

from fleet_service.domain.node_types import Feature
from fleet_service.runtime.node import Node
from tests.sim.stores import SLOWEST_S, SimStore

_WRITTEN_WITHIN_S = 2.0 * SLOWEST_S + 0.1
Owed = tuple[str, str, str, int]
"""Node, incarnation, session, epoch."""


class Owing:
    """Looks at what the head that lives owes, at every tick. `store` None: nothing outlives a head."""

    def __init__(
        self, store: SimStore | None, clock: Callable[[], float], violation: Callable[[str], None]
    ) -> None:
        self._store = store
        self._clock = clock
        self._violation = violation
        self._since: dict[Owed, float] = {}  # not written, as far as is known

    def check(self, node: Node) -> None:
        """What is owed for a while is written."""
        store, now_s = self._store, self._clock()
        if store is None or not node.incarnation or Feature.RECONCILE in node.features:
            return
        if store.may_fail:
            self._since.clear()
            return
        for session_id, owed in node.outbox.items():
            key = (node.name, node.incarnation, session_id, owed.epoch)
            if key in store.saved.revokes:
                self._since.pop(key, None)
            elif now_s - self._since.setdefault(key, now_s) > _WRITTEN_WITHIN_S:
                self._violation(f"{node.name} is owed the revoke of {session_id}, and that is not kept")
