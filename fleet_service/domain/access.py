"""Who calls, and what a caller may do. Sessions belong to the caller that made them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from fleet_service.domain.errors import FleetError, Reason


class Permission(StrEnum):
    """CALL: the callers' service. READ: look at the fleet. OPERATE: change it, which includes to look."""

    CALL = "call"
    READ = "read"
    OPERATE = "operate"


@dataclass(frozen=True, slots=True)
class Caller:
    """One who calls. `models`: those it may use; empty = all."""

    name: str = ""
    may: frozenset[Permission] = frozenset(Permission)
    models: frozenset[str] = frozenset()

    def check(self, permission: Permission) -> None:
        """Raises PERMISSION_DENIED."""
        if permission in self.may or (permission is Permission.READ and Permission.OPERATE in self.may):
            return
        raise FleetError(
            Reason.PERMISSION_DENIED,
            f"{self.name} may not {permission} here; an operator can give it that permission",
            metadata={"caller": self.name, "permission": permission.value},
        )

    def check_model(self, model: str) -> None:
        """Raises PERMISSION_DENIED."""
        if self.models and model not in self.models:
            raise FleetError(
                Reason.PERMISSION_DENIED,
                f"{self.name} may not use model {model}, only {', '.join(sorted(self.models))}",
                metadata={"caller": self.name, "model": model},
            )


ANYBODY = Caller()
"""Every caller of a head that asks nobody who he is."""
