"""`fleet serve` and `fleet config`: the head itself, and the settings it would run with.

What only these two need is imported when they run: it takes longer than the other commands do.
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fleet_service.cli.kinds import PlainCommand
from fleet_service.cli.options import AsJson, examples
from fleet_service.cli.output import print_json, say
from fleet_service.cli.running import FAILED, WRONG_USE, fail

if TYPE_CHECKING:
    from fleet_service.config_sources import Loaded, Setting

_LINE_CHARS = 118
_LEAST_COMMENT_CHARS = 40

ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        envvar="FLEET_CONFIG",
        metavar="FILE",
        help="Settings as TOML; `fleet config` prints some.",
    ),
]
Nodes = Annotated[
    list[str] | None,
    typer.Option(
        "--node",
        metavar="HOST:PORT",
        help="A node to connect to, or dns:///NAME:PORT for all of a name; repeatable.",
        show_default="none",
    ),
]
Listen = Annotated[
    str | None,
    typer.Option(
        "--listen",
        metavar="HOST:PORT",
        help="Address for callers; port 0 = any free.",
        show_default="127.0.0.1:8455",
    ),
]
AdminListen = Annotated[
    str | None,
    typer.Option(
        "--admin-listen", metavar="HOST:PORT", help="Address for operators.", show_default="127.0.0.1:8456"
    ),
]
JoinListen = Annotated[
    str | None,
    typer.Option(
        "--join-listen",
        metavar="HOST:PORT",
        help="Address for nodes that dial in.",
        show_default="none",
    ),
]
MetricsListen = Annotated[
    str | None,
    typer.Option(
        "--metrics-listen",
        metavar="HOST:PORT",
        help="Address for Prometheus, at /metrics; 8458 by custom.",
        show_default="none",
    ),
]
PageListen = Annotated[
    str | None,
    typer.Option(
        "--page-listen",
        metavar="HOST:PORT",
        help="Address for the operators' web page; 8459 by custom.",
        show_default="none",
    ),
]
DataDir = Annotated[
    str | None,
    typer.Option(
        "--data-dir",
        metavar="FOLDER",
        help="Where sessions and answers are kept over a restart of the head.",
        show_default="one of the user's, by the head's id",
    ),
]
DurabilityOption = Annotated[
    str | None,
    typer.Option(
        "--durability",
        metavar="HOW",
        help="strict: told once on disk; relaxed: told at once; memory: nothing is kept.",
        show_default="strict",
    ),
]
TokenFile = Annotated[
    str | None,
    typer.Option(
        "--token-file",
        metavar="FILE",
        help="The fleet token, as `fleet token` makes it, which nodes must know.",
        show_default="none",
    ),
]
NoAuth = Annotated[
    bool,
    typer.Option(
        "--insecure-no-auth",
        help="Listen beyond this machine though nobody is asked who he is: neither nodes for a fleet token, "
        "nor callers and operators for access tokens.",
    ),
]
Policy = Annotated[
    str | None,
    typer.Option("--policy", help="load-aware, least-loaded or round-robin.", show_default="load-aware"),
]
Grace = Annotated[
    float | None,
    typer.Option(
        "--shutdown-grace",
        metavar="SECONDS",
        help="How long generations may go on after SIGTERM.",
        show_default="30",
    ),
]
LogLevel = Annotated[
    str | None, typer.Option("--log-level", help="debug, info, warning or error.", show_default="info")
]
LogFormat = Annotated[
    str | None, typer.Option("--log-format", help="console or json.", show_default="console")
]
OtlpEndpoint = Annotated[
    str | None,
    typer.Option("--otlp-endpoint", metavar="URL", help="Where traces go by OTLP/gRPC.", show_default="none"),
]
Others = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Any setting, as `fleet config` names it; repeatable."),
]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(
        cls=PlainCommand,
        epilog=examples(
            "fleet serve --node 127.0.0.1:8454",
            "fleet serve --config fleet.toml --set head.silence_s=3",
            "FLEET_NODES=node-1.example,node-2.example fleet serve --token-file token",
            "fleet serve --node 127.0.0.1:8454 --listen 0.0.0.0:8455 --set access_file=access.toml",
        ),
    )(serve)
    app.command(
        cls=PlainCommand,
        epilog=examples(
            "fleet config > fleet.toml",
            "FLEET_HEAD__SILENCE_S=3 fleet config --json",
            "fleet config --config fleet.toml --set head.policy=round-robin",
        ),
    )(config)


def serve(  # noqa: PLR0913 - one argument per option
    *,
    config_file: ConfigFile = None,
    node: Nodes = None,
    listen: Listen = None,
    admin_listen: AdminListen = None,
    join_listen: JoinListen = None,
    metrics_listen: MetricsListen = None,
    page_listen: PageListen = None,
    data_dir: DataDir = None,
    durability: DurabilityOption = None,
    token_file: TokenFile = None,
    insecure_no_auth: NoAuth = False,
    policy: Policy = None,
    shutdown_grace: Grace = None,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
    otlp_endpoint: OtlpEndpoint = None,
    others: Others = None,
) -> None:
    """Run a head until SIGTERM or SIGINT; a second signal ends it at once.

    Flags win over FLEET_* variables (FLEET_HEAD__SILENCE_S=3), those over the file, the file over defaults.

    Once it serves it says so in one line: fleet: serving callers on HOST:PORT, admin on HOST:PORT
    """
    loaded = _load(
        config_file,
        _given(
            nodes=("--node", ",".join(node) if node else None),
            listen__callers=("--listen", listen),
            listen__admin=("--admin-listen", admin_listen),
            listen__join=("--join-listen", join_listen),
            listen__metrics=("--metrics-listen", metrics_listen),
            listen__page=("--page-listen", page_listen),
            store__folder=("--data-dir", data_dir),
            store__durability=("--durability", durability),
            token_file=("--token-file", token_file),
            insecure_no_auth=("--insecure-no-auth", insecure_no_auth or None),
            head__policy=("--policy", policy),
            shutdown_grace_s=("--shutdown-grace", shutdown_grace),
            log__level=("--log-level", log_level),
            log__format=("--log-format", log_format),
            telemetry__otlp_endpoint=("--otlp-endpoint", otlp_endpoint),
        ),
        others,
    )
    from fleet_service.app import CredentialsError, StartError, run

    try:
        run(loaded.config, announce=typer.echo)
    except CredentialsError as error:
        fail(str(error), WRONG_USE)
    except StartError as error:
        fail(str(error), FAILED)


def config(*, config_file: ConfigFile = None, others: Others = None, as_json: AsJson = False) -> None:
    """Print the settings in effect and where each came from, as a TOML file; secrets are masked."""
    loaded = _load(config_file, {}, others)
    if as_json:
        print_json(
            {
                setting.name: {
                    "value": setting.value,
                    "source": setting.source.kind,
                    "from": setting.source.name,
                    "description": setting.description,
                }
                for setting in loaded.settings()
            }
        )
        return
    for line in _toml(list(loaded.settings())):
        typer.echo(line)


def _given(**flags: tuple[str, Any]) -> dict[str, tuple[str, Any]]:
    """Flags that were used, by setting; `__` in a keyword stands for the point in the name."""
    return {
        name.replace("__", "."): (flag, value) for name, (flag, value) in flags.items() if value is not None
    }


def _load(file: Path | None, flags: dict[str, tuple[str, Any]], others: list[str] | None) -> Loaded:
    for pair in others or []:
        name, sign, value = pair.partition("=")
        if not name or not sign:
            raise typer.BadParameter(f"{pair!r}: write NAME=VALUE, for example head.silence_s=3")
        flags[name.strip()] = ("--set", value)
    from fleet_service.config_sources import ConfigError, load

    try:
        loaded = load(flags, file)
    except ConfigError as error:
        fail(f"the settings cannot be used:\n{error}", WRONG_USE)
    for variable in loaded.unused_variables:
        hint = f"did you mean {variable.meant}?" if variable.meant else "`fleet config` lists them"
        say(f"fleet: {variable.name} is set, but names no setting and is ignored; {hint}")
    return loaded


def _toml(settings: list[Setting]) -> list[str]:
    """The settings as a TOML file whose comments say where each came from and what it is."""
    pairs = [
        (setting, f"{setting.name.rpartition('.')[2]} = {_literal(setting.value)}") for setting in settings
    ]
    width = min(48, max(len(text) for _, text in pairs))
    lines = []
    section = ""
    for setting, text in pairs:
        if (here := setting.name.rpartition(".")[0]) != section:
            section = here
            lines += ["", f"[{section}]"]
        # A comment too long for its line goes on below itself.
        start = max(width, len(text))
        room = max(_LINE_CHARS - start - len("  # "), _LEAST_COMMENT_CHARS)
        comment = textwrap.wrap(
            f"{setting.source}: {setting.description}",
            room,
            subsequent_indent="  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        lines.append(f"{text:<{start}}  # {comment[0]}")
        lines += [f"{'':<{start}}  # {more}" for more in comment[1:]]
    return lines


def _literal(value: Any) -> str:
    # Booleans, numbers, strings and lists of them are written the same in TOML and in JSON.
    return json.dumps(value, ensure_ascii=False)
