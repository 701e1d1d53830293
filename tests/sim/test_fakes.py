"""The simulated nodes and network, driven directly: what they promise the simulation, fault by fault."""

from __future__ import annotations

import asyncio
import random
import zlib
from array import array
from collections.abc import Callable, Coroutine, Sequence

import pytest

from fleet_service.domain.commands import (
    Append,
    Assign,
    Introduction,
    Phase,
    Refusal,
    RefusalCode,
    Revoke,
    Run,
    RunFinish,
)
from fleet_service.domain.node_types import Feature, ModelInfo, Report
from fleet_service.domain.specs import Qos, Sampling
from fleet_service.runtime.protocols import HandshakeRefusedError, LinkError, LinkLostError, LinkTimeoutError
from node_stub import rules
from node_stub.reference import StubModel, reference_tokens
from tests.sim.links import SimDialer, SimLink
from tests.sim.loop import SimLoop
from tests.sim.network import Noise, SimNetwork
from tests.sim.nodes import ArmedFault, NodeProfile, RunFault, SimMachine
from tests.sim.process import SimProcess

_MODEL = StubModel("model", "r1", vocab_size=100)
_PROMPT = [5, 6, 7]
_HEAD = Introduction("fleet", "head", term=1)
_EPOCH = 1 << 32


class _Overseer:
    """Wants nothing to go wrong, and sees nothing."""

    def run_admitted(self, process: object, run: Run, admission: rules.Admission) -> None:
        return

    def run_taken_up(self, process: object, run: Run) -> None:
        return

    def struck(self, machine: SimMachine, fault: str, run: object = None) -> None:
        return

    def met(self, what: str) -> None:
        return

    def lasts(self, node: str, change: int) -> None:
        return

    def violation(self, text: str) -> None:
        raise AssertionError(text)

    def engine_fails_at(self, run: object) -> int | None:
        return None

    def kills_at(self, run: object) -> int | None:
        return None


class _Ears:
    """A link's listener and a run's sink in one."""

    def __init__(self) -> None:
        self.reports = 0
        self.lost: LinkError | None = None
        self.broken: LinkError | None = None
        self.tokens: dict[int, int] = {}
        self.epochs: set[int] = set()
        self.finish: RunFinish | None = None
        self.refusal: Refusal | None = None
        self.over = asyncio.Event()

    def on_sign(self) -> None:
        return

    def on_report(self, report: Report, models: tuple[ModelInfo, ...]) -> None:
        self.reports += 1

    def on_leaving(self) -> None:
        return

    def on_lost(self, error: LinkError) -> None:
        self.lost = error

    def on_step(
        self,
        epoch: int,
        first_index: int,
        token_ids: Sequence[int],
        phase: Phase | None,
        finish: RunFinish | None,
        refusal: Refusal | None,
    ) -> None:
        self.epochs.add(epoch)
        self.tokens |= dict(enumerate(token_ids, start=first_index))
        self.finish, self.refusal = finish, refusal
        if finish is not None or refusal is not None:
            self.over.set()

    def on_broken(self, error: LinkError) -> None:
        self.broken = error
        self.over.set()


class _Bench:
    """One node and a way to it."""

    def __init__(self, loop: SimLoop, features: frozenset[Feature]) -> None:
        self.network = SimNetwork(loop, random.Random(1), lambda _text: None)
        profile = NodeProfile(
            name="node",
            models=(_MODEL,),
            max_context_tokens=1000,
            lanes=1,
            step_s=0.1,
            tokens_per_step=1,
            prefill_tokens_per_s=100.0,
            limits=rules.Limits(),
            features=frozenset({Feature.INLINE_BIND}) | features,
        )
        self.machine = SimMachine(profile, self.network, random.Random(2), _Overseer(), SimProcess)
        self.ears = _Ears()

    async def connect(self) -> SimLink:
        return await SimDialer(self.network).connect(self.machine.address, _HEAD, self.ears)

    async def bind(self, link: SimLink) -> None:
        assert await link.assign(_assign()) is None
        assert await link.append(Append("s", _EPOCH, 2, 0, _PROMPT)) is None


def _assign() -> Assign:
    return Assign("s", _EPOCH, 1, "model", "r1", Sampling(), Qos.INTERACTIVE, b"", 60.0)


def _run(prefix: Sequence[int] = (), count: int = 10) -> Run:
    return Run(
        session_id="s",
        epoch=_EPOCH,
        command_id=3,
        generation_id="g",
        context_length=len(_PROMPT),
        context_crc32=zlib.crc32(array("I", _PROMPT).tobytes()),
        prefix_token_ids=prefix,
        first_index=len(prefix),
        max_new_tokens=count,
        max_wall_s=60.0,
        sampling=Sampling(),
        qos=Qos.INTERACTIVE,
    )


def _simulate(work: Callable[[_Bench], Coroutine[None, None, None]], *features: Feature) -> None:
    loop = SimLoop(1)

    async def main() -> None:
        await work(_Bench(loop, frozenset(features)))

    loop.drive(main())
    assert loop.unhandled == []


def _right(count: int) -> dict[int, int]:
    return dict(enumerate(reference_tokens(_MODEL, 0, _PROMPT, count)))


def test_a_run_gives_the_reference_tokens_and_one_finish() -> None:
    async def work(bench: _Bench) -> None:
        link = await bench.connect()
        await bench.bind(link)
        link.run(_run(), bench.ears)
        await bench.ears.over.wait()
        assert (bench.ears.tokens, bench.ears.finish) == (_right(10), RunFinish.LENGTH)
        assert bench.machine.process is not None
        assert bench.machine.process.runs() == []

    _simulate(work)


def test_a_run_goes_on_behind_its_prefix() -> None:
    async def work(bench: _Bench) -> None:
        link = await bench.connect()
        await bench.bind(link)
        whole = _right(10)
        link.run(_run([whole[0], whole[1]], 8), bench.ears)
        await bench.ears.over.wait()
        assert bench.ears.tokens == {index: whole[index] for index in range(2, 10)}

    _simulate(work)


def test_a_stalled_wire_is_silent_and_then_delivers_everything() -> None:
    async def work(bench: _Bench) -> None:
        link = await bench.connect()
        await bench.bind(link)
        link.run(_run(), bench.ears)
        await asyncio.sleep(0.5)
        bench.machine.stall(5.0)
        had = dict(bench.ears.tokens)
        reports = bench.ears.reports
        await asyncio.sleep(4.9)
        assert (bench.ears.tokens, bench.ears.reports) == (had, reports)
        await bench.ears.over.wait()
        assert bench.ears.tokens == _right(10)

    _simulate(work)


def test_a_stopped_process_goes_on_where_it_stopped() -> None:
    async def work(bench: _Bench) -> None:
        link = await bench.connect()
        await bench.bind(link)
        link.run(_run(), bench.ears)
        await asyncio.sleep(0.5)
        bench.machine.freeze(20.0)
        with pytest.raises(LinkTimeoutError):
            await link.revoke(Revoke("other", _EPOCH))
        await bench.ears.over.wait()
        assert bench.ears.tokens == _right(10)
        assert asyncio.get_running_loop().time() > 20.0

    _simulate(work)


def test_a_dead_process_breaks_its_links_and_returns_as_another_that_knows_nothing() -> None:
    async def work(bench: _Bench) -> None:
        link = await bench.connect()
        await bench.bind(link)
        link.run(_run(), bench.ears)
        await asyncio.sleep(0.5)
        bench.machine.die(return_s=3.0)
        await bench.ears.over.wait()
        assert isinstance(bench.ears.broken, LinkLostError)
        assert isinstance(bench.ears.lost, LinkLostError)
        with pytest.raises(LinkLostError):
            await bench.connect()
        await asyncio.sleep(4.0)
        again = await bench.connect()
        assert again.hello.incarnation != link.hello.incarnation
        refusal = await again.append(Append("s", _EPOCH, 4, 0, _PROMPT))
        assert refusal is not None
        assert refusal.code is RefusalCode.UNKNOWN_SESSION

    _simulate(work)


def test_hanging_up_frees_the_lane() -> None:
    async def work(bench: _Bench) -> None:
        link = await bench.connect()
        await bench.bind(link)
        handle = link.run(_run(count=500), bench.ears)
        await asyncio.sleep(1.0)
        process = bench.machine.process
        assert process is not None
        assert process.lanes_active == 1
        handle.close()
        had = dict(bench.ears.tokens)
        await asyncio.sleep(1.0)
        assert (process.lanes_active, bench.ears.tokens) == (0, had)

    _simulate(work)


def test_a_link_that_drops_cancels_its_runs_at_the_node() -> None:
    async def work(bench: _Bench) -> None:
        link = await bench.connect()
        await bench.bind(link)
        link.run(_run(count=500), bench.ears)
        await asyncio.sleep(1.0)
        bench.machine.drop_links()
        await asyncio.sleep(3.0)
        assert isinstance(bench.ears.broken, LinkLostError)
        assert bench.machine.process is not None
        assert bench.machine.process.runs() == []

    _simulate(work)


def test_a_run_that_was_kept_over_a_blip_goes_on_at_the_index_asked_for() -> None:
    async def work(bench: _Bench) -> None:
        link = await bench.connect()
        await bench.bind(link)
        link.run(_run(count=40), bench.ears)
        await asyncio.sleep(1.0)
        bench.machine.cut(0.3)
        with pytest.raises(LinkLostError):
            await bench.connect()
        await asyncio.sleep(0.4)
        had, bench.ears = bench.ears.tokens, _Ears()
        assert bench.machine.process is not None
        assert [key[2] for key in bench.machine.process.runs()] == ["g"]
        (await bench.connect()).run(_run(list(had.values()), 40 - len(had)), bench.ears)
        await bench.ears.over.wait()
        assert 0 < len(had) < 40
        assert had | bench.ears.tokens == _right(40)
        assert min(bench.ears.tokens) == len(had)

    _simulate(work, Feature.RESUME)


def test_a_kept_run_is_given_up_when_nobody_comes_back_in_time() -> None:
    async def work(bench: _Bench) -> None:
        link = await bench.connect()
        await bench.bind(link)
        link.run(_run(count=500), bench.ears)
        await asyncio.sleep(1.0)
        bench.machine.cut(0.1)
        await asyncio.sleep(9.5)
        process = bench.machine.process
        assert process is not None
        assert len(process.runs()) == 1
        await asyncio.sleep(3.0)
        assert process.runs() == []
        had, bench.ears = bench.ears.tokens, _Ears()
        (await bench.connect()).run(_run(list(had.values())), bench.ears)
        await bench.ears.over.wait()
        assert bench.ears.refusal is not None
        assert bench.ears.refusal.code is RefusalCode.REPLAYED

    _simulate(work, Feature.RESUME)


def test_a_node_lists_what_it_holds() -> None:
    async def work(bench: _Bench) -> None:
        link = await bench.connect()
        await bench.bind(link)
        link.run(_run(count=500), bench.ears)
        await asyncio.sleep(1.0)
        (held,) = await link.reconcile()
        assert (held.session_id, held.epoch, held.head_id) == ("s", _EPOCH, _HEAD.head_id)
        assert (held.context_length, held.generation_ids) == (len(_PROMPT), ("g",))

    _simulate(work, Feature.RECONCILE)


def test_a_lost_command_times_out_whether_or_not_it_was_executed() -> None:
    async def work(bench: _Bench) -> None:
        link = await bench.connect()
        bench.network.noise = Noise(lose=1.0)
        with pytest.raises(LinkTimeoutError):
            await link.assign(_assign())

    _simulate(work)


def test_a_repeated_append_is_executed_once() -> None:
    async def work(bench: _Bench) -> None:
        link = await bench.connect()
        bench.network.noise = Noise(repeat=1.0, late_max_s=0.5)
        await bench.bind(link)
        await asyncio.sleep(1.0)
        assert bench.machine.process is not None
        assert [each.context_length for each in bench.machine.process.rules.holdings()] == [len(_PROMPT)]

    _simulate(work)


def test_a_node_that_refuses_says_why() -> None:
    async def work(bench: _Bench) -> None:
        bench.machine.refuses = "version"
        with pytest.raises(HandshakeRefusedError, match="version"):
            await bench.connect()

    _simulate(work)


@pytest.mark.parametrize(
    "fault, sign",
    [
        (RunFault.ENGINE_ERROR, lambda ears: ears.refusal.code is RefusalCode.ENGINE_ERROR),
        (RunFault.BUSY, lambda ears: ears.refusal.code is RefusalCode.BUSY),
        (RunFault.SKIP_INDEX, lambda ears: sorted(ears.tokens) == [0, 1, 2, 4, 5, 6, 7, 8, 9]),
        (RunFault.REPEAT_INDEX, lambda ears: ears.tokens == _right(10)),
        (RunFault.FUTURE_EPOCH, lambda ears: max(ears.epochs) == _EPOCH + 1),
        (RunFault.OLD_EPOCH, lambda ears: min(ears.epochs) == _EPOCH - 1),
        (RunFault.LATE_FINISH, lambda ears: ears.tokens == _right(10)),
        (RunFault.DIE, lambda ears: ears.broken is not None and sorted(ears.tokens) == [0, 1, 2]),
        (RunFault.DIE_BEFORE_FINISH, lambda ears: ears.broken is not None and ears.tokens == _right(10)),
        (RunFault.DROP_LINK, lambda ears: ears.broken is not None),
        (RunFault.BLIP, lambda ears: ears.broken is not None),
    ],
)
def test_an_armed_fault_strikes_its_run(fault: RunFault, sign: Callable[[_Ears], bool]) -> None:
    async def work(bench: _Bench) -> None:
        link = await bench.connect()
        await bench.bind(link)
        bench.machine.armed.append(ArmedFault(fault, after_tokens=3))
        link.run(_run(), bench.ears)
        await bench.ears.over.wait()
        assert sign(bench.ears)

    _simulate(work)
