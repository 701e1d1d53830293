"""Who calls: found by the call's access token or its client certificate, before anything else is done.

The file of those who may is read again when it changes; one that cannot be read then changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

import structlog

from fleet_service.access_file import Access, AccessFileError, read_access
from fleet_service.domain.access import ANYBODY, Caller, Permission
from fleet_service.domain.errors import FleetError, Reason

AUTHORIZATION_KEY = "authorization"
_SCHEME = "bearer "
_LOOK_EVERY_S = 1.0
_SUBJECT_NAMES = "x509_subject_alternative_name"
_COMMON_NAME = "x509_common_name"

_log = structlog.get_logger(__name__)

# What AdminService's methods that change nothing need; all others need OPERATE.
_READS: Final = ("List", "Get", "Probe", "Explain", "Watch")


class Peer(Protocol):
    """What is asked of a call's connection (grpc.aio.ServicerContext)."""

    def auth_context(self) -> Mapping[str, Iterable[bytes]]: ...


class Gate(Protocol):
    """Lets calls in."""

    def admit(self, method: str, metadata: Sequence[tuple[str, str | bytes]], peer: Peer) -> Caller:
        """Who calls `method`, like fleet.v1.FleetService/Generate.

        Raises CREDENTIALS_REFUSED, PERMISSION_DENIED.
        """


class OpenGate:
    """Asks nobody who he is: for a head that only its own machine reaches."""

    def admit(self, method: str, metadata: Sequence[tuple[str, str | bytes]], peer: Peer) -> Caller:
        return ANYBODY


class CertificateGate:
    """Goes by client certificates alone: whoever has one that the listener's CA signed may call."""

    def admit(self, method: str, metadata: Sequence[tuple[str, str | bytes]], peer: Peer) -> Caller:
        names = _certificate_names(peer)
        if not names:
            raise _refused("the client's certificate names nobody")
        return Caller(min(names))


class AccessGate:
    """Goes by the access file. `clock` gives seconds; the file is looked at once a second at most."""

    def __init__(self, file: Path, clock: Callable[[], float]) -> None:
        """Raises AccessFileError."""
        self._file = file
        self._clock = clock
        self._stamp = _stamp(file)
        self._access: Access = read_access(file)
        self._trouble = ""
        self._look_at_s = clock() + _LOOK_EVERY_S

    def admit(self, method: str, metadata: Sequence[tuple[str, str | bytes]], peer: Peer) -> Caller:
        self._look()
        caller = self._caller(metadata, peer)
        caller.check(needed(method))
        return caller

    def _caller(self, metadata: Sequence[tuple[str, str | bytes]], peer: Peer) -> Caller:
        given = [value for key, value in metadata if key == AUTHORIZATION_KEY]
        if given:
            value = given[0]
            if len(given) > 1 or not isinstance(value, str) or not value.lower().startswith(_SCHEME):
                raise _refused("the metadata authorization must be one `Bearer TOKEN`")
            caller = self._access.of_token(value[len(_SCHEME) :].strip())
            if caller is None:
                raise _refused("the access token is not known here; it may have been taken back")
            return caller
        names = _certificate_names(peer)
        caller = self._access.of_certificate(names)
        if caller is None:
            raise _refused(self._unknown(names))
        return caller

    def _unknown(self, names: set[str]) -> str:
        """What is wrong with a call that carries no token."""
        token = "send an access token as metadata, authorization: Bearer TOKEN"  # noqa: S105 - a text
        if names:
            return f"nobody here is known by the client certificate of {', '.join(sorted(names))}; {token}"
        if any(entry.certificate for entry in self._access.entries.values()):
            return f"{token}, or connect with a client certificate: none was shown, or none is asked for here"
        return token

    def _look(self) -> None:
        now_s = self._clock()
        if now_s < self._look_at_s:
            return
        self._look_at_s = now_s + _LOOK_EVERY_S
        stamp = _stamp(self._file)
        if stamp == self._stamp:
            return
        try:
            self._access = read_access(self._file)
        except AccessFileError as error:
            # Tried again at the next look: what hinders may be its rights, which are no change of the file.
            if str(error) != self._trouble:
                self._trouble = str(error)
                _log.error("access_file_not_taken", error=str(error), effect="those known before may call on")
        else:
            self._stamp, self._trouble = stamp, ""
            _log.info("access_file_read_again", file=str(self._file), names=len(self._access.entries))


def needed(method: str) -> Permission:
    """What a caller of `method` must be allowed."""
    service, _, name = method.rpartition("/")
    if not service.endswith(".AdminService"):
        return Permission.CALL
    return Permission.READ if name.startswith(_READS) else Permission.OPERATE


def _refused(why: str) -> FleetError:
    return FleetError(Reason.CREDENTIALS_REFUSED, why)


def _certificate_names(peer: Peer) -> set[str]:
    """Names of a certificate that TLS has verified: subject alternative ones, else the common name."""
    shown = peer.auth_context()
    names = list(shown.get(_SUBJECT_NAMES, ())) or shown.get(_COMMON_NAME, ())
    return {name.decode("utf-8", "replace") for name in names}


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size
