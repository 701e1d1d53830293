"""Completion: what a shell is told when its user presses Tab, and the script that asks for it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAMS = {"fleet": "from fleet_service.cli import main", "fleet-node": "from node_stub.cli import main"}


def ask(program: str, **environ: str) -> str:
    """What the program prints to a shell."""
    code = f"import sys; sys.argv[0] = {program!r}; {PROGRAMS[program]}; main()"
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, env=os.environ | environ, check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "typed,offered",
    [
        ("fleet con", ["config", "conformance"]),
        ("fleet nodes pr", ["probe"]),
        ("fleet conformance --ru", ["--rule"]),
        ("fleet-node --decode", ["--decode-rate"]),
    ],
)
def test_tab_completes_commands_and_flags(typed: str, offered: list[str]) -> None:
    program, *words = typed.split()
    variable = f"_{program.upper().replace('-', '_')}_COMPLETE"
    answer = ask(program, **{variable: "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(words))})
    assert answer.split() == offered


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize("program", sorted(PROGRAMS))
def test_a_script_for_each_shell_asks_the_program(program: str, shell: str) -> None:
    variable = f"_{program.upper().replace('-', '_')}_COMPLETE"
    script = ask(program, **{variable: f"source_{shell}"})
    assert f"{variable}=complete_{shell}" in script
    assert program in script
