"""TLS: a listener's certificate, read again when its files change, and credentials for connections made."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import grpc
import structlog

_log = structlog.get_logger(__name__)
_T = TypeVar("_T")


class TlsError(Exception):
    """The files cannot be used; the text names the one and says why."""


@dataclass(frozen=True, slots=True)
class ServerTls:
    """PEM files of a listener. With `client_ca_file`, clients must show a certificate that it has signed."""

    cert_file: Path
    key_file: Path
    client_ca_file: Path | None = None

    def check(self) -> None:
        """Raises TlsError when a file is missing, unreadable or not what it should be."""
        _check_pair(self.cert_file, self.key_file)
        if self.client_ca_file:
            _check_ca(self.client_ca_file)

    def credentials(self) -> grpc.ServerCredentials:
        """Credentials that serve what is in the files at each handshake. Raises TlsError."""
        self.check()
        reload = _Reload(self, self.configuration)
        return grpc.dynamic_ssl_server_credentials(
            self.configuration(),
            reload,  # type: ignore[arg-type] # None, for no change, is allowed
            require_client_authentication=self.client_ca_file is not None,
        )

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        """What the files hold now. Raises TlsError."""
        pair = (_read(self.key_file), _read(self.cert_file))
        return grpc.ssl_server_certificate_configuration(
            [pair], _read(self.client_ca_file) if self.client_ca_file else None
        )

    def ssl_context(self) -> ssl.SSLContext:
        """The same for a listener that is not gRPC's. Raises TlsError."""
        self.check()
        context = self._context()
        reload = _Reload(self, self._context)

        def renew(connection: ssl.SSLSocket | ssl.SSLObject, *_name_and_context: object) -> None:
            nonlocal context
            context = reload() or context
            connection.context = context

        context.set_servername_callback(renew)  # called at each handshake, named or not
        return context

    def _context(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(self.cert_file, self.key_file)
            if self.client_ca_file:
                context.load_verify_locations(self.client_ca_file)
                context.verify_mode = ssl.CERT_REQUIRED
        except (ssl.SSLError, OSError) as error:
            raise TlsError(f"{self.cert_file} cannot be used: {error}") from error
        return context

    def files(self) -> list[Path]:
        return [path for path in (self.cert_file, self.key_file, self.client_ca_file) if path]


@dataclass(frozen=True, slots=True)
class ClientTls:
    """For connections made: whom to believe, and the own certificate where the other side asks for one.

    `ca_file` None: the roots that gRPC ships. `server_name`: the name in the certificate, where it is
    another than the one dialed.
    """

    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    server_name: str = ""

    def check(self) -> None:
        """Raises TlsError when a file is missing, unreadable or not what it should be."""
        if self.ca_file:
            _check_ca(self.ca_file)
        if (self.cert_file is None) != (self.key_file is None):
            raise TlsError("a certificate and its key go together")
        if self.cert_file and self.key_file:
            _check_pair(self.cert_file, self.key_file)

    def credentials(self) -> grpc.ChannelCredentials:
        """What the files hold now. Raises TlsError."""
        self.check()
        return grpc.ssl_channel_credentials(
            root_certificates=_read(self.ca_file) if self.ca_file else None,
            private_key=_read(self.key_file) if self.key_file else None,
            certificate_chain=_read(self.cert_file) if self.cert_file else None,
        )

    def channel_options(self) -> list[tuple[str, str]]:
        return [("grpc.ssl_target_name_override", self.server_name)] if self.server_name else []


class _Reload(Generic[_T]):
    """Called before each handshake, by gRPC in a thread of its own: what `read` makes of new files."""

    def __init__(self, tls: ServerTls, read: Callable[[], _T]) -> None:
        self._tls = tls
        self._read = read
        self._seen = self._stamps()
        self._trouble = ""

    def __call__(self) -> _T | None:
        stamps = self._stamps()
        if stamps == self._seen:
            return None
        try:
            self._tls.check()
            configuration = self._read()
        except TlsError as error:
            # Tried again at the next handshake: what hinders may be rights, which are no change of the files.
            if str(error) != self._trouble:
                self._trouble = str(error)
                _log.error("certificate_not_taken", error=str(error), effect="the one before is served on")
            return None
        self._seen, self._trouble = stamps, ""
        _log.info("certificate_read_again", file=str(self._tls.cert_file))
        return configuration

    def _stamps(self) -> list[tuple[int, int] | None]:
        return [_stamp(path) for path in self._tls.files()]


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino


def _check_pair(cert: Path, key: Path) -> None:
    _read(cert), _read(key)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key)
    except (ssl.SSLError, OSError) as error:
        raise TlsError(f"{cert} and {key} are no certificate with its key: {error}") from error


def _check_ca(path: Path) -> None:
    _read(path)
    try:
        ssl.create_default_context(cafile=path)
    except (ssl.SSLError, OSError) as error:
        raise TlsError(f"{path} holds no certificates: {error}") from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TlsError(f"{path} cannot be read: {error.strerror}") from error
