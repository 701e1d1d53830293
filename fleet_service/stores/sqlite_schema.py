"""The tables of the SQLite store, version by version, and how an older file becomes a newer one.

`batches` has one row per commit with the tokens that all streams had new then, so that a commit costs the
same for one stream and for hundreds. Housekeeping packs what is kept longer into `outputs`: a generation's
`first_batch` is the first batch that may have tokens of it which `outputs` has not. `context` has what
belongs to sessions, in pieces as it came.
"""

from __future__ import annotations

import sqlite3

from fleet_service.stores.sqlite_files import FileDamagedError

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

CREATE TABLE cuts (
    generation_no INTEGER NOT NULL,
    branch INTEGER NOT NULL,
    token_index INTEGER NOT NULL,
    PRIMARY KEY (generation_no, branch)
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
    note TEXT NOT NULL,
    cordoned_by TEXT NOT NULL,
    cordoned_at REAL NOT NULL,
    cordon_note TEXT NOT NULL
) STRICT, WITHOUT ROWID;
"""

STEPS = {0: _V1}
"""What makes each version the next one; a version once released is never changed."""


class NewerFileError(Exception):
    """The file's tables are of a newer release."""


def version_of(connection: sqlite3.Connection) -> int:
    """That of the file's tables; 0 = there are none.

    Raises FileDamagedError, NewerFileError, sqlite3.Error.
    """
    tables = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
    if not tables:
        return 0
    if connection.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
        raise FileDamagedError("it is an SQLite file of something else")
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if version > VERSION:
        raise NewerFileError(f"its tables are of version {version}, this release knows up to {VERSION}")
    if version < 1:
        raise FileDamagedError(f"its tables are of version {version}")
    return version


def bring_up_to_date(connection: sqlite3.Connection) -> None:
    """Make or change the tables until they are of VERSION, each step whole or not at all.

    Raises as version_of.
    """
    version = version_of(connection)
    while version < VERSION:
        step = f"BEGIN IMMEDIATE; {STEPS[version]}; PRAGMA user_version = {version + 1};"
        if version == 0:
            step += f"PRAGMA application_id = {APPLICATION_ID};"
        try:
            connection.executescript(f"{step} COMMIT;")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        version += 1
