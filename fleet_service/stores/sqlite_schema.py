"""The tables of the SQLite store, version by version, and how an older file becomes a newer one.

Tokens that run are kept twice over, by kind: `batches` has one row per commit with what all streams had new
then, so that a commit costs the same for one stream and for hundreds; `context` has what belongs to sessions,
in pieces as it came.
"""

from __future__ import annotations

import sqlite3

VERSION = 1
"""Of the tables here; PRAGMA user_version of a file."""

APPLICATION_ID = 0x666C6565
"""PRAGMA application_id: "flee"; tells a store from any other SQLite file."""

_V1 = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value ANY NOT NULL) STRICT, WITHOUT ROWID;

CREATE TABLE sessions (
    no INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    spec TEXT NOT NULL,
    engine_options BLOB NOT NULL,
    sampling TEXT NOT NULL,
    created_at REAL NOT NULL,
    last_used_at REAL NOT NULL,
    parked INTEGER NOT NULL,
    ephemeral INTEGER NOT NULL,
    context_length INTEGER NOT NULL DEFAULT 0,
    context_crc32 INTEGER NOT NULL DEFAULT 0,
    node TEXT NOT NULL DEFAULT '',
    incarnation TEXT NOT NULL DEFAULT '',
    epoch INTEGER NOT NULL DEFAULT 0
) STRICT;

CREATE TABLE context (
    session_no INTEGER NOT NULL,
    start INTEGER NOT NULL,
    ids BLOB NOT NULL,
    PRIMARY KEY (session_no, start)
) STRICT, WITHOUT ROWID;

CREATE TABLE generations (
    no INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    session_id TEXT NOT NULL,
    owner TEXT NOT NULL,
    body TEXT NOT NULL,
    accepted_at REAL NOT NULL,
    deadline_at REAL NOT NULL,
    first_batch INTEGER NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0,
    finished TEXT,
    ended_at REAL
) STRICT;

CREATE TABLE marks (
    generation_no INTEGER NOT NULL,
    nth INTEGER NOT NULL,
    token_index INTEGER NOT NULL,
    event TEXT NOT NULL,
    PRIMARY KEY (generation_no, nth)
) STRICT, WITHOUT ROWID;

CREATE TABLE batches (seq INTEGER PRIMARY KEY, body BLOB NOT NULL) STRICT;

CREATE TABLE outputs (
    generation_no INTEGER NOT NULL,
    first_index INTEGER NOT NULL,
    ids BLOB NOT NULL,
    PRIMARY KEY (generation_no, first_index)
) STRICT, WITHOUT ROWID;

CREATE TABLE requests (
    owner TEXT NOT NULL,
    request_id TEXT NOT NULL,
    fingerprint BLOB NOT NULL,
    answer TEXT NOT NULL,
    engine_options BLOB NOT NULL,
    until REAL NOT NULL,
    PRIMARY KEY (owner, request_id)
) STRICT, WITHOUT ROWID;
CREATE INDEX requests_until ON requests (until);

CREATE TABLE cancels (
    owner TEXT NOT NULL,
    generation_id TEXT NOT NULL,
    until REAL NOT NULL,
    PRIMARY KEY (owner, generation_id)
) STRICT, WITHOUT ROWID;

CREATE TABLE revokes (
    node TEXT NOT NULL,
    incarnation TEXT NOT NULL,
    session_id TEXT NOT NULL,
    epoch INTEGER NOT NULL,
    PRIMARY KEY (node, incarnation, session_id, epoch)
) STRICT, WITHOUT ROWID;

CREATE TABLE listed (address TEXT PRIMARY KEY, listed INTEGER NOT NULL) STRICT, WITHOUT ROWID;

CREATE TABLE node_marks (
    node TEXT PRIMARY KEY,
    mark TEXT NOT NULL,
    by_whom TEXT NOT NULL,
    at REAL NOT NULL,
    note TEXT NOT NULL
) STRICT, WITHOUT ROWID;
"""

_STEPS = {0: _V1}
"""What makes each version the next one; a version once released is never changed."""


class NewerFileError(Exception):
    """The file's tables are of a newer release."""


def bring_up_to_date(connection: sqlite3.Connection) -> None:
    """Make or change the tables until they are of VERSION, each step whole or not at all.

    Raises NewerFileError, sqlite3.Error.
    """
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version > VERSION:
        raise NewerFileError(f"its tables are of version {version}, this release knows up to {VERSION}")
    while version < VERSION:
        step = f"BEGIN IMMEDIATE; {_STEPS[version]}; PRAGMA user_version = {version + 1};"
        if version == 0:
            step += f"PRAGMA application_id = {APPLICATION_ID};"
        try:
            connection.executescript(f"{step} COMMIT;")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        version += 1
