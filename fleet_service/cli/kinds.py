"""The kinds of commands, and what those that call a head show it: an access token and TLS.

Both are given before a command's name, after it, or in variables. A command is PlainCommand, HeadCommand
where it calls a head, and HeadGroup where it has subcommands, too.
"""

from __future__ import annotations

import inspect
import re
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from fleet_service.credentials import Credentials
from fleet_service.tls import ClientTls

_TOKEN = "Your access token, for a head that asks who calls."  # noqa: S105 - a help text
_CA = "Call with TLS; what signed the head's certificate."
_CERT = "Your own certificate, for a head that asks for one."
_KEY = "Its key."
_PANEL = "Who you are to the head"

TokenFile = Annotated[
    Path | None,
    typer.Option("--access-token-file", envvar="FLEET_ACCESS_TOKEN_FILE", metavar="FILE", help=_TOKEN),
]
TlsCa = Annotated[Path | None, typer.Option("--tls-ca", envvar="FLEET_TLS_CA", metavar="FILE", help=_CA)]
TlsCert = Annotated[
    Path | None, typer.Option("--tls-cert", envvar="FLEET_TLS_CERT", metavar="FILE", help=_CERT)
]
TlsKey = Annotated[Path | None, typer.Option("--tls-key", envvar="FLEET_TLS_KEY", metavar="FILE", help=_KEY)]


@dataclass(frozen=True, slots=True)
class Files:
    """The files as given; None = none."""

    token: Path | None = None
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None


_NOTHING = Files()
_files: ContextVar[Files] = ContextVar("files", default=_NOTHING)


def show(files: Files) -> None:
    """What the command about to run shows the head."""
    _files.set(files)


def credentials() -> Credentials:
    """The same as the client takes it."""
    files = _files.get()
    tls = ClientTls(files.ca, files.cert, files.key) if files.ca or files.cert or files.key else None
    return Credentials(files.token, tls)


def _add(context: typer.Context, parameter: typer.CallbackParam, value: Path | None) -> None:
    if value is not None and not context.resilient_parsing:
        name = {"access_token_file": "token"}.get(parameter.name or "") or str(parameter.name)
        _files.set(replace(_files.get(), **{name.removeprefix("tls_"): value}))


def _after_its_name(flag: str, text: str) -> Any:
    return typer.Option(
        flag, metavar="FILE", help=text, callback=_add, expose_value=False, rich_help_panel=_PANEL
    )


def _declare(
    *,
    access_token_file: Annotated[Path | None, _after_its_name("--access-token-file", _TOKEN)] = None,
    tls_ca: Annotated[Path | None, _after_its_name("--tls-ca", _CA)] = None,
    tls_cert: Annotated[Path | None, _after_its_name("--tls-cert", _CERT)] = None,
    tls_key: Annotated[Path | None, _after_its_name("--tls-key", _KEY)] = None,
) -> None:
    """Never called: the library makes options out of its parameters."""


def _options() -> list[Any]:
    maker = typer.Typer(add_completion=False)
    maker.command()(_declare)
    return list(typer.main.get_command(maker).params)


def _flowing(text: str | None) -> str | None:
    """A help text whose lines the library breaks, at the terminal's width."""
    return re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.cleandoc(text)) if text else text


def _untyped(options: list[Any]) -> list[Any]:
    """The same; a type is said of what takes a value alone."""
    for option in options:
        if getattr(option, "is_flag", False):
            option.metavar = ""
    return options


class PlainCommand(TyperCommand):
    """A command that calls no head."""

    def __init__(self, *args: Any, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.help = _flowing(self.help)

    def get_params(self, ctx: Any) -> list[Any]:
        return _untyped(super().get_params(ctx))


class PlainGroup(TyperGroup):
    """A group of commands whose own options are no subcommand's."""

    def __init__(self, *args: Any, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.help = _flowing(self.help)

    def get_params(self, ctx: Any) -> list[Any]:
        return _untyped(super().get_params(ctx))


class HeadCommand(PlainCommand):
    """A command that calls a head: takes what it is shown after its name, too."""

    def __init__(self, *args: Any, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.params += _options()


class HeadGroup(PlainGroup):
    """A command that calls a head and has subcommands: what is given before a subcommand is meant for it."""

    def __init__(self, *args: Any, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.params += _options()

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        if command is not None and not ctx.resilient_parsing:
            rest = [*self._passed_on(ctx, command), *rest]
        return name, command, rest

    def _passed_on(self, ctx: Any, command: Any) -> list[str]:
        """The options given here, as the subcommand takes them. Raises UsageError for one it has not."""
        known = {name for option in command.params for name in option.opts}
        words = []
        for option in self.params:
            source = ctx.get_parameter_source(option.name)
            if not option.expose_value or source is None or source.name != "COMMANDLINE":
                continue
            flag = option.opts[0]
            if flag not in known:
                ctx.fail(f"{flag} is for `fleet {ctx.info_name}` alone, not for `{command.name}`")
            words += [flag] if getattr(option, "is_flag", False) else [flag, str(ctx.params[option.name])]
        return words
