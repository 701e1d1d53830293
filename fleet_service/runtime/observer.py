"""The seam through which the head is watched: traces and metrics are made of what passes here.

The runtime calls these at the turns of a generation, never per token. Implementations must not block or
raise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from fleet_service.domain.errors import Reason
from fleet_service.domain.events import Finished, Moved
from fleet_service.domain.failures import FailureClass
from fleet_service.domain.placement import Verdict
from fleet_service.domain.specs import Qos
from fleet_service.domain.value import value


@value
class GenerationInfo:
    """What a generation is, when it is accepted. `max_wall_s` counts from there."""

    generation_id: str
    session_id: str
    model: str
    qos: Qos
    context_tokens: int
    max_new_tokens: int
    max_wall_s: float
    owner: str = ""
    """The caller whose it is."""


class AttemptTrace(Protocol):
    """One node's try."""

    def carrier(self) -> Mapping[str, str]:
        """W3C trace headers to send to the node; empty when nothing is traced."""

    def ended(self, failure: str | None, tokens: int) -> None:
        """The attempt is over: it added `tokens` tokens. `failure`: its class; None = it did not fail."""


class GenerationTrace(Protocol):
    """One generation, from acceptance to its terminal event."""

    def placed(self, node: str, verdicts: Callable[[], Sequence[Verdict]]) -> None:
        """A node was chosen. `verdicts` is only called when somebody records what it gives."""

    def waited(self, waited_s: float) -> None:
        """A wait for a lane is over: it got one, has to look elsewhere, or ended with the generation."""

    def attempt_started(self, node: str, epoch: int, number: int, next_index: int) -> AttemptTrace:
        """Attempt `number` (from 1) goes to `node`; its first token will have index `next_index`."""

    def first_token(self) -> None:
        """The first token of the generation is visible."""

    def failed(self, kind: FailureClass) -> None:
        """A try failed, dispatched or still waiting; what became of its link is known, unlike at `ended`."""

    def moved(self, event: Moved) -> None:
        """A further attempt goes on."""

    def finished(self, event: Finished) -> None:
        """The terminal event; called once, and last."""


class FleetObserver(Protocol):
    """Told of every generation, every placement and every look at the books."""

    def generation_started(self, info: GenerationInfo, parent: object | None) -> GenerationTrace:
        """A generation was accepted. `parent` is what the edge handed over with the request, opaque here."""

    def placement(self, refused: Reason | None) -> None:
        """A node was looked for, waits and second tries included; None = one was found, else why none was."""

    def books_checked(self, wrong_nodes: int) -> None:
        """Once a tick: on how many nodes the reservations are not what is queued and running there."""

    def committed(self, took_s: float) -> None:
        """Changes that are to outlive the head were written, all that were ready in one commit."""


_NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class NullAttemptTrace:
    """Records nothing."""

    __slots__ = ()

    def carrier(self) -> Mapping[str, str]:
        return _NO_HEADERS

    def ended(self, failure: str | None, tokens: int) -> None:
        return


class NullGenerationTrace:
    """Records nothing."""

    __slots__ = ()

    def placed(self, node: str, verdicts: Callable[[], Sequence[Verdict]]) -> None:
        return

    def waited(self, waited_s: float) -> None:
        return

    def attempt_started(self, node: str, epoch: int, number: int, next_index: int) -> AttemptTrace:
        return _NULL_ATTEMPT

    def first_token(self) -> None:
        return

    def failed(self, kind: FailureClass) -> None:
        return

    def moved(self, event: Moved) -> None:
        return

    def finished(self, event: Finished) -> None:
        return


_NULL_ATTEMPT = NullAttemptTrace()
_NULL_GENERATION = NullGenerationTrace()


class NullObserver:
    """Watches nothing, at no cost; what the head uses unless traces or metrics are configured."""

    __slots__ = ()

    def generation_started(self, info: GenerationInfo, parent: object | None) -> GenerationTrace:
        return _NULL_GENERATION

    def placement(self, refused: Reason | None) -> None:
        return

    def books_checked(self, wrong_nodes: int) -> None:
        return

    def committed(self, took_s: float) -> None:
        return
