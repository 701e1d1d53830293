"""Faults that a stub node can be told to have: which, where, how often, and how to write them as text.

Text form, for the command line: `POINT[=TOKENS]:ACTION[=ARGUMENT][,times=N][,session=PREFIX]`, for example
`after-tokens=5:die`, `before-assign:refuse=BUSY,times=1`, `after-append:delay=200,session=slow-`.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import count
from typing import Any, Protocol, TypeVar

from node_stub.rules import Code


class FaultError(ValueError):
    """A fault that makes no sense; the text says what would."""


class Point(Enum):
    """Where a fault strikes; names and values are those of fleet.stub.v1.FaultPoint."""

    BEFORE_ASSIGN = 1
    AFTER_ASSIGN = 2
    AFTER_APPEND = 3
    AFTER_GENERATE = 4
    AFTER_TOKENS = 5
    BEFORE_FINISH = 6


class Action(Enum):
    """What goes wrong; names and values are those of fleet.stub.v1.FaultAction."""

    DIE = 1
    FREEZE = 2
    DROP_LINK = 3
    REFUSE = 4
    ENGINE_ERROR = 5
    STALL = 6
    WRONG_EPOCH = 7
    REPEAT_INDEX = 8
    SKIP_INDEX = 9
    LOSE_APPEND = 10
    REPEAT_APPEND = 11
    DELAY = 12
    CUT_LINK = 13


M = TypeVar("M", Point, Action)

_STREAM_POINTS = {Point.AFTER_GENERATE, Point.AFTER_TOKENS, Point.BEFORE_FINISH}
_ONLY_AT = {
    Action.STALL: _STREAM_POINTS,
    Action.WRONG_EPOCH: _STREAM_POINTS,
    Action.REPEAT_INDEX: {Point.AFTER_TOKENS},
    Action.SKIP_INDEX: {Point.AFTER_TOKENS},
    Action.LOSE_APPEND: {Point.AFTER_APPEND},
    Action.REPEAT_APPEND: {Point.AFTER_APPEND},
}


_TIMED = {Action.DELAY, Action.CUT_LINK}

# Faults of how an Append is executed, not of what happens after it.
APPEND_ACTIONS = frozenset({Action.LOSE_APPEND, Action.REPEAT_APPEND})


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. `times` 0 = it strikes always; `after_tokens` counts tokens sent of one run."""

    point: Point
    action: Action
    after_tokens: int = 0
    times: int = 0
    session_prefix: str = ""
    refusal_code: Code | None = None
    delay_ms: int = 0

    def check(self) -> None:
        """Raise FaultError when the parts contradict each other."""
        point, action = name_of(self.point), name_of(self.action)
        if self.point not in _ONLY_AT.get(self.action, set(Point)):
            places = ", ".join(sorted(name_of(place) for place in _ONLY_AT[self.action]))
            raise FaultError(f"{action} cannot strike at {point}, only at {places}")
        if self.action is Action.REFUSE and self.refusal_code is None:
            raise FaultError(f"refuse needs a code, one of {', '.join(code.name for code in Code)}")
        if self.action in _TIMED and self.delay_ms <= 0:
            raise FaultError(f"{action} needs a time in milliseconds, above 0")
        if self.action is Action.REPEAT_INDEX and self.after_tokens == 0:
            raise FaultError("repeat-index needs a token to repeat: after-tokens of at least 1")


@dataclass(frozen=True, slots=True)
class ReportLies:
    """What reports say instead of the truth; None = the truth. `silent`: no reports at all."""

    silent: bool = False
    kv_blocks_used: int | None = None
    kv_blocks_total: int | None = None
    decode_tokens_per_s: int | None = None
    prefill_tokens_per_s: int | None = None
    lanes_active: int | None = None
    queue_depth: int | None = None


@dataclass(slots=True)
class _Armed:
    serial: int
    fault: Fault
    left: int | None


class Faults:
    """The faults that are set, in the order given, and what is left of their counts."""

    def __init__(self, faults: Sequence[Fault] = (), lies: ReportLies | None = None) -> None:
        self._armed: list[_Armed] = []
        self._serials = count()
        self.lies = lies or ReportLies()
        self.slow_down = 1.0
        self.arm(faults)

    def arm(self, faults: Sequence[Fault]) -> None:
        """Replace all. Raises FaultError, changing nothing, when one makes no sense."""
        for fault in faults:
            fault.check()
        self._armed = [_Armed(next(self._serials), fault, fault.times or None) for fault in faults]

    def left(self) -> list[Fault]:
        """Faults that can still strike, with the rest of their counts."""
        return [replace(a.fault, times=a.left or 0) for a in self._armed if a.left != 0]

    @property
    def any_left(self) -> bool:
        """Whether any can still strike."""
        return any(armed.left != 0 for armed in self._armed)

    def take(
        self,
        point: Point,
        session_id: str,
        *,
        sent: int = 0,
        struck: set[int] | None = None,
        actions: Collection[Action] = frozenset(Action),
    ) -> Fault | None:
        """The next fault of these actions that strikes here, its count lowered; None when there is none.

        `struck` is a run's own memory: a fault strikes a run once, however often it may strike.
        """
        for armed in self._armed:
            if not self._fits(armed, point, session_id, struck):
                continue
            if armed.fault.action not in actions:
                continue
            if point is Point.AFTER_TOKENS and armed.fault.after_tokens != sent:
                continue
            return self._strike(armed, struck)
        return None

    def take_anywhere(self, action: Action, session_id: str, struck: set[int]) -> Fault | None:
        """The next fault of that action in a run's stream, wherever it is to strike."""
        for armed in self._armed:
            if armed.fault.action is action and self._fits(armed, armed.fault.point, session_id, struck):
                return self._strike(armed, struck)
        return None

    def next_boundary(self, session_id: str, sent: int, struck: set[int]) -> int | None:
        """How many tokens of a run may be sent before an AFTER_TOKENS fault must be looked for."""
        counts = [
            armed.fault.after_tokens
            for armed in self._armed
            if self._fits(armed, Point.AFTER_TOKENS, session_id, struck) and armed.fault.after_tokens >= sent
        ]
        return min(counts, default=None)

    def expects_finish(self, session_id: str, struck: set[int]) -> bool:
        """Whether a fault waits between the last token and the finish."""
        return any(self._fits(armed, Point.BEFORE_FINISH, session_id, struck) for armed in self._armed)

    @staticmethod
    def _strike(armed: _Armed, struck: set[int] | None) -> Fault:
        if armed.left is not None:
            armed.left -= 1
        if struck is not None:
            struck.add(armed.serial)
        return armed.fault

    @staticmethod
    def _fits(armed: _Armed, point: Point, session_id: str, struck: set[int] | None) -> bool:
        fault = armed.fault
        fits = armed.left != 0 and fault.point is point and session_id.startswith(fault.session_prefix)
        return fits and (struck is None or armed.serial not in struck)


_LAST_WORDS_S = 0.05


class Hazards(Protocol):
    """What DIE and FREEZE do to the node."""

    def die(self) -> None: ...

    def freeze(self) -> None: ...


class ProcessHazards:
    """The real thing, for a node that is a process of its own."""

    def die(self) -> None:
        # What gRPC was given to send may not have left yet; nothing else is done meanwhile.
        time.sleep(_LAST_WORDS_S)
        os.kill(os.getpid(), signal.SIGKILL)

    def freeze(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


# ------------------------------------------------------------------------------------------------- text form


def name_of(member: Point | Action) -> str:
    return member.name.lower().replace("_", "-")


def parse_fault(text: str) -> Fault:
    """Read the text form (see the module). Raises FaultError."""
    head, *options = text.split(",")
    where, colon, what = head.partition(":")
    if not colon:
        raise FaultError(f"{text!r}: a fault is POINT:ACTION, for example after-tokens=5:die")
    point_name, _, tokens = where.partition("=")
    action_name, _, argument = what.partition("=")
    fault = Fault(_member(Point, point_name), _member(Action, action_name))
    if tokens:
        fault = replace(fault, after_tokens=_number(tokens, "tokens"))
    if fault.action is Action.REFUSE and argument:
        fault = replace(fault, refusal_code=_code(argument))
    elif fault.action in _TIMED and argument:
        fault = replace(fault, delay_ms=_number(argument, "time in milliseconds"))
    elif argument:
        raise FaultError(f"{action_name} takes no argument")
    for option in options:
        fault = _with_option(fault, option)
    fault.check()
    return fault


def parse_lie(text: str, lies: ReportLies) -> ReportLies:
    """Read `silent` or `FIELD=NUMBER` (a field of ReportLies, with dashes). Raises FaultError."""
    if text == "silent":
        return replace(lies, silent=True)
    name, equals, value = text.partition("=")
    name = name.replace("-", "_")
    if not equals or name == "silent" or name not in ReportLies.__dataclass_fields__:
        fields = sorted(set(ReportLies.__dataclass_fields__) - {"silent"})
        raise FaultError(f"{text!r}: say silent, or one of {', '.join(fields)} with =NUMBER")
    changes: dict[str, Any] = {name: _number(value, name)}
    return replace(lies, **changes)


def _with_option(fault: Fault, option: str) -> Fault:
    name, _, value = option.partition("=")
    if name == "times":
        return replace(fault, times=_number(value, "times"))
    if name == "session":
        return replace(fault, session_prefix=value)
    raise FaultError(f"unknown option {name!r}: times=N and session=PREFIX are known")


def _member(kind: type[M], name: str) -> M:
    for member in kind:
        if name_of(member) == name:
            return member
    known = ", ".join(name_of(member) for member in kind)
    raise FaultError(f"unknown {kind.__name__.lower()} {name!r}; known: {known}")


def _code(name: str) -> Code:
    try:
        return Code[name]
    except KeyError:
        raise FaultError(f"unknown code {name!r}; known: {', '.join(c.name for c in Code)}") from None


def _number(text: str, what: str) -> int:
    if not text.isdecimal():
        raise FaultError(f"{what}: {text!r} is not a whole number")
    return int(text)
