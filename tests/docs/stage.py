"""Where the commands of a document are run: a folder that looks like the checkout, with ports of its own.

A command that serves (a head, a node) runs until its block ends. What asks a head, in a block that starts
none, finds a fleet of two nodes.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tests.certificates import Authority
from tests.docs.documents import ROOT
from tests.ports import quiet_port

PATIENCE_S = 60.0
NODES = {"node-1": "8454", "node-2": "8464", "spare": "8474"}
"""The fleet's nodes, by the ports that documents give them; the last one is not the head's yet."""

HOSTS = {
    "dns:///nodes.default.svc.cluster.local": "dns:///localhost:8454",
    "dns:///nodes.example:8454": "dns:///localhost:8464",
    "node-1.example:8454": "127.0.0.1:8454",
    "node-2.example:8454": "127.0.0.1:8464",
    "head.example": "127.0.0.1",
    "node.example": "127.0.0.1",
    "HOST:PORT": "127.0.0.1:8474",
}
WORDS = {"NAME": "node-2", "node-a": "node-2", "M": "demo"}
"""Words that stand for something of the reader's."""
NO_HEAD = re.compile(r"\bfleet (token|access|config|store)\b|^\. ")
"""Commands that ask no head."""
READY = {"fleet": "fleet: serving", "fleet-node": "fleet-node: "}


class CommandError(Exception):
    """A command of a document did not work; the text has what it said."""


@dataclass
class Server:
    """A head or a node."""

    program: str
    process: subprocess.Popen[str]
    log: Path
    output: IO[str]

    def stop(self) -> None:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
            with suppress(subprocess.TimeoutExpired):
                self.process.send_signal(number)
                self.process.wait(timeout=3)
                break
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.output.close()

    def said(self) -> str:
        return self.log.read_text(encoding="utf-8")

    def until_it_says(self, text: str, times: int = 1) -> None:
        give_up = time.monotonic() + PATIENCE_S
        while self.said().count(text) < times:
            if self.process.poll() is not None or time.monotonic() > give_up:
                raise CommandError(f"{self.program} did not say {text!r} {times} times:\n{self.said()}")
            time.sleep(0.05)


class Stage:
    """Runs the blocks of one document, in their order."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.servers: list[Server] = []
        self._is_default = False
        self._heads = 0
        self._ports = {str(port): str(quiet_port()) for port in (*range(8454, 8460), 8464, 8474)}
        for each in ROOT.iterdir():
            if each.name not in {"build", "dist", "gen"}:
                (folder / each.name).symlink_to(each)
        authority = Authority(folder)
        for name in ("head", "node"):
            authority.issue(name)
        self.run("fleet token --file token", needs_head=False)

    # ---------------------------------------------------------------------------------------- one block

    def shell(self, commands: list[str]) -> None:
        """Run a block of commands. Raises CommandError."""
        if any(self.serves(command) for command in commands):
            self.stop()
        for command in commands:
            if program := self.serves(command):
                self._start_server(command, program)
            else:
                self.run(command, needs_head=not NO_HEAD.search(command))
        self._check_links()
        if not self._is_default or any(word in " ".join(commands) for word in ("nodes add", "nodes remove")):
            self.stop()

    def python(self, text: str) -> str:
        """Run a program; what it printed."""
        file = self.folder / "snippet.py"
        file.write_text(self.placed(text), encoding="utf-8")
        return self.run(f"{sys.executable} {file}")

    def run(self, command: str, *, needs_head: bool = True) -> str:
        """Run one command to its end; what it printed. Raises CommandError when it fails."""
        if needs_head and not any(server.program == "fleet" for server in self.servers):
            self.start_fleet()
        try:
            done = subprocess.run(
                ["bash", "-c", self.placed(command)],
                cwd=self.folder,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=PATIENCE_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise CommandError(f"{command}\ndid not end within {PATIENCE_S:.0f} s") from None
        if done.returncode:
            raise CommandError(f"{command}\nended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout

    @staticmethod
    def serves(command: str) -> str:
        """The program, where the command runs until it is told to end; otherwise empty."""
        words = [word for word in shlex.split(command) if "=" not in word or word.startswith("-")]
        program = Path(words[0]).name
        if program == "fleet-node" or (program == "fleet" and words[1:2] == ["serve"]):
            return program
        return ""

    # ------------------------------------------------------------------------------------------ servers

    def start_fleet(self, tokens_per_s: int = 5000) -> None:
        """Two nodes of a head's, and one that it does not know yet."""
        pace = f"--decode-rate {tokens_per_s} --grace 0"
        for name, port in NODES.items():
            node = f"fleet-node --model demo --identity {name} --listen 127.0.0.1:{port} {pace}"
            self._start_server(node, "fleet-node")
        nodes = [f"--node 127.0.0.1:{port}" for name, port in NODES.items() if name != "spare"]
        head = self._start_server(f"fleet serve {' '.join(nodes)}", "fleet")
        head.until_it_says("node_up", len(nodes))
        self._is_default = True

    def node(self, name: str) -> Server:
        return self.servers[list(NODES).index(name)]

    def stop(self) -> None:
        """End all that serves."""
        for server in self.servers:
            server.process.terminate()
        for server in self.servers:
            server.stop()
        self.servers.clear()
        self._is_default = False

    def _start_server(self, command: str, program: str) -> Server:
        command = command.removesuffix("&").strip()
        if program == "fleet":
            self._check_links()
            for server in [each for each in self.servers if each.program == "fleet"]:
                server.stop()
                self.servers.remove(server)
            self._heads += 1
            for flag, port in (("--listen", "8455"), ("--admin-listen", "8456")):
                command += "" if f"{flag} " in command else f" {flag} 127.0.0.1:{port}"
        elif "--listen" not in command and "--join" not in command:
            command += " --listen 127.0.0.1:8454"
        log = self.folder / f"server-{time.monotonic_ns()}.log"
        output = log.open("w", encoding="utf-8")
        process = subprocess.Popen(
            ["bash", "-c", f"exec env {self.placed(command)}"],
            cwd=self.folder,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
        )
        server = Server(program, process, log, output)
        self.servers.append(server)
        assert process.stdout is not None
        if not process.stdout.readline().startswith(READY[program]):
            raise CommandError(f"{command}\ndid not start:\n{server.said()}")
        return server

    def _check_links(self) -> None:
        """A head that was started along with a node has it."""
        heads = [server for server in self.servers if server.program == "fleet"]
        if heads and len(self.servers) > len(heads):
            heads[0].until_it_says("node_up")

    # -------------------------------------------------------------------------------- places and names

    def placed(self, text: str) -> str:
        """The text with this stage's ports, hosts and files."""
        for host, here in HOSTS.items():
            text = text.replace(host, here)
        text = text.replace("/etc/fleet/", f"{self.folder}/")
        for word, meant in WORDS.items():
            text = re.sub(rf"(?<=\s){word}(?=\s|$)", meant, text)
        return re.sub(r"(?<=:)84[5-7]\d\b", lambda port: self._ports[port[0]], text)

    def environment(self) -> dict[str, str]:
        clean = {
            name: value for name, value in os.environ.items() if not name.startswith(("FLEET_", "OTEL_"))
        }
        return clean | {
            "PATH": f"{ROOT / '.venv' / 'bin'}:{clean['PATH']}",
            "HOME": str(self.folder),
            # Each head begins with nothing; what looks into a store sees the last one's.
            "XDG_STATE_HOME": str(self.folder / f"state-{self._heads}"),
            "PYTHONUNBUFFERED": "1",
            "FLEET_ADDRESS": f"127.0.0.1:{self._ports['8455']}",
            "FLEET_ADMIN_ADDRESS": f"127.0.0.1:{self._ports['8456']}",
        }
