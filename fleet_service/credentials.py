"""What a client shows a head, and what of the head it believes: an access token, TLS."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from fleet_service.tls import ClientTls, TlsError

PLAIN, SECURE = "http://", "https://"


class CredentialsError(Exception):
    """A file of a token or of TLS cannot be used; the text says which and why."""


def split_scheme(address: str) -> tuple[str, str]:
    """(`http://`, `https://` or nothing, the address)."""
    for scheme in (PLAIN, SECURE):
        if address.startswith(scheme):
            return scheme, address.removeprefix(scheme)
    return "", address


@dataclass(frozen=True, slots=True)
class Credentials:
    """`token_file`: an access token, as `fleet access add` gives it; None = none. `tls` None = without.

    An address may decide for itself: http://HOST:PORT is called without TLS, https://HOST:PORT with it.
    """

    token_file: Path | None = None
    tls: ClientTls | None = None

    def tls_for(self, address: str) -> ClientTls | None:
        """TLS of the calls to an address; None = without."""
        scheme, _ = split_scheme(address)
        if scheme == SECURE:
            return self.tls or ClientTls()
        return None if scheme == PLAIN else self.tls

    def channel(self, address: str, options: Sequence[tuple[str, Any]]) -> grpc.aio.Channel:
        """A channel whose calls carry the token. Raises CredentialsError."""
        try:
            token = self.token_file.read_text("utf-8").strip() if self.token_file else ""
        except (OSError, UnicodeDecodeError) as error:
            raise CredentialsError(
                f"the access token cannot be read from {self.token_file}: {error}"
            ) from error
        if not token.isascii() or not token.isprintable():
            raise CredentialsError(f"{self.token_file} holds no access token")
        try:
            tls = self.tls_for(address)
            credentials = tls.credentials() if tls else None
        except TlsError as error:
            raise CredentialsError(str(error)) from error
        _, target = split_scheme(address)
        if credentials and tls:
            more = [*options, *tls.channel_options()]
            channel = grpc.aio.secure_channel(target, credentials, options=more)
        else:
            channel = grpc.aio.insecure_channel(target, options=list(options))
        return _Bearing(channel, token) if token else channel  # type: ignore[return-value] # as far as stubs go


class _Bearing:
    """A channel whose calls carry an access token, TLS or not. Interceptors would change how calls end."""

    def __init__(self, channel: grpc.aio.Channel, token: str) -> None:
        self._channel = channel
        self._metadata = (("authorization", f"Bearer {token}"),)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def unary_unary(self, *args: Any, **options: Any) -> Any:
        return self._bear(self._channel.unary_unary(*args, **options))

    def unary_stream(self, *args: Any, **options: Any) -> Any:
        return self._bear(self._channel.unary_stream(*args, **options))

    def stream_stream(self, *args: Any, **options: Any) -> Any:
        return self._bear(self._channel.stream_stream(*args, **options))

    def _bear(self, method: Any) -> Any:
        def call(*request: Any, metadata: Sequence[tuple[str, str]] = (), **options: Any) -> Any:
            return method(*request, metadata=(*metadata, *self._metadata), **options)

        return call
