"""The turns of generations: placed, moved, ended. Told to those who watch; without one they cost a look."""

from __future__ import annotations

from collections.abc import Callable

from fleet_service.domain.events import Finished, Moved
from fleet_service.runtime.generation import Generation
from fleet_service.runtime.views import EndedOn, PlacedOn

Listener = Callable[[Generation, PlacedOn | Moved | EndedOn], None]


class Turns:
    """Tells one listener, while there is one. It must neither block nor raise."""

    def __init__(self) -> None:
        self.listener: Listener | None = None

    def placed(self, generation: Generation, node: str) -> None:
        if self.listener is not None:
            self.listener(generation, PlacedOn(node))

    def moved(self, generation: Generation, moved: Moved) -> None:
        if self.listener is not None:
            self.listener(generation, moved)

    def ended(self, generation: Generation, finished: Finished) -> None:
        if self.listener is not None:
            self.listener(generation, EndedOn(generation.node, finished))
