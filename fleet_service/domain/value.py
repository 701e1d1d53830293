"""Values: dataclasses that nobody changes, at a third of what frozen ones cost to make.

A request makes some thirty of them. A frozen dataclass sets each of its fields the slow way to be able to
refuse other assignments; here mypy refuses them, before anything runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def value(cls: type[T]) -> type[T]:
    """Make `cls` a value: a dataclass with slots, equal and hashed by its fields."""
    return dataclass(slots=True, unsafe_hash=True)(cls)
