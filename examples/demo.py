"""`make demo`: a fleet of real processes at work while its nodes die and freeze, and then its head.

Three stub nodes and a head are started, a slice of a real request trace is replayed, one node is killed and
started again, another one frozen for a while; at last the head itself is killed and started again. Every
answer is compared with what an undisturbed node would have said. Exits with 0 only when every token of every
answer came once, in order, and right, some of them had to move, and some outlived the head.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from examples import trace
from examples.ledger import Entry, total
from examples.processes import Child, Children, command_of, run_to_exit_code
from examples.screen import Screen, make_screen, print_table
from fleet.v1.admin_service_pb2 import ListNodesRequest, NodeState
from fleet.v1.fleet_service_pb2 import (
    CompleteRequest,
    GenerationEvent,
    GenerationSpec,
    MoveCause,
    SessionSpec,
)
from fleet.v1.types_pb2 import FinishReason, SamplingParams
from fleet_service.client import CallError, FleetClient
from node_stub.reference import StubModel, effective_seed, reference_tokens

MODEL = StubModel(name="demo")
NODES = ("node-1", "node-2", "node-3")
LANES = 24
DECODE_RATE = 60
PREFILL_RATE = 20_000

# Seconds of the demonstration per second of the trace.
STRETCH = 1.1
DEADLINE_S = 110.0
# Parts of the answers that are there when the troubles begin, and streams a node must carry to be worth it.
KILL_AT, FREEZE_AT = 0.15, 0.45
WORTHWHILE_STREAMS = 3
REBOOT_S = 3.0
FROZEN_AFTER_MOVES_S = 3.0
# Requests kept for the last act, in which the head dies, and how long it may be away.
LAST_ACT = 12
AWAY_S = 30.0
_POLL_S = 0.02


@dataclass(slots=True)
class Fleet:
    """The processes: the head, and the nodes and their addresses by name. `data`: what the head keeps."""

    children: Children
    data: Path
    nodes: dict[str, Child] = field(default_factory=dict)
    addresses: dict[str, str] = field(default_factory=dict)
    head: Child | None = None
    callers: str = "127.0.0.1:0"
    operators: str = "127.0.0.1:0"

    async def start_node(self, name: str) -> None:
        """Start a node, or start it again where it was."""
        address = self.addresses.get(name, "127.0.0.1:0")
        command = [command_of("fleet-node"), "--listen", address, "--identity", name, "--model", MODEL.name]
        command += ["--lanes", str(LANES), "--decode-rate", str(DECODE_RATE)]
        command += ["--prefill-rate", str(PREFILL_RATE), "--vocab-size", str(MODEL.vocab_size)]
        self.nodes[name], line = await self.children.start(name, command, f"fleet-node: {name} on ")
        self.addresses[name] = line.rpartition(" ")[2]

    async def start_head(self) -> None:
        """Start the head, or start it again where it was, with what it has kept."""
        command = [command_of("fleet"), "serve", "--data-dir", str(self.data)]
        command += ["--listen", self.callers, "--admin-listen", self.operators]
        command += [f"--node={address}" for address in self.addresses.values()]
        self.head, line = await self.children.start("head", command, "fleet: serving")
        words = line.replace(",", "").split()
        self.callers = words[words.index("callers") + 2]
        self.operators = words[words.index("admin") + 2]

    async def kill_head(self) -> None:
        assert self.head is not None
        self.head.kill()
        await self.head.process.wait()


class Demo:
    """One run: the sessions, their ledger, and the troubles."""

    def __init__(self, requests: Sequence[trace.Request], fleet: Fleet, screen: Screen) -> None:
        self._requests = requests
        self._fleet = fleet
        self._screen = screen
        self.entries = [Entry(expected=_expected(request)) for request in requests]

    async def run(self, client: FleetClient) -> None:
        """Replay the trace to its end, with troubles on the way."""
        all_of_it = list(zip(self._requests, self.entries, strict=True))
        async with asyncio.TaskGroup() as tasks:
            shown = tasks.create_task(self._show())
            troubles = tasks.create_task(self._troubles())
            began_s = time.monotonic()
            answers = []
            for request, entry in all_of_it[:-LAST_ACT]:
                await asyncio.sleep(began_s + request.at_s * STRETCH - time.monotonic())
                answers.append(tasks.create_task(_answer(client, request, entry)))
            answered: asyncio.Future[Any] = asyncio.gather(*answers)
            await asyncio.wait([troubles, answered], return_when=asyncio.FIRST_COMPLETED)
            # A trouble that found no time to happen is not made up for: `moved` tells.
            troubles.cancel()
            last = [tasks.create_task(_answer(client, *each)) for each in all_of_it[-LAST_ACT:]]
            await self._last_act()
            await asyncio.gather(answered, *last)
            shown.cancel()
        self._update()

    async def _show(self) -> None:
        while True:
            self._update()
            await asyncio.sleep(0.2)

    def _update(self) -> None:
        answered = sum(entry.done for entry in self.entries)
        streaming = sum(entry.streaming for entry in self.entries)
        self._screen.update(answered, streaming, sum(len(entry.received) for entry in self.entries))

    async def _troubles(self) -> None:
        victim, caught = await self._busy_node(KILL_AT, among=NODES)
        self._screen.event(f"SIGKILL {victim}, with {len(caught)} answers under way on it")
        self._fleet.nodes[victim].kill()
        await _all_left(caught)
        self._screen.event(f"all {len(caught)} went on elsewhere or were complete")
        await asyncio.sleep(REBOOT_S)
        await self._fleet.start_node(victim)
        self._screen.event(f"{victim} started again")

        others = [name for name in NODES if name != victim]
        frozen, caught = await self._busy_node(FREEZE_AT, among=others)
        self._screen.event(f"SIGSTOP {frozen}, with {len(caught)} answers under way on it")
        self._fleet.nodes[frozen].freeze()
        await _all_left(caught)
        self._screen.event(f"all {len(caught)} went on elsewhere or were complete")
        await asyncio.sleep(FROZEN_AFTER_MOVES_S)
        self._fleet.nodes[frozen].thaw()
        self._screen.event(f"SIGCONT {frozen}: what it still had to say goes nowhere")

    async def _last_act(self) -> None:
        """Kill the head once it has begun all that was asked; start it again, and see all of it go on."""
        await _until(lambda: all(entry.done or entry.received for entry in self.entries))
        caught = [entry for entry in self.entries if entry.streaming]
        self._screen.event(f"SIGKILL the head, with {len(caught)} answers under way")
        killed_s = time.monotonic()
        await self._fleet.kill_head()
        await self._fleet.start_head()
        took_s = time.monotonic() - killed_s
        self._screen.event(f"the head started again with what it had kept, {took_s:.2f} s after the kill")
        await _until(lambda: all(entry.done or entry.outlived for entry in caught))
        longest_s = max((entry.away_s for entry in caught), default=0.0)
        self._screen.event(
            f"all {len(caught)} went on or were complete; the longest gap was {longest_s:.2f} s"
        )

    async def _busy_node(self, answered_part: float, among: Sequence[str]) -> tuple[str, list[Entry]]:
        """Wait for the moment, and for a node in the middle of some answers; gives it and those."""
        while True:
            answered = sum(entry.done for entry in self.entries)
            by_node = {name: [e for e in self.entries if e.streaming and e.node == name] for name in among}
            name = max(by_node, key=lambda each: len(by_node[each]))
            if answered >= answered_part * len(self.entries) and len(by_node[name]) >= WORTHWHILE_STREAMS:
                for entry in by_node[name]:
                    entry.caught_on = name
                return name, by_node[name]
            await asyncio.sleep(_POLL_S)


async def _until(condition: Callable[[], bool]) -> None:
    while True:
        if condition():
            return
        await asyncio.sleep(_POLL_S)


async def _all_left(caught: Sequence[Entry]) -> None:
    """Wait until each of these answers is complete, or goes on at another node than it was caught on."""
    await _until(lambda: all(entry.done or entry.node != entry.caught_on for entry in caught))


def _sampling(request: trace.Request) -> SamplingParams:
    """Every other session draws with a seed of its own, the others are greedy."""
    if request.number % 2:
        return SamplingParams(temperature=0.8, seed=1000 + request.number)
    return SamplingParams(temperature=0.0)


def _expected(request: trace.Request) -> list[int]:
    sampling = _sampling(request)
    seed = effective_seed(sampling.temperature, sampling.seed)
    return reference_tokens(MODEL, seed, request.prompt, request.answer_tokens)


async def _answer(client: FleetClient, request: trace.Request, entry: Entry) -> None:
    asked = CompleteRequest(
        session=SessionSpec(
            model=MODEL.name, sampling=_sampling(request), expected_output_tokens=request.answer_tokens
        ),
        token_ids=request.prompt,
        spec=GenerationSpec(max_new_tokens=request.answer_tokens, disconnect_grace_ms=round(1000 * AWAY_S)),
    )
    try:
        async with aclosing(client.complete(asked, lambda _: entry.cut_off())) as events:
            async for event in events:
                _note(entry, event)
    except CallError as error:
        entry.error = str(error)
    finally:
        entry.done = True


def _note(entry: Entry, event: GenerationEvent) -> None:
    kind = event.WhichOneof("event")
    if kind == "tokens":
        entry.take(event.tokens.first_index, event.tokens.token_ids, time.monotonic())
    elif kind == "started":
        entry.node = event.started.node
    elif kind == "moved":
        entry.node = event.moved.to_node
        entry.moves.append(MoveCause.Name(event.moved.cause).removeprefix("MOVE_CAUSE_"))
    elif kind == "finished":
        entry.finish = FinishReason.Name(event.finished.reason).removeprefix("FINISH_REASON_")
        if event.finished.HasField("error"):
            entry.error = f"{event.finished.error.reason}: {event.finished.error.message}"


async def _await_nodes(client: FleetClient) -> None:
    """Wait until the head has a connection to every node."""
    while True:
        reply = await client.ask(client.admin.ListNodes(ListNodesRequest(), timeout=10))
        up = [node for node in reply.nodes if node.state == NodeState.NODE_STATE_UP]
        if len(up) == len(NODES):
            return
        await asyncio.sleep(_POLL_S)


async def demonstrate(folder: Path, sessions: int, *, as_json: bool) -> int:
    """Run it all; gives the exit code."""
    requests = trace.load(sessions, MODEL.vocab_size)
    with make_screen(len(requests), as_json=as_json) as screen:
        async with Children(folder) as children, asyncio.timeout(DEADLINE_S):
            fleet = Fleet(children, folder / "kept")
            await asyncio.gather(*(fleet.start_node(name) for name in NODES))
            await fleet.start_head()
            async with FleetClient(fleet.callers, fleet.operators, reattach_s=AWAY_S) as client:
                await _await_nodes(client)
                screen.event(f"a head on {fleet.callers} and nodes {', '.join(NODES)} are up")
                demo = Demo(requests, fleet, screen)
                await demo.run(client)
    return verdict(demo.entries, as_json=as_json)


def verdict(entries: list[Entry], *, as_json: bool) -> int:
    """Print the totals; 0 only if every answer is exact, some had to move, and some outlived the head."""
    sums = total(entries)
    right = sums.exact == sums.sessions and not sums.lost and not sums.repeated
    shown = right and sums.moved > 0 and sums.outlived > 0
    if as_json:
        print(json.dumps({"shown": shown, **asdict(sums)}))
    else:
        print_table(entries)
        for entry in entries:
            if not entry.exact:
                wrong = entry.error or f"{entry.lost} lost, {entry.repeated} repeated, finish {entry.finish}"
                print(f"not exact: an answer of {len(entry.expected)} tokens: {wrong}")
        if not sums.moved:
            print("no answer had to move, so nothing was shown")
        if not sums.outlived:
            print("no answer was under way when the head died, so that was not shown")
    line = (
        f"demo: {sums.sessions} sessions, {sums.exact} exact, {sums.lost} lost,"
        f" {sums.repeated} repeated, {sums.moved} moved,"
        f" {sums.outlived} outlived the head (longest gap {sums.longest_away_s:.2f} s)"
    )
    print(line, file=sys.stderr if as_json else sys.stdout)
    return 0 if shown else 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the totals as JSON")
    parser.add_argument("--sessions", type=int, default=150, help="how many requests of the trace to replay")
    options = parser.parse_args()
    return run_to_exit_code(
        "demo", lambda folder: demonstrate(folder, options.sessions, as_json=options.json)
    )


if __name__ == "__main__":
    sys.exit(main())
