"""Which nodes are taken in: identities, labels and models within bounds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fleet_service.domain.node_types import ModelInfo, NodeHello, unacceptable

GOOD = NodeHello("node-1", "run-1", labels={"zone": "a"}, models=(ModelInfo("m"),))


def test_an_ordinary_hello_is_taken() -> None:
    assert unacceptable(GOOD) is None
    assert unacceptable(replace(GOOD, identity="host-a.example:8454")) is None


@pytest.mark.parametrize(
    "hello",
    [
        replace(GOOD, identity=""),
        replace(GOOD, identity="a" * 129),
        replace(GOOD, identity="no spaces"),
        replace(GOOD, identity="esc\x1b"),
        replace(GOOD, incarnation="x" * 257),
        replace(GOOD, labels={f"l{i}": "" for i in range(65)}),
        replace(GOOD, labels={"zone": "line\nbreak"}),
        replace(GOOD, models=tuple(ModelInfo(f"m{i}") for i in range(1001))),
        replace(GOOD, models=(ModelInfo("m", revision="r" * 300),)),
    ],
)
def test_what_is_out_of_bounds_is_refused_with_what_to_change(hello: NodeHello) -> None:
    why = unacceptable(hello)
    assert why is not None
    assert "must be" in why or "at most" in why
