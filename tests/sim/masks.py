"""What of a drawn world takes part: by the numbers of its faults, callers and nodes."""

from __future__ import annotations

from dataclasses import dataclass

Numbers = frozenset[int] | None
"""None = all."""


@dataclass(frozen=True, slots=True)
class Mask:
    """As text: `faults:1,4/callers:0/nodes:0,2`; a part that is left out means all."""

    faults: Numbers = None
    callers: Numbers = None
    nodes: Numbers = None

    def has_caller(self, number: int) -> bool:
        return self.callers is None or number in self.callers

    def has_node(self, number: int) -> bool:
        return self.nodes is None or number in self.nodes

    def __str__(self) -> str:
        parts = {"faults": self.faults, "callers": self.callers, "nodes": self.nodes}
        return "/".join(
            f"{name}:{','.join(map(str, sorted(numbers)))}"
            for name, numbers in parts.items()
            if numbers is not None
        )

    @classmethod
    def parse(cls, text: str) -> Mask:
        """Raises ValueError for a part that is none."""
        parts: dict[str, Numbers] = {}
        for part in filter(None, text.split("/")):
            name, _, numbers = part.partition(":")
            if name not in cls.__dataclass_fields__:
                raise ValueError(f"{name!r} is not one of {', '.join(cls.__dataclass_fields__)}")
            parts[name] = frozenset(int(number) for number in numbers.split(",") if number)
        return cls(**parts)


ALL = Mask()
