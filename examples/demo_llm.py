"""`make demo-llm`: a real model answers a question in words, and loses its node in mid-sentence.

Two nodes with a small language model and a head are started as processes of their own, a question is asked,
and the answer printed as it comes. In the middle of a sentence its node is killed; the other one goes on
from exactly there. Then the same question is asked again and left alone, to see whether the rest is the same.
Exits with 0 when the answer came whole: every token once and in order, what was said before the kill still
standing at the end, finished as it should, and moved. That the rest equals the undisturbed answer is shown,
not required.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from examples.processes import Child, Children, command_of, run_to_exit_code
from fleet.v1.admin_service_pb2 import ListNodesRequest, NodeState
from fleet.v1.fleet_service_pb2 import (
    CompleteRequest,
    Finished,
    GenerationEvent,
    GenerationSpec,
    MoveCause,
    Moved,
    SessionSpec,
)
from fleet.v1.types_pb2 import FinishReason
from fleet_service.client import REATTACH_GRACE_MS, FleetClient
from node_stub.llama_server import find_model_file
from node_stub.llama_text import TextStream, Vocabulary

QUESTION = "Why is the sky blue?"
MODEL = "smollm2"
NODES = ("node-1", "node-2")
MAX_TOKENS = 240
WINDOW_TOKENS = 2048
# The kill comes at the first word after so many tokens that does not end its sentence.
KILL_AFTER_TOKENS = 40
DEADLINE_S = 150.0
_POLL_S = 0.05


@dataclass(slots=True)
class Answer:
    """One answer as its reader sees it. `said` is its text when its node was killed, empty if none was."""

    generation_id: str = ""
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    contiguous: bool = True
    node: str = ""
    said: str = ""
    said_token_ids: list[int] = field(default_factory=list)
    moves: list[Moved] = field(default_factory=list)
    finished: Finished | None = None

    @property
    def complete(self) -> bool:
        """Finished for a reason of its own, with as many tokens as were delivered."""
        if self.finished is None or self.finished.output_tokens != len(self.token_ids):
            return False
        return self.finished.reason in (FinishReason.FINISH_REASON_EOS, FinishReason.FINISH_REASON_LENGTH)


class Screen:
    """The answer as running text, and what happens to it on lines of their own."""

    def __init__(self, out: TextIO | None) -> None:
        """`out` None: show nothing."""
        self._out = out
        self._in_line = False

    def text(self, text: str) -> None:
        if text and self._out:
            self._out.write(text)
            self._out.flush()
            self._in_line = not text.endswith("\n")

    def event(self, text: str) -> None:
        self.line(f"    -- {text}")

    def line(self, text: str) -> None:
        if self._out:
            lead = "\n" if self._in_line else ""
            self._out.write(f"{lead}{text}\n")
            self._out.flush()
            self._in_line = False


class Asker:
    """Asks a question and reads the answer: text at this end, token ids from here on."""

    def __init__(self, client: FleetClient, vocabulary: Vocabulary, screen: Screen) -> None:
        self._client = client
        self._vocabulary = vocabulary
        self._screen = screen

    async def ask(self, question: str, max_tokens: int, kill: Callable[[str], None] | None = None) -> Answer:
        """`kill` is called once, in mid-sentence, with the name of the node that is answering."""
        prompt = await asyncio.to_thread(self._vocabulary.prompt, [{"role": "user", "content": question}])
        request = CompleteRequest(
            session=SessionSpec(model=MODEL, expected_output_tokens=max_tokens),
            token_ids=prompt,
            spec=GenerationSpec(max_new_tokens=max_tokens, disconnect_grace_ms=REATTACH_GRACE_MS),
        )
        answer = Answer()
        stream = TextStream(self._vocabulary)
        async with aclosing(self._client.complete(request)) as events:
            async for event in events:
                await self._note(answer, stream, event)
                if kill and not answer.said and _in_mid_sentence(answer):
                    answer.said, answer.said_token_ids = answer.text, list(answer.token_ids)
                    kill(answer.node)
                    self._screen.event(
                        f"SIGKILL {answer.node}, in mid-sentence, after {len(answer.token_ids)} tokens"
                    )
        answer.text += stream.finish()
        return answer

    async def read_again(self, answer: Answer) -> list[int]:
        """The answer as the head keeps it."""
        events: AsyncGenerator[GenerationEvent]
        async with aclosing(self._client.attach(answer.generation_id)) as events:
            return [token_id async for event in events for token_id in event.tokens.token_ids]

    async def _note(self, answer: Answer, stream: TextStream, event: GenerationEvent) -> None:
        match event.WhichOneof("event"):
            case "accepted":
                answer.generation_id = event.accepted.generation_id
            case "started":
                answer.node = event.started.node
                self._screen.event(f"{answer.node} answers")
            case "tokens":
                answer.contiguous &= event.tokens.first_index == len(answer.token_ids)
                answer.token_ids += event.tokens.token_ids
                text = await asyncio.to_thread(stream.take, event.tokens.token_ids)
                answer.text += text
                self._screen.text(text)
            case "moved":
                moved = event.moved
                answer.moves.append(moved)
                answer.node = moved.to_node
                cause = MoveCause.Name(moved.cause).removeprefix("MOVE_CAUSE_").lower().replace("_", " ")
                self._screen.event(
                    f"moved from {moved.from_node} to {moved.to_node} ({cause}),"
                    f" {moved.gap_ms} ms later; goes on at token {moved.next_index}"
                )
            case "finished":
                answer.finished = event.finished
                reason = FinishReason.Name(event.finished.reason).removeprefix("FINISH_REASON_")
                times = event.finished.timings
                cause = f" ({event.finished.error.message})" if event.finished.HasField("error") else ""
                self._screen.event(
                    f"finished: {reason}{cause}, {event.finished.output_tokens} tokens in"
                    f" {times.total_ms / 1000:.1f} s, longest gap {times.longest_gap_ms / 1000:.2f} s"
                )


def _in_mid_sentence(answer: Answer) -> bool:
    return len(answer.token_ids) >= KILL_AFTER_TOKENS and answer.text[-1:].isalpha()


async def _start_node(children: Children, name: str) -> tuple[Child, str]:
    """Start a node; gives its address as well."""
    command = [command_of("fleet-node"), "--engine", "llama", "--model", MODEL, "--identity", name]
    command += ["--listen", "127.0.0.1:0", "--window", str(WINDOW_TOKENS), "--threads", "1"]
    child, line = await children.start(name, command, "fleet-node: ")
    return child, line.rpartition(" ")[2]


async def _start_head(children: Children, nodes: Iterable[str]) -> tuple[str, str]:
    """Start the head of the nodes at these addresses; gives its own for callers and operators."""
    command = [command_of("fleet"), "serve", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"]
    command += [f"--node={address}" for address in nodes]
    _, line = await children.start("head", command, "fleet: serving")
    words = line.replace(",", "").split()
    return words[words.index("callers") + 2], words[words.index("admin") + 2]


async def _await_nodes(client: FleetClient) -> None:
    while True:
        reply = await client.ask(client.admin.ListNodes(ListNodesRequest(), timeout=10))
        if sum(node.state == NodeState.NODE_STATE_UP for node in reply.nodes) == len(NODES):
            return
        await asyncio.sleep(_POLL_S)


async def demonstrate(folder: Path, question: str, max_tokens: int, *, as_json: bool) -> int:
    """Run it all; gives the exit code."""
    screen = Screen(sys.stderr if as_json else sys.stdout)
    async with Children(folder) as children, asyncio.timeout(DEADLINE_S):
        loading = asyncio.create_task(asyncio.to_thread(Vocabulary, find_model_file()))
        started = await asyncio.gather(*(_start_node(children, name) for name in NODES))
        nodes = {name: child for name, (child, _) in zip(NODES, started, strict=True)}
        callers, admin = await _start_head(children, (address for _, address in started))
        vocabulary = await loading
        async with FleetClient(callers, admin) as client:
            await _await_nodes(client)
            screen.event(f"a head and {len(NODES)} nodes with {find_model_file().stem} are up")
            screen.event(f"asked: {question}")
            asker = Asker(client, vocabulary, screen)
            answer = await asker.ask(question, max_tokens, lambda name: nodes[name].kill())
            kept = await asker.read_again(answer)
            screen.event("asking the same again, leaving its node alone")
            undisturbed = await Asker(client, vocabulary, Screen(None)).ask(question, max_tokens)
    return _verdict(answer, kept, undisturbed, screen, as_json=as_json)


def _verdict(answer: Answer, kept: list[int], undisturbed: Answer, screen: Screen, *, as_json: bool) -> int:
    said = len(answer.said_token_ids)
    stands = (
        said > 0
        and answer.token_ids[:said] == answer.said_token_ids
        and answer.text.startswith(answer.said)
        and kept == answer.token_ids
    )
    shown = answer.contiguous and stands and answer.complete and bool(answer.moves)
    equal = answer.token_ids == undisturbed.token_ids
    if not answer.said:
        screen.event("no word came in mid-sentence for the kill; ask something that takes a longer answer")
    elif equal:
        screen.event("undisturbed, the answer is the same to the last token")
    else:
        same = _common(answer.token_ids, undisturbed.token_ids)
        screen.event(f"undisturbed, the answer goes on differently from token {same} on:")
        screen.text(undisturbed.text)
    if as_json:
        facts = {
            "shown": shown,
            "tokens": len(answer.token_ids),
            "contiguous": answer.contiguous,
            "said_before_kill_stands": stands,
            "complete": answer.complete,
            "moves": len(answer.moves),
            "equals_undisturbed": equal,
            "text": answer.text,
            "said": answer.said,
        }
        print(json.dumps(facts))
    screen.line(
        f"demo-llm: {len(answer.token_ids)} tokens, {_or_not(answer.contiguous, 'contiguous')};"
        f" the {said} before the kill {'stand' if stands else 'do not stand'}; {len(answer.moves)} moved;"
        f" {_or_not(answer.complete, 'complete')}; {_or_not(equal, 'equal')} to the undisturbed answer"
    )
    return 0 if shown else 1


def _or_not(true: bool, word: str) -> str:  # noqa: FBT001 - reads as what it prints
    return word if true else f"not {word}"


def _common(first: list[int], second: list[int]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(first), len(second)))


def main() -> int:
    # gRPC's core writes notes of its own to standard error, between our lines.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    parser = argparse.ArgumentParser(prog="python -m examples.demo_llm", description=__doc__)
    parser.add_argument("question", nargs="?", default=QUESTION, help="what to ask")
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS, help="most tokens of the answer")
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")
    options = parser.parse_args()
    return run_to_exit_code(
        "demo-llm",
        lambda folder: demonstrate(folder, options.question, options.max_tokens, as_json=options.json),
    )


if __name__ == "__main__":
    sys.exit(main())
