"""Reads the settings from a file, the environment and flags, and knows where each value came from.

Flags win over the environment (`FLEET_*`, `__` between the parts of a name), the environment wins over the
TOML file, the file over the defaults. Everything that is wrong is reported at once, by ConfigError.

A variable that names no setting is not wrong but told of: a container platform sets some of its own, for a
service called fleet FLEET_SERVICE_HOST for one. In a file or among flags such a name is refused.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict, SettingsError

from fleet_service.config import FleetConfig

CONFIG_FILE_VARIABLE = "FLEET_CONFIG"
MASK = "********"

# Variables that begin like settings and are none: they steer the command line, the tests and the examples.
_OTHER_VARIABLES = (
    CONFIG_FILE_VARIABLE,
    "FLEET_ADDRESS",
    "FLEET_ADMIN_ADDRESS",
    "FLEET_ACCESS_TOKEN_FILE",
    "FLEET_TLS_CA",
    "FLEET_TLS_CERT",
    "FLEET_TLS_KEY",
)
_SETTING_NAME = re.compile(r"\b(?:[a-z_]+\.)?[a-z][a-z_]*\b")

SourceKind = Literal["flag", "environment", "file", "default"]


class ConfigError(Exception):
    """The settings cannot be used; the text has a paragraph for each thing that is wrong."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a value came from; `name` is the flag, the variable or the file, empty for a default."""

    kind: SourceKind
    name: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.name}" if self.name else self.kind


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting in effect. `value` is plain (str, int, float, bool, list), a secret one masked."""

    name: str
    value: Any
    source: Source
    description: str


@dataclass(frozen=True, slots=True)
class UnusedVariable:
    """A variable that begins with FLEET_ and names no setting; `meant` is one of a name like it, or ""."""

    name: str
    meant: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """The settings and where they came from, by dotted name."""

    config: FleetConfig
    sources: Mapping[str, Source]
    unused_variables: tuple[UnusedVariable, ...]

    def settings(self) -> Iterator[Setting]:
        """Every setting, in the order of FleetConfig, those without a section first."""
        for name, info in sorted(leaf_fields().items(), key=lambda item: "." in item[0]):
            value: Any = self.config
            for part in name.split("."):
                value = getattr(value, part)
            yield Setting(name, _plain(value), self.sources[name], info.description or "")


@dataclass(frozen=True, slots=True)
class _Layer:
    """One source's values as found: nested by section, and by dotted name with where each came from."""

    values: Mapping[str, Any]
    sources: Mapping[str, Source]


def load(
    flags: Mapping[str, tuple[str, Any]] | None = None,
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> Loaded:
    """Read all sources and check the result; ConfigError says everything that is wrong.

    `flags` maps a setting's dotted name to (the flag as the user knows it, value). `file` None: the
    environment's FLEET_CONFIG, or no file. `environ` None: the process's own.
    """
    variables = os.environ if environ is None else environ
    path = file or (Path(variables[CONFIG_FILE_VARIABLE]) if variables.get(CONFIG_FILE_VARIABLE) else None)
    layers = [_flag_layer(flags or {}), _environment_layer(variables), _file_layer(path)]
    merged: dict[str, Any] = {}
    for layer in reversed(layers):
        _merge(merged, layer.values)
    given: dict[str, Source] = {}
    for layer in reversed(layers):
        given.update(layer.sources)
    try:
        config = FleetConfig.model_validate(merged)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(error, merged, given))) from None
    default = Source("default")
    sources = {name: given.get(name, default) for name in leaf_fields()}
    return Loaded(config, sources, _unused(variables))


def leaf_fields() -> dict[str, FieldInfo]:
    """Every setting's field by its dotted name."""
    found: dict[str, FieldInfo] = {}
    for name, info in FleetConfig.model_fields.items():
        section = info.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            found.update({f"{name}.{inner}": field for inner, field in section.model_fields.items()})
        else:
            found[name] = info
    return found


def variable_of(name: str) -> str:
    """The environment variable of a setting: head.silence_s -> FLEET_HEAD__SILENCE_S."""
    return "FLEET_" + name.replace(".", "__").upper()


def _flag_layer(flags: Mapping[str, tuple[str, Any]]) -> _Layer:
    values: dict[str, Any] = {}
    sources = {name: Source("flag", flag) for name, (flag, _) in flags.items()}
    known = list(leaf_fields())
    if wrong := [name for name in flags if name not in known]:
        raise ConfigError("\n".join(_unknown(name, sources, known) for name in wrong))
    for name, (_, value) in flags.items():
        *section, leaf = name.split(".")
        target = values
        for part in section:
            target = target.setdefault(part, {})
        target[leaf] = value
    return _Layer(values, sources)


class _Variables(FleetConfig, BaseSettings):
    """Tells pydantic-settings how variables are named; never made."""

    model_config = SettingsConfigDict(env_prefix="FLEET_", env_nested_delimiter="__")


class _Environment(EnvSettingsSource):
    """pydantic-settings' own reading of variables, from the mapping given."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = {name.lower(): value for name, value in environ.items()}
        super().__init__(_Variables)

    def _load_env_vars(self) -> Mapping[str, str | None]:
        return self._environ


def _environment_layer(environ: Mapping[str, str]) -> _Layer:
    known = _variables()
    environ = {variable: value for variable, value in environ.items() if variable.upper() in known}
    by_upper = {variable.upper(): variable for variable in environ}
    try:
        values = _Environment(environ)()
    except SettingsError:
        whole = [variable_of(name) for name in FleetConfig.model_fields if variable_of(name) in by_upper]
        raise ConfigError(
            f"environment {', '.join(whole)}: a section as a whole must be a JSON object"
            f" (or set one of its settings, for example {variable_of('head.silence_s')})."
        ) from None
    sources = {}
    for name in _flat(values):
        variable = by_upper.get(variable_of(name)) or by_upper.get(variable_of(name.split(".")[0]))
        sources[name] = Source("environment", variable or variable_of(name))
    return _Layer(values, sources)


def _file_layer(path: Path | None) -> _Layer:
    if path is None:
        return _Layer({}, {})
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"configuration file {path}: {(error.strerror or str(error)).lower()}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration file {path} is not TOML: {error}") from None
    return _Layer(values, {name: Source("file", str(path)) for name in _flat(values)})


def _merge(into: dict[str, Any], values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        present = into.get(key)
        if isinstance(value, Mapping):
            section: dict[str, Any] = present if isinstance(present, dict) else {}
            into[key] = section
            _merge(section, value)
        else:
            into[key] = value


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _variables() -> frozenset[str]:
    """Variables that hold a setting, or a section as a whole."""
    return frozenset(variable_of(name) for name in (*leaf_fields(), *FleetConfig.model_fields))


def _unused(environ: Mapping[str, str]) -> tuple[UnusedVariable, ...]:
    known = _variables()
    found = []
    for variable in sorted(environ):
        name = variable.upper()
        if name.startswith("FLEET_") and name not in known and name not in _OTHER_VARIABLES:
            close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.85)
            found.append(UnusedVariable(variable, close[0] if close else ""))
    return tuple(found)


# ------------------------------------------------------------------------------------------ what is wrong


def _explain(error: ValidationError, merged: Mapping[str, Any], given: Mapping[str, Source]) -> Iterator[str]:
    fields = leaf_fields()
    for problem in error.errors(include_url=False):
        name = ".".join(str(part) for part in problem["loc"] if isinstance(part, str))
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "exposed":
            yield message
        elif problem["type"] == "extra_forbidden":
            yield _unknown(name, given, list(fields))
        elif name in fields:
            value = _shown(fields[name], _value_at(merged, name))
            yield (
                f"{name} = {value} ({given.get(name, Source('default'))}): {_must(problem['type'], message)}."
                f"\n    {fields[name].description}."
            )
        else:
            named = [part for part in _SETTING_NAME.findall(message) if part in fields]
            values = ", ".join(
                f"{part} = {_shown(fields[part], _value_at(merged, part))}"
                f" ({given.get(part, Source('default'))})"
                for part in named
            )
            where = f"{name} ({given[name]})" if name in given else name
            yield f"{message}: {values}." if values else f"{where}: {_must(problem['type'], message)}."


def _unknown(name: str, given: Mapping[str, Source], known: Sequence[str]) -> str:
    places = {str(source) for key, source in given.items() if key == name or key.startswith(f"{name}.")}
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    hint = f" Did you mean {close[0]}?" if close else " `fleet config` lists all settings."
    return f"{name} ({', '.join(sorted(places)) or 'unknown source'}): there is no such setting.{hint}"


def _must(kind: str, message: str) -> str:
    if message.startswith("must "):
        return message
    if kind == "model_type":
        return "must be a section with settings of its own"
    for start in ("Input should be ", "String should ", "Value should "):
        if message.startswith(start):
            rest = message.removeprefix(start)
            return f"must {'' if start != 'Input should be ' else 'be '}{rest}".partition(", unable to ")[0]
    return message


def _value_at(values: Mapping[str, Any], name: str) -> Any:
    """What the sources say of a setting; its default where they are silent."""
    value: Any = values
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return leaf_fields()[name].get_default()
        value = value[part]
    return value


def _shown(info: FieldInfo, value: Any) -> str:
    if info.annotation is SecretStr:
        return MASK
    plain = _plain(value)
    return f'"{plain}"' if isinstance(plain, str) else str(plain)


def _plain(value: Any) -> Any:
    if isinstance(value, SecretStr):
        return MASK if value.get_secret_value() else ""
    return list(value) if isinstance(value, tuple) else value
