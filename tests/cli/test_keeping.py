"""Where a head keeps its sessions and answers, and what it says when it cannot."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import stat
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from examples.processes import command_of
from fleet_service.config import StoreConfig
from fleet_service.keeping import folder_of
from tests.cli.ended import Ended
from tests.quiet_head import QUIET

PATIENCE_S = 30.0
PLACES = ("HOME", "XDG_STATE_HOME", "STATE_DIRECTORY")


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """The tests' own, where no setting and no place is named but those given."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("FLEET_", *PLACES))}
    return kept | dict(given)


async def start(words: Iterable[str], given: Mapping[str, str]) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(command_of("fleet"), *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment(given),
    )


async def fleet(*words: str, **given: str) -> Ended:
    process = await start(words, given)
    async with asyncio.timeout(PATIENCE_S):
        out, err = await process.communicate()
    assert process.returncode is not None
    return Ended(process.returncode, out.decode(), err.decode())


@asynccontextmanager
async def serving(*flags: str, **given: str) -> AsyncIterator[None]:
    """A head, until the block ends; it ends in order then."""
    process = await start(("serve", *QUIET, *flags), given)
    try:
        assert process.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            line = await process.stdout.readline()
            assert line.startswith(b"fleet: serving"), (line, await process.communicate())
            yield
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


# -------------------------------------------------------------------------------------------- the folder


@pytest.mark.parametrize(
    "folder,environ,expected",
    [
        ("", {"HOME": "/home/a"}, "/home/a/.local/state/fleet/head-7"),
        ("", {"HOME": "/home/a", "XDG_STATE_HOME": "/states"}, "/states/fleet/head-7"),
        ("", {"HOME": "/home/a", "XDG_STATE_HOME": ""}, "/home/a/.local/state/fleet/head-7"),
        ("", {"HOME": "/", "XDG_STATE_HOME": "/states", "STATE_DIRECTORY": "/var/lib/f"}, "/var/lib/f"),
        ("", {"STATE_DIRECTORY": "/var/lib/f:/var/lib/g"}, "/var/lib/f"),
        ("/here", {"HOME": "/", "XDG_STATE_HOME": "/states", "STATE_DIRECTORY": "/var/lib/f"}, "/here"),
        ("here", {}, f"{Path.cwd()}/here"),
        ("~/here", {}, f"{Path.home()}/here"),
    ],
    ids=[
        *("home", "state home", "empty state home", "service manager", "first of several"),
        *("setting", "relative setting", "setting at home"),
    ],
)
def test_the_folder_is_as_set_the_service_managers_or_among_the_users_files(
    folder: str, environ: dict[str, str], expected: str
) -> None:
    assert folder_of(StoreConfig(folder=folder), "head-7", environ) == Path(expected)


@pytest.mark.parametrize(
    "given,expected",
    [
        ({"HOME": "home"}, "home/.local/state/fleet/head-1"),
        ({"HOME": "home", "XDG_STATE_HOME": "states"}, "states/fleet/head-1"),
        ({"HOME": "home", "XDG_STATE_HOME": "states", "STATE_DIRECTORY": "service"}, "service"),
    ],
    ids=PLACES,
)
async def test_a_head_that_is_told_nothing_keeps_what_it_has_for_its_user_alone(
    tmp_path: Path, given: dict[str, str], expected: str
) -> None:
    given = {name: str(tmp_path / folder) for name, folder in given.items()}
    async with serving(**given):
        pass
    made = tmp_path / expected
    assert (made / "head.db").is_file()
    assert [path for path in tmp_path.rglob("*") if path.is_file() and path.parent != made] == []
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert stat.S_IMODE((made / "head.db").stat().st_mode) == 0o600


async def test_heads_of_different_names_have_different_folders(tmp_path: Path) -> None:
    given = {"HOME": str(tmp_path)}
    async with serving(**given), serving("--set", "head.head_id=other", **given):
        pass
    made = (tmp_path / ".local/state/fleet").iterdir()
    assert sorted(folder.name for folder in made) == ["head-1", "other"]


@pytest.mark.parametrize("how", ["--durability=memory", "--set=store.durability=memory"])
async def test_with_memory_nothing_is_written(tmp_path: Path, how: str) -> None:
    async with serving(how, "--data-dir", str(tmp_path / "data"), HOME=str(tmp_path)):
        assert list(tmp_path.iterdir()) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("how", ["strict", "relaxed"])
async def test_what_is_kept_where_and_how_is_in_the_log(tmp_path: Path, how: str) -> None:
    flags = ("--durability", how, "--log-level", "info", "--log-format", "json")
    process = await start(("serve", *QUIET, *flags), {"HOME": str(tmp_path)})
    assert process.stdout is not None
    await process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(PATIENCE_S):
        _, err = await process.communicate()
    (told,) = [event for event in map(json.loads, err.splitlines()) if event["event"] == "keeping"]
    folder = str(tmp_path / ".local/state/fleet/head-1")
    assert (told["folder"], told["durability"], told["sessions"]) == (folder, how, 0)


# -------------------------------------------------------------------------------------------- refusals


async def test_a_second_head_on_the_folder_is_refused_and_told_what_to_do(tmp_path: Path) -> None:
    folder = tmp_path / ".local/state/fleet/head-1"
    refused = f"fleet: {folder / 'head.db'} is in use by another head; stop it, or give this one"
    async with serving(HOME=str(tmp_path)):
        by_default = await fleet("serve", *QUIET, HOME=str(tmp_path))
        by_flag = await fleet("serve", *QUIET, "--data-dir", str(folder), HOME=str(tmp_path))
    assert (by_default.code, by_default.out) == (1, "")
    advice = "a name of its own with --set head.head_id=NAME"
    assert by_default.err == f"{refused} {advice}\n"
    assert (by_flag.code, by_flag.out) == (1, "")
    assert by_flag.err == f"{refused} {advice} and a folder of its own with --data-dir FOLDER\n"


async def test_a_folder_that_cannot_be_made_ends_the_start_with_one_line(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    ended = await fleet("serve", *QUIET, HOME=str(file))
    assert (ended.code, ended.out) == (1, "")
    folder = re.escape(str(file / ".local/state/fleet/head-1"))
    assert re.fullmatch(
        rf"fleet: {folder}/head\.db cannot be used: {re.escape(str(file))} is not a folder; "
        r"name another folder with --data-dir FOLDER, or keep nothing with --durability memory\n",
        ended.err,
    )


async def test_a_copy_that_all_could_read_is_the_owners_alone_once_it_is_used(tmp_path: Path) -> None:
    async with serving("--data-dir", str(tmp_path), HOME=str(tmp_path)):
        pass
    (tmp_path / "head.db").chmod(0o644)
    async with serving("--data-dir", str(tmp_path), HOME=str(tmp_path)):
        modes = {each.name: stat.S_IMODE(each.stat().st_mode) for each in tmp_path.glob("head.db*")}
    assert {modes[name] for name in ("head.db", "head.db-wal", "head.db-shm")} == {0o600}


async def test_a_damaged_file_is_told_of_and_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "head.db"
    file.write_bytes(b"no database at all" * 100)
    ended = await fleet("serve", *QUIET, "--data-dir", str(tmp_path), HOME=str(tmp_path))
    assert ended.code == 1
    assert re.fullmatch(rf"fleet: {re.escape(str(file))} is damaged .*put a copy back.*\n", ended.err)
    assert "--data-dir" not in ended.err
    assert file.read_bytes() == b"no database at all" * 100


async def test_a_durability_that_there_is_not_is_wrong_use(tmp_path: Path) -> None:
    ended = await fleet("serve", *QUIET, "--durability", "often", HOME=str(tmp_path))
    assert (ended.code, ended.out) == (2, "")
    assert 'store.durability = "often" (flag --durability): must be' in ended.err
    for name in ("strict", "relaxed", "memory"):
        assert f"'{name}'" in ended.err
    assert list(tmp_path.iterdir()) == []


# -------------------------------------------------------------------------------------------- settings


async def test_the_settings_show_in_fleet_config(tmp_path: Path) -> None:
    ended = await fleet("config", "--json", HOME=str(tmp_path), FLEET_STORE__FOLDER="/var/lib/fleet")
    shown = json.loads(ended.out)
    assert (shown["store.durability"]["value"], shown["store.durability"]["source"]) == ("strict", "default")
    assert (shown["store.folder"]["value"], shown["store.folder"]["source"]) == (
        "/var/lib/fleet",
        "environment",
    )
    ended = await fleet("config", HOME=str(tmp_path))
    assert 'durability = "strict"' in ended.out
    assert 'folder = ""' in ended.out


async def test_fleet_store_looks_where_the_head_keeps_what_it_has(tmp_path: Path) -> None:
    settings = tmp_path / "fleet.toml"
    settings.write_text('[head]\nhead_id = "head-7"\n')
    given = {"HOME": str(tmp_path), "FLEET_CONFIG": str(settings)}
    file = tmp_path / ".local/state/fleet/head-7/head.db"
    for command in ("check", "stats"):
        ended = await fleet("store", command, **given)
        advice = "name the FOLDER, if the head was given another"
        assert (ended.code, ended.err) == (1, f"fleet: there is no {file}; {advice}\n")
    async with serving(**given):
        ended = await fleet("store", "stats", "--json", **given)
        told = json.loads(ended.out)
        assert (told["file"], told["in_use"]) == (str(file), True)
        ended = await fleet("store", "check", **given)
        assert (ended.code, ended.out) == (
            0,
            f"{file} is whole: 0 sessions with 0 tokens, 0 generations with 0 tokens\n",
        )
    moved = {"HOME": str(tmp_path), "FLEET_STORE__FOLDER": str(tmp_path / "moved")}
    assert f"there is no {tmp_path / 'moved' / 'head.db'}" in (await fleet("store", "check", **moved)).err
    wrong = {"HOME": str(tmp_path), "FLEET_STORE__DURABILITY": "often"}
    ended = await fleet("store", "check", **wrong)
    assert (ended.code, "the settings cannot be used" in ended.err) == (2, True)
