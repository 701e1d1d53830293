"""The peers: plain gRPC proxies before sources, and routers of OpenAI-style HTTP before mock workers.

haproxy and nginx are Debian's packages and are used where they are installed. The routers come from the
Python package index, each into an environment of its own under $XDG_CACHE_HOME/fleet-bench, the first time.
Their settings are what each needs to relay, with everything that would cost more switched off where there is
a switch.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.processes import free_port, python, start_listening
from benchmarks.sse_way import MODEL
from benchmarks.targets import Nodes, Running, SkippedError, Target, start_sources
from examples.processes import Child, Children

_INSTALL_TIMEOUT_S = 600.0
_LITELLM_WORKS = ("full-32", "one-1", "one-64", "arriving", "paced-128x50-4")

_SURROUNDINGS = (
    # Nothing is fetched from outside, and nobody is asked who he is.
    "LITELLM_LOCAL_MODEL_COST_MAP=True",
    "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY=true",
    "LITELLM_LOG=ERROR",
)


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fleet-bench"


# ----------------------------------------------------------------------------------------------- gRPC proxies


def haproxy_config(port: int, sources: Sequence[str]) -> str:
    servers = "\n".join(f"    server s{i} {address} proto h2" for i, address in enumerate(sources))
    return f"""\
global
    maxconn 9000
    tune.h2.max-concurrent-streams 2000
defaults
    mode http
    timeout connect 5s
    timeout client 1h
    timeout server 1h
    http-reuse always
frontend callers
    bind 127.0.0.1:{port} proto h2
    default_backend sources
backend sources
    balance roundrobin
{servers}
"""


def nginx_config(folder: Path, port: int, sources: Sequence[str]) -> str:
    servers = " ".join(f"server {address};" for address in sources)
    return f"""\
daemon off;
worker_processes 1;
worker_rlimit_nofile 20000;
pid {folder}/nginx.pid;
error_log {folder}/error.log error;
user {_user()};
events {{ worker_connections 20000; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    keepalive_requests 100000000;
    http2_max_concurrent_streams 2000;
    upstream sources {{ {servers} keepalive 1024; keepalive_requests 100000000; }}
    server {{
        listen 127.0.0.1:{port} http2;
        location / {{ grpc_pass grpc://sources; grpc_read_timeout 1h; grpc_send_timeout 1h; }}
    }}
}}
"""


def _user() -> str:
    import pwd

    return pwd.getpwuid(os.getuid()).pw_name


@dataclass(frozen=True, slots=True)
class Proxy:
    """haproxy or nginx. Their callers' connections are multiplexed; nginx takes a connection to a source
    per call.
    """

    program: str
    shape: str = "complete"
    only: Sequence[str] = ()

    @property
    def name(self) -> str:
        return self.program

    def _found(self) -> str:
        found = shutil.which(self.program, path=f"{os.environ.get('PATH', '')}:/usr/sbin")
        if not found:
            raise SkippedError(f"{self.program} is not installed (Debian's package {self.program})")
        return found

    async def version(self) -> str:
        return await first_line(self._found(), "-v")

    async def start(self, children: Children, nodes: Nodes) -> Running:
        program, port = self._found(), free_port()
        addresses, sources = await start_sources(children, nodes, "complete")
        folder = children.folder
        config = folder / f"{self.program}-{port}.conf"
        if self.program == "haproxy":
            config.write_text(haproxy_config(port, addresses), encoding="utf-8")
            command = [program, "-f", str(config), "-db"]
        else:
            config.write_text(nginx_config(folder, port, addresses), encoding="utf-8")
            command = [program, "-c", str(config), "-p", str(folder), "-e", str(folder / "error.log")]
        child = await start_listening(children, self.program, command, port)
        return Running(f"127.0.0.1:{port}", [child], sources)


# ----------------------------------------------------------------------------------------------- HTTP routers


def sglang_flags(port: int, workers: Sequence[str], _: Path) -> list[str]:
    urls = [f"http://{worker}" for worker in workers]
    quiet = ["--log-level", "error", "--prometheus-port", str(free_port()), "--prometheus-host", "127.0.0.1"]
    serve = ["launch", "--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin", *quiet]
    return [*serve, "--worker-startup-check-interval", "1", "--worker-urls", *urls]


def vllm_flags(port: int, workers: Sequence[str], folder: Path) -> list[str]:
    return sglang_flags(port, workers, folder)[1:]


def litellm_flags(port: int, workers: Sequence[str], folder: Path) -> list[str]:
    models = "\n".join(
        f"  - model_name: {MODEL}\n    litellm_params:\n      model: openai/{MODEL}\n"
        f"      api_base: http://{worker}/v1\n      api_key: none"
        for worker in workers
    )
    config = folder / f"litellm-{port}.yaml"
    config.write_text(f"model_list:\n{models}\nlitellm_settings:\n  telemetry: false\n", encoding="utf-8")
    return ["--config", str(config), "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]


@dataclass(frozen=True, slots=True)
class Router:
    """A router of OpenAI-style HTTP, from the Python package index."""

    package: str
    version_wanted: str
    program: str
    flags: Callable[[int, Sequence[str], Path], list[str]]
    extra: str = ""
    only: Sequence[str] = ()
    shape: str = "sse"

    @property
    def name(self) -> str:
        return self.package

    async def version(self) -> str:
        await self._installed()
        return f"{self.package} {self.version_wanted}"

    async def _installed(self) -> Path:
        """Its program, installed where it is not yet. Raises SkippedError."""
        environment = cache_folder() / f"{self.package}-{self.version_wanted}"
        program = environment / "bin" / self.program
        done = environment / ".installed"
        if done.exists():
            return program
        print(f"installing {self.package} {self.version_wanted}", file=sys.stderr, flush=True)
        environment.parent.mkdir(parents=True, exist_ok=True)
        wanted = f"{self.package}{self.extra}=={self.version_wanted}"
        for command in (
            [sys.executable, "-m", "venv", "--clear", str(environment)],
            [
                str(environment / "bin" / "python"),
                "-m",
                "pip",
                "-q",
                "--disable-pip-version-check",
                "install",
                wanted,
            ],
        ):
            await self._run(command)
        done.touch()
        return program

    async def _run(self, command: Sequence[str]) -> None:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            output, _ = await asyncio.wait_for(process.communicate(), _INSTALL_TIMEOUT_S)
        except TimeoutError:
            process.kill()
            raise SkippedError(f"{self.package} took too long to install") from None
        if process.returncode:
            last = output.decode(errors="replace").strip().splitlines()[-1:]
            raise SkippedError(f"{self.package} could not be installed: {' '.join(last)}")

    async def start(self, children: Children, nodes: Nodes) -> Running:
        program, port = await self._installed(), free_port()
        workers = [await start_worker(children, nodes.rate, number) for number in range(nodes.number)]
        flags = self.flags(port, [address for address, _ in workers], children.folder)
        command = ["env", *_SURROUNDINGS, str(program), *flags]
        child = await start_listening(children, self.package, command, port, _INSTALL_TIMEOUT_S)
        return Running(f"127.0.0.1:{port}", [child], [worker for _, worker in workers])


async def start_worker(children: Children, rate: float, number: int, port: int = 0) -> tuple[str, Child]:
    """A mock worker; its address."""
    command = python("mock_worker", "--rate", str(rate), "--port", str(port))
    child, line = await children.start(f"worker-{number}", command, "mock-worker:")
    return line.split()[-1], child


@dataclass(frozen=True, slots=True)
class DirectSse:
    """Callers speak to a mock worker."""

    name: str = "direct (SSE)"
    shape: str = "sse"
    only: Sequence[str] = ()

    async def start(self, children: Children, nodes: Nodes) -> Running:
        address, worker = await start_worker(children, nodes.rate, 0)
        return Running(address, (), [worker])


async def first_line(*command: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    return output.decode(errors="replace").splitlines()[0].strip()


SGLANG = Router("sglang-router", "0.3.2", "sglang-router", sglang_flags)
VLLM = Router("vllm-router", "0.1.17", "vllm-router", vllm_flags)
LITELLM = Router("litellm", "1.106.12", "litellm", litellm_flags, "[proxy]", _LITELLM_WORKS)

RAMPS_S = {LITELLM.name: 8.0}
"""How long streams take to begin, where it is longer than with the others."""


def peers(*, quick: bool) -> list[Target]:
    """All of them, and what their workers do by themselves."""
    some: list[Target] = [DirectSse(), Proxy("haproxy"), SGLANG]
    return some if quick else [DirectSse(), Proxy("haproxy"), Proxy("nginx"), SGLANG, VLLM, LITELLM]
