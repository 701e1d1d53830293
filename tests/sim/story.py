"""What happened in a simulation, in order of virtual time, to be read by a person after a failure."""

from __future__ import annotations

from collections.abc import Callable

_LINES_SHOWN = 600


class Story:
    """Lines with their time. `clock` gives virtual seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lines: list[tuple[float, str, tuple[object, ...]]] = []

    def note(self, text: str, *values: object) -> None:
        """Add a line; `values` fill the %-places of `text` when it is read."""
        self._lines.append((self._clock(), text, values))

    def lines(self) -> list[str]:
        return [f"{at_s:9.4f}  {text % values if values else text}" for at_s, text, values in self._lines]

    def tell(self, about: str = "") -> str:
        """The story, or what of it names `about` or the fleet as a whole (lines that begin with `*`)."""
        lines = self.lines()
        if about:
            lines = [line for line in lines if about in line or line[11:12] == "*"]
        if len(lines) > _LINES_SHOWN:
            left_out = len(lines) - _LINES_SHOWN
            lines = [*lines[:40], f"           … {left_out} lines left out …", *lines[-_LINES_SHOWN + 40 :]]
        return "\n".join(lines)
