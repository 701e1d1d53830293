"""Simulated readers of a generation: prompt, slow, late, leaving and coming back; all must get the same."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

from fleet_service.domain.errors import FleetError, Reason
from fleet_service.domain.specs import OnDisconnect
from fleet_service.runtime.generation import Generation
from fleet_service.runtime.head import Head
from fleet_service.runtime.tokenlog import Reader
from fleet_service.runtime.views import CancelOutcome
from tests.sim.oracle import Oracle
from tests.sim.records import Plan, Record
from tests.sim.talking import Talk
from tests.sim.transcripts import Transcript


@dataclass(frozen=True, slots=True)
class ReadingHabits:
    """How a generation is read. Times in seconds."""

    pace_s: float  # between reads of the first reader
    leave_at: int | None  # index at which the first reader goes away
    away_s: float
    comes_back: bool
    others: tuple[tuple[float, float], ...]  # further readers: when they attach, their pace
    cancel_after_s: float | None
    cancel_at: int | None  # index at which the first reader cancels, then and there


def pick_habits(rng: random.Random, plan: Plan) -> ReadingHabits:
    leaves = rng.random() < 0.2
    away_s = rng.random() * 3.0
    comes_back = plan.spec.on_disconnect is OnDisconnect.CONTINUE or away_s < plan.grace_s
    return ReadingHabits(
        pace_s=rng.choice([0.0, 0.0, 0.0, 0.3, 1.5]),
        leave_at=rng.randint(0, plan.max_new_tokens) if leaves else None,
        away_s=away_s,
        comes_back=comes_back,
        others=tuple(
            (rng.random() * 4.0, rng.choice([0.0, 0.0, 0.5, 2.0])) for _ in range(rng.choice([0, 0, 1, 2]))
        ),
        cancel_after_s=rng.choice([0.0, rng.random() * 0.2, rng.random() * 4.0])
        if rng.random() < 0.15
        else None,
        cancel_at=rng.randint(0, plan.max_new_tokens) if rng.random() < 0.07 else None,
    )


async def read_along(
    oracle: Oracle,
    talk: Talk,
    record: Record,
    habits: ReadingHabits,
    rng: random.Random,
    earlier: Transcript | None = None,
) -> None:
    """All readers of one generation, until each has its terminal event and the generation its end.

    `earlier`: who read one of this id that was lost, and has not heard of that.
    """
    async with asyncio.TaskGroup() as group:
        if earlier is not None:
            talk.owns(group.create_task(_read(talk, earlier, 0.0, None)))
        talk.owns(group.create_task(_first(oracle, talk, record, habits)))
        for number, (after_s, pace_s) in enumerate(habits.others):
            another = _another(oracle, talk, record, number, after_s, pace_s, rng.random())
            talk.owns(group.create_task(another))


async def _first(oracle: Oracle, talk: Talk, record: Record, habits: ReadingHabits) -> None:
    reader = record.first_reader = oracle.transcript(record, "first reader", 0)
    if habits.cancel_at is not None:
        await _read(talk, reader, habits.pace_s, habits.cancel_at)
        if reader.finished is None:
            await cancel(oracle, talk, record)
            reader.name = "first reader, having cancelled"
    if reader.finished is None:
        await _read(talk, reader, habits.pace_s, habits.leave_at)
    if reader.finished is not None:
        return
    oracle.story.note("%s: its first reader leaves at %d", record.generation_id, reader.next_index)
    if habits.comes_back:
        await asyncio.sleep(habits.away_s)
        reader.name = "first reader again"
        await _read(talk, reader, habits.pace_s, None)
        return
    # Nobody may be left to read; the end must come all the same.
    last = oracle.transcript(record, "reader of the end", 0)
    await _until_finished(record)
    await _read(talk, last, 0.0, None)


async def cancel(oracle: Oracle, talk: Talk, record: Record) -> None:
    """A caller's cancel, and whether its answer is the truth (rule 5)."""
    oracle.story.note("%s: its caller cancels", record.generation_id)

    async def ask(head: Head) -> None:
        now_s = asyncio.get_running_loop().time()
        record.cancel_asked_s = record.cancel_asked_s or now_s
        record.cancel_waits_s = record.cancel_waits_s or now_s
        before = record.finished
        result = await head.cancel_generation(record.generation_id)
        if result.finished is None or result.finished != record.finished:
            oracle.violation(f"the cancel of {record.generation_id} gave {result}")
        elif before is None and result.outcome is not CancelOutcome.CANCELLED:
            oracle.violation(f"{record.generation_id} ran, and its cancel gave {result}")

    await talk.call(ask)


async def _another(
    oracle: Oracle, talk: Talk, record: Record, number: int, after_s: float, pace_s: float, where: float
) -> None:
    await asyncio.sleep(after_s)

    log = await talk.look(lambda head: head.find_generation(record.generation_id).log)
    from_index = int(where * (log.visible + 1)) if where < 0.7 else 0
    name = f"reader {number + 2} from {from_index}"
    await _read(talk, oracle.transcript(record, name, from_index, log.branch), pace_s, None)


async def read_to_the_end(oracle: Oracle, talk: Talk, record: Record) -> None:
    """One more reader, from the start."""
    await _read(talk, oracle.transcript(record, "reader of all", 0), 0.0, None)


async def _until_finished(record: Record) -> None:
    """The generation's own timers end it; a fault of the head is caught by the time limit of the world."""
    while record.finished is None:
        await asyncio.sleep(0.5)


async def _read(talk: Talk, transcript: Transcript, pace_s: float, leave_at: int | None) -> None:
    """Read until the terminal event, or until `leave_at`; over the death of a head where that may be."""

    async def read(head: Head) -> None:
        if transcript.finished is None:
            generation = head.find_generation(transcript.record.generation_id)
            await _read_there(generation, transcript, pace_s, leave_at)

    await talk.call(read)


async def _read_there(
    generation: Generation, transcript: Transcript, pace_s: float, leave_at: int | None
) -> None:
    loop, record = asyncio.get_running_loop(), transcript.record
    reader, life = _attach(generation, transcript), record.life
    transcript.attaches(reader.branch)
    record.readers_open += 1
    record.readers_seen += 1
    record.abandoned_s = None
    try:
        while transcript.finished is None:
            if leave_at is not None and transcript.next_index >= leave_at:
                break
            transcript.feed(await reader.read())
            if pace_s:
                await asyncio.sleep(pace_s)
    except FleetError as error:
        transcript.is_left(error)
        raise
    finally:
        if record.life == life:
            record.readers_open -= 1
            if record.readers_open == 0 and record.finished is None and not record.runs_on_alone:
                record.abandoned_s = loop.time()
        reader.close()


def _attach(generation: Generation, transcript: Transcript) -> Reader:
    """Where it has more than is sure, it drops that."""
    try:
        return generation.attach(transcript.next_index, transcript.branch)
    except FleetError as error:
        if error.reason is not Reason.DATA_LOSS:
            raise
        transcript.loses(error)
        return generation.attach(transcript.next_index, transcript.branch)
