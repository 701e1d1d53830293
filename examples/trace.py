"""The requests the demonstration replays: when they came, how long their prompts and answers were.

From the Azure Public Dataset, AzureLLMInferenceTrace 2023 (CC-BY 4.0); see data/SOURCES.md.
"""

from __future__ import annotations

import csv
import random
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

TRACE = Path(__file__).with_name("data") / "azure_llm_2023_conv_150.csv"
_MICROSECONDS = len("2023-11-16 18:15:46.680590")


@dataclass(frozen=True, slots=True)
class Request:
    """One request: seconds after the first, a prompt of the length that was real, tokens of its answer."""

    number: int
    at_s: float
    prompt: list[int]
    answer_tokens: int


def load(count: int, vocab_size: int, path: Path = TRACE) -> list[Request]:
    """The first `count` requests. The trace has lengths only: the ids are drawn, the same ones every time."""
    with path.open(newline="", encoding="ascii") as file:
        rows = list(csv.DictReader(file))[:count]
    # The trace counts in tenths of microseconds, which datetime does not.
    times = [datetime.fromisoformat(row["TIMESTAMP"][:_MICROSECONDS]) for row in rows]
    return [
        Request(
            number=number,
            at_s=(at - times[0]).total_seconds(),
            prompt=_prompt(number, int(row["ContextTokens"]), vocab_size),
            answer_tokens=int(row["GeneratedTokens"]),
        )
        for number, (row, at) in enumerate(zip(rows, times, strict=True))
    ]


def _prompt(number: int, length: int, vocab_size: int) -> list[int]:
    return random.Random(number).choices(range(3, vocab_size), k=length)
