"""The file of those who may call a head: a name each, the hash of its token or its certificate's, its rights.

[frontend]
sha256 = "..."            # of the token; the token itself is nowhere
may = ["call"]            # call, read, operate
models = ["demo"]         # empty or left out = all

[dashboards]
certificate = "dashboards.example"   # a name in the client's certificate
may = ["read"]
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleet_service.domain.access import Caller, Permission

NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
TOKEN_PREFIX = "fleet_"  # noqa: S105 - so that scanners for secrets find one that leaked
_SHA256 = re.compile(r"[0-9a-f]{64}")
_KEYS = {"sha256", "certificate", "may", "models"}
_OWNER_ONLY = 0o600
_HEAD_LINE = "# Who may call. `fleet access` writes this file; a head reads it again when it changes.\n"


class AccessFileError(Exception):
    """The file cannot be used; the text says where and why."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One who may call: by the token whose hash is `sha256`, or by a certificate with that name."""

    caller: Caller
    sha256: str = ""
    certificate: str = ""


class Access:
    """All who may call; `entries` by name."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self.entries = entries
        self._by_hash = {each.sha256: each.caller for each in entries.values() if each.sha256}
        self._by_certificate = {
            each.certificate: each.caller for each in entries.values() if each.certificate
        }

    def of_token(self, token: str) -> Caller | None:
        """Whose token it is. Looked up by its hash, so that no time tells how much of a guess was right."""
        return self._by_hash.get(hash_of(token))

    def of_certificate(self, names: set[str]) -> Caller | None:
        """Whose certificate has one of these names."""
        return next(
            (self._by_certificate[name] for name in sorted(names & self._by_certificate.keys())), None
        )


def hash_of(token: str) -> str:
    """Plain SHA-256: tokens are 256 random bits, which no list or guess finds."""
    return hashlib.sha256(token.encode()).hexdigest()


def read_access(path: Path) -> Access:
    """Raises AccessFileError."""
    try:
        text = path.read_text("utf-8")
        tables = tomllib.loads(text)
    except OSError as error:
        raise AccessFileError(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise AccessFileError(f"{path} is no TOML: {error}") from error
    entries: dict[str, Entry] = {}
    for name, table in tables.items():
        try:
            entries[name] = _entry(name, table)
        except ValueError as error:
            raise AccessFileError(f"{path}, [{name}]: {error}") from None
    if text.startswith(_HEAD_LINE):
        if not text.endswith(_last_line(len(entries))):
            raise AccessFileError(f"{path} lacks its last line, so that some may be missing")
    elif not entries:
        raise AccessFileError(f"{path} names nobody; `fleet access add` adds somebody")
    for kind in ("sha256", "certificate"):
        values = [getattr(entry, kind) for entry in entries.values() if getattr(entry, kind)]
        if len(set(values)) < len(values):
            raise AccessFileError(f"{path}: two names have the same {kind}")
    return Access(entries)


def add_entry(path: Path, entry: Entry) -> None:
    """Add one to the file, made if need be. Raises AccessFileError."""
    with _changing(path) as (target, entries):
        _add(target, entries, entry)


def _add(path: Path, entries: dict[str, Entry], entry: Entry) -> None:
    if entry.caller.name in entries:
        raise AccessFileError(f"{path} has {entry.caller.name} already; remove it, or choose another name")
    _write(path, {**entries, entry.caller.name: entry})


def remove_entry(path: Path, name: str) -> None:
    """Take one out of the file. Raises AccessFileError."""
    with _changing(path) as (target, entries):
        if entries.pop(name, None) is None:
            raise AccessFileError(f"{path} has no {name}; it has {', '.join(sorted(entries)) or 'nobody'}")
        _write(target, entries)


@contextmanager
def _changing(path: Path) -> Iterator[tuple[Path, dict[str, Entry]]]:
    """The file itself, where `path` is a link to it, and its entries; one change at a time."""
    target = path.resolve()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(
            target.with_name(f"{target.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _OWNER_ONLY
        )
    except OSError as error:
        raise AccessFileError(f"{path} cannot be changed: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        there = target.exists() and target.read_text("utf-8").strip()
        yield target, dict(read_access(target).entries) if there else {}
    finally:
        os.close(lock)


def new_token() -> str:
    return TOKEN_PREFIX + secrets.token_urlsafe(32)


def _entry(name: str, table: Any) -> Entry:
    if not NAME.fullmatch(name):
        raise ValueError("a name is 1 to 64 characters of [A-Za-z0-9._-]")
    if not isinstance(table, dict):
        raise ValueError("must be a table")  # noqa: TRY004 - a fault of the file, not of the program
    if unknown := sorted(table.keys() - _KEYS):
        raise ValueError(f"knows {', '.join(sorted(_KEYS))}, not {', '.join(unknown)}")
    sha256, certificate = table.get("sha256", ""), table.get("certificate", "")
    if not isinstance(sha256, str) or not isinstance(certificate, str) or bool(sha256) == bool(certificate):
        raise ValueError("must have either sha256 or certificate")
    if sha256 and not _SHA256.fullmatch(sha256):
        raise ValueError("sha256 must be 64 hexadecimal characters in lower case")
    may, models = (_texts(table.get(key, [])) for key in ("may", "models"))
    if not may or not set(may) <= set(Permission):
        raise ValueError(f"may must name some of {', '.join(Permission)}")
    caller = Caller(name, frozenset(Permission(each) for each in may), frozenset(models))
    return Entry(caller, sha256, certificate)


def _texts(value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise ValueError("may and models must be lists of texts")
    return value


def _last_line(count: int) -> str:
    """Tells a whole file from one whose end was cut off."""
    return f"\n# end of {count}\n"


def _list(texts: Iterable[str]) -> str:
    return f"[{', '.join(_quoted(text) for text in sorted(texts))}]"


def _quoted(text: str) -> str:
    """A TOML string. JSON's is one, when what is beyond ASCII stands as it is."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _write(path: Path, entries: Mapping[str, Entry]) -> None:
    """Replace the file as a whole, so that a head that reads it meanwhile sees the old or the new."""
    lines = [_HEAD_LINE.rstrip()]
    for name, entry in sorted(entries.items()):
        lines += ["", f"[{_quoted(name) if '.' in name else name}]"]
        known_by = ("sha256", entry.sha256) if entry.sha256 else ("certificate", entry.certificate)
        lines.append(f"{known_by[0]} = {_quoted(known_by[1])}")
        lines.append(f"may = {_list(entry.caller.may)}")
        if entry.caller.models:
            lines.append(f"models = {_list(entry.caller.models)}")
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _OWNER_ONLY)
        if path.exists():  # whoever reads it now shall read it on
            there = path.stat()
            os.fchmod(handle, there.st_mode & 0o777)
            os.fchown(handle, there.st_uid, there.st_gid)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write("\n".join([*lines, ""]) + _last_line(len(entries)))
            file.flush()
            os.fsync(handle)
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise AccessFileError(f"{path} cannot be written: {error.strerror}") from error
