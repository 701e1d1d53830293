"""TLS of a node: as a server, whose files are read again when they change, and towards the head it dials."""

from __future__ import annotations

import logging
import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

log = logging.getLogger(__name__)


class TlsError(Exception):
    """The files cannot be used; the text names the one and says why."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files: the own certificate (chain first to last) with its key, and whom to believe.

    As a server, `ca` asks clients for certificates that it has signed. As a client, `ca` signs the server's.
    """

    cert: Path | None = None
    key: Path | None = None
    ca: Path | None = None

    def check(self) -> None:
        """Raises TlsError when a file is missing, unreadable, no PEM, or the key is another certificate's."""
        for path in (self.cert, self.key, self.ca):
            if path:
                _read(path)
        try:
            if self.cert:
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                context.load_cert_chain(self.cert, self.key)
        except (ssl.SSLError, OSError) as error:
            raise TlsError(f"{self.cert} and {self.key} are no certificate with its key: {error}") from error
        try:
            if self.ca:
                ssl.create_default_context(cafile=self.ca)
        except (ssl.SSLError, OSError) as error:
            raise TlsError(f"{self.ca} holds no certificates: {error}") from error


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Serves the certificate that is in the files at each handshake. Raises TlsError."""
    files.check()
    reload = _Reload(files)
    return grpc.dynamic_ssl_server_credentials(
        reload.configuration(),
        reload,  # type: ignore[arg-type] # None, for no change, is allowed
        require_client_authentication=files.ca is not None,
    )


def channel_credentials(files: TlsFiles) -> grpc.ChannelCredentials:
    """What the files hold now. Raises TlsError."""
    files.check()
    return grpc.ssl_channel_credentials(
        root_certificates=_read(files.ca) if files.ca else None,
        private_key=_read(files.key) if files.key else None,
        certificate_chain=_read(files.cert) if files.cert else None,
    )


class _Reload:
    """Called by gRPC before each handshake, in a thread of its own: the new configuration, or None."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._seen = self._stamp()
        self._trouble = ""

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        """What the files hold now. Raises TlsError."""
        files = self._files
        if files.key is None or files.cert is None:
            raise TlsError("a server needs a certificate and its key")
        pair = (_read(files.key), _read(files.cert))
        return grpc.ssl_server_certificate_configuration([pair], _read(files.ca) if files.ca else None)

    def __call__(self) -> grpc.ServerCertificateConfiguration | None:
        stamp = self._stamp()
        if stamp == self._seen:
            return None
        try:
            self._files.check()
            configuration = self.configuration()
        except TlsError as error:
            # Tried again at the next handshake: what hinders may be rights, which are no change of the files.
            if str(error) != self._trouble:
                self._trouble = str(error)
                log.error("the new certificate is not taken, the old one stays: %s", error)  # noqa: TRY400 - told
            return None
        self._seen, self._trouble = stamp, ""
        log.info("certificate %s read again", self._files.cert)
        return configuration

    def _stamp(self) -> list[tuple[int, int] | None]:
        return [_stamp(path) for path in (self._files.cert, self._files.key, self._files.ca) if path]


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TlsError(f"{path} cannot be read: {error.strerror}") from error
