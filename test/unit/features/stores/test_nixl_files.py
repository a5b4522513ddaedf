# SPDX-License-Identifier: Apache-2.0
"""What a folder of values does when NIXL or the drive does not do as it should. NIXL itself is played."""

from __future__ import annotations

import errno
import importlib.metadata
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from banyan.features.stores import nixl_files
from banyan.features.stores.nixl_files import NixlFiles
from banyan.features.stores.values import Iovec, Transfer, Value

VALUE_BYTES = 4096
NAME = f"{'a' * 64}/{'b' * 64}"


class Agent:
    """Says of every transfer what ``states`` says, the last one again and again."""

    name = "agent"

    def __init__(self) -> None:
        self.states = ["DONE"]
        self.num_looks = 0

    def register_memory(self, descriptors: Any, mem_type: str) -> str:
        return mem_type

    def deregister_memory(self, registered: str) -> None: ...

    def get_xfer_descs(self, descriptors: Any, mem_type: str) -> str:
        return mem_type

    def initialize_xfer(self, *args: Any) -> str:
        return "handle"

    def transfer(self, handle: str) -> str:
        return self._state()

    def check_xfer_state(self, handle: str) -> str:
        self.num_looks += 1
        return self._state()

    def _state(self) -> str:
        return self.states.pop(0) if len(self.states) > 1 else self.states[0]

    def release_xfer_handle(self, handle: str) -> None: ...


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Agent:
    agent = Agent()
    monkeypatch.setattr(nixl_files, "new_agent", lambda name: agent)
    return agent


def open_files(folder: Path) -> NixlFiles:
    return NixlFiles([str(folder)], value_bytes=VALUE_BYTES, is_aligned=False, quota_bytes=1 << 20, floor_bytes=0)


def planted(files: NixlFiles, name: str = NAME) -> Path:
    path = files._path(name)
    path.parent.mkdir(mode=0o700, parents=True)
    path.write_bytes(bytes(VALUE_BYTES))
    return path


def read(files: NixlFiles) -> list[bool]:
    with files.reading([NAME]) as reading:
        return reading.load([Transfer(0, 0, [Iovec(0, VALUE_BYTES)])])


@pytest.mark.parametrize(("version", "is_taken"), [("1.5.0", False), ("1.5.1", True), ("1.10.0", True), ("2.0", True)])
def test_agent_when_its_nixl_is_older_than_failed_reads_that_end_then_refused_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, version: str, is_taken: bool
) -> None:
    class Played:
        __module__ = "nixl_cu12._api"

        def __init__(self, name: str, config: object) -> None: ...

        def create_backend(self, name: str, options: object) -> None: ...

    api = ModuleType("nixl._api")
    vars(api).update(nixl_agent=Played, nixl_agent_config=lambda backends: None)
    monkeypatch.setitem(sys.modules, "nixl", ModuleType("nixl"))
    monkeypatch.setitem(sys.modules, "nixl._api", api)
    monkeypatch.setattr(importlib.metadata, "version", {"nixl_cu12": version}.__getitem__)
    if is_taken:
        nixl_files.new_agent("agent")
    else:
        with pytest.raises(ValueError, match=r"1\.5\.0 goes on .* pip install .*nixl==1\.5\.1"):
            nixl_files.new_agent("agent")


def test_value_when_nixl_fails_for_a_moment_then_its_file_stays(agent: Agent, tmp_path: Path) -> None:
    files = open_files(tmp_path / "kv")
    path = planted(files)
    agent.states = ["ERR"]
    assert read(files) == [False] and path.exists()
    agent.states = ["DONE"]
    assert read(files) == [True]


@pytest.mark.parametrize("state", ["ERR", "raises"])
def test_transfer_when_it_fails_then_one_line_says_why(
    agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, state: str
) -> None:
    def transfer(handle: str) -> str:
        if state == "raises":
            raise RuntimeError("No space left on device")
        return state

    monkeypatch.setattr(agent, "transfer", transfer)
    files = NixlFiles([str(tmp_path)], value_bytes=VALUE_BYTES, is_aligned=False, quota_bytes=1 << 20, floor_bytes=0)
    for _ in range(3):
        assert files.write([Value(NAME, (Iovec(0, VALUE_BYTES),))]) == [False]
    (line,) = caplog.messages
    assert ("No space left" in line) or ("ended as ERR" in line)


def test_values_when_they_are_more_than_the_process_may_have_files_then_the_first_ones_come_and_descriptors_are_left(
    agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = open_files(tmp_path / "kv")
    planted(files)
    monkeypatch.setattr(nixl_files.resource, "getrlimit", lambda which: (8, 1024))
    with files.reading([NAME] * 5) as reading:
        come = reading.load([Transfer(number, 0, [Iovec(0, VALUE_BYTES)]) for number in range(5)])
    assert come == [True, True, False, False, False]


def test_value_when_the_drive_has_lost_its_bytes_then_its_file_goes(
    agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*args: Any) -> int:
        raise OSError(errno.EIO, "lost")

    files = open_files(tmp_path / "kv")
    path = planted(files)
    agent.states = ["ERR"]
    monkeypatch.setattr(os, "preadv", lost)
    assert read(files) == [False] and not path.exists()


def test_value_when_its_entry_is_damaged_then_the_others_come_and_it_is_written_anew(
    agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = open_files(tmp_path / "kv")
    planted(files)
    other = f"{'00' * 32}/{'ab' * 32}"
    damaged = planted(files, other)
    opened, looked = nixl_files.open_own, Path.exists

    def is_damaged(call: Any) -> Any:
        def made(path: Path, *rest: Any) -> Any:
            if path == damaged:
                raise OSError(errno.EUCLEAN, "structure needs cleaning")
            return call(path, *rest)

        return made

    monkeypatch.setattr(nixl_files, "open_own", is_damaged(opened))
    monkeypatch.setattr(Path, "exists", is_damaged(looked))
    assert files.present([NAME, other]) == [True, False]
    with files.reading([NAME, other]) as reading:
        assert reading.load([Transfer(number, 0, [Iovec(0, VALUE_BYTES)]) for number in range(2)]) == [True, False]
    monkeypatch.undo()
    assert not damaged.exists()


def test_folder_when_it_goes_while_a_value_is_written_to_it_then_it_is_made_again(
    agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, mkdir, times = open_files(tmp_path / "kv"), Path.mkdir, iter([True])

    def goes(path: Path, *rest: Any, **named: Any) -> None:
        mkdir(path, *rest, **named)
        if next(times, False):
            path.rmdir()

    monkeypatch.setattr(Path, "mkdir", goes)
    assert files.write([Value(NAME, [Iovec(0, VALUE_BYTES)])]) == [True]


def test_value_when_another_server_of_the_same_number_writes_it_as_well_then_both_have_written_it(
    agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = open_files(tmp_path / "kv"), open_files(tmp_path / "kv")
    value = Value(NAME, [Iovec(0, VALUE_BYTES)])
    done: list[list[bool]] = []

    def meanwhile(handle: str) -> str:
        monkeypatch.undo()
        done.append(theirs.write([value]))
        return "DONE"

    monkeypatch.setattr(agent, "transfer", meanwhile)
    assert ours.write([value]) == [True] and done == [[True]]
    assert [path.name for path in ours._path(NAME).parent.iterdir()] == ["b" * 64]


def test_transfer_when_it_takes_its_time_then_it_is_looked_at_ever_less_often(
    agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses_s: list[float] = []
    monkeypatch.setattr(nixl_files.time, "sleep", pauses_s.append)
    files = open_files(tmp_path / "kv")
    planted(files)
    agent.states = ["PROC"] * 20 + ["DONE"]
    assert read(files) == [True]
    assert len(pauses_s) == agent.num_looks == 20
    assert pauses_s == sorted(pauses_s) and pauses_s[-1] > 10 * pauses_s[0] > 0


def test_value_when_it_is_a_link_then_it_is_not_read_and_what_it_names_stays(agent: Agent, tmp_path: Path) -> None:
    files = open_files(tmp_path / "kv")
    path = planted(files)
    victim = tmp_path / "victim"
    path.rename(victim)
    path.symlink_to(victim)
    assert read(files) == [False]
    assert path.is_symlink() and victim.stat().st_size == VALUE_BYTES


def test_folder_when_others_may_write_it_then_refused_with_the_way_out(agent: Agent, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    open_files(folder)
    folder.chmod(0o777)
    with pytest.raises(ValueError, match=r"--banyan-store.*chmod go-w"):
        open_files(folder)
