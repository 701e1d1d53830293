"""Stub nodes to be checked, honest and broken, and the check of one."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from fleet_service.conformance.runner import Target, Verdict, check_node
from fleet_service.conformance.verdicts import Outcome, Result
from node_stub.reference import StubModel
from node_stub.rules import NodeRules
from node_stub.stub_engine import EngineSettings
from node_stub.stub_node import StubNode, StubSettings

WINDOW_TOKENS = 2_048
HONEST = StubSettings(
    identity="tried",
    models=((StubModel("stub"), WINDOW_TOKENS),),
    engine=EngineSettings(lanes=3, decode_tokens_per_s=200.0, prefill_tokens_per_s=20_000.0),
)


async def check(address: str, only: Collection[str] = (), **target: Any) -> Verdict:
    told: list[Result] = []
    about = Target(address=address, name=f"conformance-{uuid.uuid4().hex[:8]}", **target)
    verdict = await check_node(about, frozenset(only), told.append)
    assert verdict.results == told
    return verdict


def broken(verdict: Verdict) -> dict[str, str]:
    """Number and what was seen of each rule that is broken."""
    return {each.number: each.seen for each in verdict.results if each.outcome is Outcome.BROKEN}


def skipped(verdict: Verdict) -> dict[str, str]:
    return {each.number: each.seen for each in verdict.results if each.outcome is Outcome.SKIPPED}


def untried(verdict: Verdict) -> set[str]:
    return {each.number for each in verdict.results if each.untried}


@asynccontextmanager
async def stub(rules: type[NodeRules] | None = None, **settings: Any) -> AsyncIterator[StubNode]:
    """A stub node, under rules of its own where it is to break one."""
    async with StubNode(replace(HONEST, **settings)) as node:
        if rules:
            node.node.rules = rules(node.node.engine.models, node.node.rules.limits)
        yield node
