"""What the commands `fleet` and `fleet-node` know, and what a text names that they do not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Any

import typer.main

from fleet_service.cli.root import app as fleet_app
from node_stub.command import app as node_app

# The library hands out its own kind of command, which has no public type.
PROGRAMS: dict[str, Any] = {
    "fleet": typer.main.get_command(fleet_app),
    "fleet-node": typer.main.get_command(node_app),
}


def unknown_words(command_line: Sequence[str]) -> list[str]:
    """The subcommands and flags of a command line that do not exist; empty when it is neither program's."""
    program = PurePath(command_line[0]).name
    if program not in PROGRAMS:
        return []
    command, wrong = PROGRAMS[program], []
    words = iter(command_line[1:])
    for word in words:
        if word.startswith("--"):
            flag, equals, _ = word.partition("=")
            option = options_of(command).get(flag)
            if option is None:
                wrong.append(f"{program} {flag}")
            elif not option.is_flag and not equals:
                next(words, None)
        elif inner := getattr(command, "commands", None):
            if word not in inner:
                return [*wrong, f"{program} {word}"]
            command = inner[word]
            program = f"{program} {word}"
    return wrong


def options_of(command: Any) -> dict[str, Any]:
    """The options of a command by each of their names."""
    return {name: each for each in command.params for name in (*each.opts, *each.secondary_opts)} | {
        "--help": _Help
    }


def every_option() -> frozenset[str]:
    """Every flag of every command and subcommand."""
    return frozenset(name for command in _all() for name in options_of(command) if name.startswith("--"))


def every_variable() -> frozenset[str]:
    """Every environment variable that a flag can come from."""
    return frozenset(each.envvar for command in _all() for each in command.params if each.envvar)


def _all() -> Iterator[Any]:
    waiting = list(PROGRAMS.values())
    while waiting:
        command = waiting.pop()
        yield command
        waiting += getattr(command, "commands", {}).values()


class _Help:
    is_flag = True
