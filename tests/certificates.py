"""Certificates for tests: an authority and what it signs, as PEM files."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from pathlib import Path

import trustme

LONG_AGO = dt.datetime(2020, 1, 1, tzinfo=dt.UTC)
NOT_SO_LONG_AGO = dt.datetime(2021, 1, 1, tzinfo=dt.UTC)


@dataclass(frozen=True)
class Pair:
    """A certificate and its key."""

    cert: Path
    key: Path


class Authority:
    """Signs certificates; `ca` is what believes them."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._authority = trustme.CA()
        self._folder = folder
        self.ca = folder / f"{name}.pem"
        self._authority.cert_pem.write_to_path(self.ca)

    def issue(self, name: str, *hosts: str, expired: bool = False) -> Pair:
        """A certificate for `hosts` (this machine), in files of that name; made anew they are replaced."""
        made = self._authority.issue_cert(
            *(hosts or ("localhost", "127.0.0.1")),
            not_before=LONG_AGO if expired else None,
            not_after=NOT_SO_LONG_AGO if expired else None,
        )
        pair = Pair(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        for path, data in (
            (pair.cert, b"".join(each.bytes() for each in made.cert_chain_pems)),
            (pair.key, made.private_key_pem.bytes()),
        ):
            draft = path.with_suffix(".new")
            draft.write_bytes(data)
            draft.replace(path)
        return pair
