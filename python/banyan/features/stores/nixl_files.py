# SPDX-License-Identifier: Apache-2.0
"""A folder of values, one file each, moved by NIXL's POSIX plugin.

A file gets its name when it is whole, so several servers may use one folder, on one node or by a mount. It is not
synced: what a power cut leaves of it does not verify, and is removed. Files that nobody has used for longest go first.
"""

from __future__ import annotations

import errno
import importlib.metadata
import mmap
import os
import re
import resource
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from uuid import uuid4

from banyan.features.stores.folder_bound import FolderBound, entries_of
from banyan.features.stores.rate_limited_log import RateLimitedLog
from banyan.features.stores.values import Iovec, Transfer, Value
from banyan.owner import claim_folder, open_own
from banyan.transport.nixl import WAY_OUT

FOLDER = "banyan-values-1"
"""Only what lies in it is counted and removed. The number is that of the format of names and values."""

TOUCH_S = 60.0
"""How old a file's time may be before a read renews it."""
NUM_LANES = 3
"""Transfers at once: those of two readers and one writer."""
LEAST_BYTES = 64 << 10
FIRST_PAUSE_S, LAST_PAUSE_S = 20e-6, 1e-3
"""Between two looks at a transfer."""
FLAG = "--banyan-store"
CHUNK_BYTES = 1 << 20
LEAST_VERSION = (1, 5, 1)
"""Before it, a transfer that fails leaves the rest of its reads under way, and they write to memory that has an owner
again."""
UNREADABLE = (errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.EILSEQ, errno.ENODATA)
"""What the system says of a file whose bytes are lost."""


def new_agent(name: str) -> Any:
    """A NIXL agent with its POSIX plugin.

    Raises:
        ValueError: where either is not there or too old, with the way out.
    """
    try:
        # Its log goes to stdout as that is when it is imported, and stdout is for answers.
        with redirect_stdout(sys.stderr):
            from nixl._api import nixl_agent, nixl_agent_config
        # `nixl` stands for the package that fits the machine: nixl-cu12, nixl-cu13 or another.
        version = importlib.metadata.version(nixl_agent.__module__.partition(".")[0])
        if tuple(map(int, re.findall(r"\d+", version)[:3])) < LEAST_VERSION:
            raise ImportError(f"{version} goes on writing to memory when a read has failed")
        agent: Any = nixl_agent(name, nixl_agent_config(backends=[]))
        agent.create_backend("POSIX", {})
    except ImportError as error:
        raise ValueError(f"NIXL is missing or too old ({error}): {WAY_OUT}, or name the folder as file://") from error
    except Exception as error:
        # NIXL's errors have nothing in common but this.
        raise ValueError(f"NIXL has no POSIX plugin ({error!r}): {WAY_OUT}, or use file://") from error
    return agent


class _Lane:
    """One agent; one thread at a time."""

    def __init__(self, number: int, log: RateLimitedLog) -> None:
        self._log = log
        self._agent = new_agent(f"banyan-store-{os.getpid()}-{number}")
        self._num_registered = 0

    def learn(self, iovecs: Sequence[Iovec]) -> None:
        """Register the memory that it does not know yet."""
        for iovec in iovecs[self._num_registered :]:
            self._register([(iovec.address, iovec.num_bytes, 0, "")], "DRAM")
            self._num_registered += 1

    def _register(self, descriptors: list[tuple[int, int, int, str]], kind: str) -> Any:
        # NIXL's errors have nothing in common but this.
        try:
            return self._agent.register_memory(descriptors, mem_type=kind)
        except Exception as error:
            raise OSError(f"NIXL does not register {kind.lower()} of {descriptors[0][1]} bytes: {error}") from error

    @contextmanager
    def files(self, descriptors: Sequence[int], num_bytes: int) -> Iterator[None]:
        if not descriptors:
            yield
            return
        registered = self._register([(0, num_bytes, fd, "") for fd in descriptors], "FILE")
        try:
            yield
        finally:
            self._agent.deregister_memory(registered)

    def move(self, operation: str, values: Iterable[tuple[int, int, int, Sequence[Iovec]]]) -> set[int]:
        """``values``: number, file descriptor, place in the file, memory. The numbers of those that have not been moved
        whole. A transfer fails as a whole: then each part is tried."""
        owners: list[int] = []
        moves: list[tuple[int, int, Iovec]] = []
        for number, fd, start, parts in values:
            for part in parts:
                owners.append(number)
                moves.append((fd, start, part))
                start += part.num_bytes
        if not moves or self._moved(operation, moves):
            return set()
        return {owner for owner, move in zip(owners, moves, strict=True) if not self._moved(operation, [move])}

    def _moved(self, operation: str, moves: Sequence[tuple[int, int, Iovec]]) -> bool:
        agent = self._agent
        memory = agent.get_xfer_descs([(to.address, to.num_bytes, 0) for _, _, to in moves], mem_type="DRAM")
        files = agent.get_xfer_descs([(start, to.num_bytes, fd) for fd, start, to in moves], mem_type="FILE")
        handle = None
        try:
            handle = agent.initialize_xfer(operation, memory, files, agent.name)
            state = agent.transfer(handle)
            pause_s = FIRST_PAUSE_S
            while state == "PROC":
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, LAST_PAUSE_S)
                state = agent.check_xfer_state(handle)
            if state != "DONE":
                self._log.about(f"a transfer ended as {state}")
            return bool(state == "DONE")
        except Exception as error:  # noqa: BLE001 - whatever it raises, the value has not come, or not gone
            self._log.about(f"a transfer failed: {error!r}")
            return False
        finally:
            if handle is not None:
                agent.release_xfer_handle(handle)


class _Reading:
    """Open files. One whose bytes are lost is removed: it would be in the way of a whole one."""

    def __init__(self, lane: _Lane, paths: Sequence[Path], descriptors: dict[int, int]) -> None:
        self._lane = lane
        self._paths = paths
        self._descriptors = descriptors
        # Aligned, as O_DIRECT wants it.
        self._chunk = mmap.mmap(-1, CHUNK_BYTES)

    def load(self, transfers: Sequence[Transfer]) -> list[bool]:
        fds = self._descriptors
        wanted = [(number, fds[number], start, to) for number, start, to in transfers if number in fds]
        failed = self._lane.move("READ", wanted)
        for number in failed:
            if self._is_lost(number):
                self._paths[number].unlink(missing_ok=True)
        come = fds.keys() - failed
        return [transfer.number in come for transfer in transfers]

    def _is_lost(self, number: int) -> bool:
        """Whether it is the file. Whatever else keeps NIXL from moving it passes, and the value is whole."""
        place = 0
        try:
            while chunk := os.preadv(self._descriptors[number], [self._chunk], place):
                place += chunk
        except OSError as error:
            return error.errno in UNREADABLE
        return False


class NixlFiles:
    """Implements ``values.Values``."""

    def __init__(
        self, folders: Sequence[str], *, value_bytes: int, is_aligned: bool, quota_bytes: int, floor_bytes: int
    ) -> None:
        """``is_aligned``: whether all transfers lie where O_DIRECT wants them.

        Raises:
            ValueError: where NIXL or its plugin is not there, or a folder is not this user's, with the way out.
            OSError: for a folder that cannot be made.
        """
        self._folders = [Path(folder) / FOLDER for folder in folders]
        for folder in self._folders:
            claim_folder(folder.parent, FLAG)
            claim_folder(folder, FLAG)
        self._value_bytes = value_bytes
        self._flags = os.O_DIRECT if is_aligned and all(map(_is_direct, self._folders)) else 0
        self._bound = FolderBound(self._folders, quota_bytes=quota_bytes, floor_bytes=floor_bytes)
        self._iovecs: list[Iovec] = []
        self._lanes: SimpleQueue[_Lane] = SimpleQueue()
        log = RateLimitedLog("NIXL")
        for number in range(NUM_LANES):
            self._lanes.put(_Lane(number, log))

    @property
    def engine(self) -> str:
        return f"NIXL POSIX, a file a page, reads {'with O_DIRECT' if self._flags else 'by the page cache'}"

    @property
    def least_bytes(self) -> int:
        return LEAST_BYTES

    def register(self, iovec: Iovec) -> None:
        self._iovecs.append(iovec)

    @contextmanager
    def _lane(self) -> Iterator[_Lane]:
        lane = self._lanes.get()
        try:
            lane.learn(self._iovecs)
            yield lane
        finally:
            self._lanes.put(lane)

    def _path(self, name: str) -> Path:
        namespace, _, key = name.partition("/")
        return self._folders[int(key[:8], 16) % len(self._folders)] / namespace / key[:2] / key

    def present(self, names: Sequence[str]) -> list[bool]:
        return [_is_there(self._path(name)) for name in names]

    def write(self, values: Sequence[Value]) -> list[bool]:
        if not self._bound.make_room(len(values) * self._value_bytes):
            raise OSError(f"no room in {self._folders[0].parent}: a part of the quota, or the last free bytes")
        paths = [self._path(value.name) for value in values]
        # Not by the process's number: servers in containers may all have the same.
        drafts = [path.with_name(f"{path.name}.{uuid4().hex}") for path in paths]
        try:
            has_come = self._write_drafts(drafts, values)
            for draft, path, is_whole in zip(drafts, paths, has_come, strict=True):
                if is_whole:
                    draft.rename(path)
        finally:
            for draft in drafts:
                draft.unlink(missing_ok=True)
        return has_come

    def _write_drafts(self, drafts: Sequence[Path], values: Sequence[Value]) -> list[bool]:
        descriptors: list[int] = []
        try:
            for draft in drafts:
                try:
                    descriptors.append(_created(draft))
                except FileNotFoundError:
                    # Whoever evicts removes a folder in which nothing is left, maybe between the two.
                    descriptors.append(_created(draft))
            return self._written(values, descriptors)
        finally:
            for fd in descriptors:
                os.close(fd)

    def _written(self, values: Sequence[Value], descriptors: Sequence[int]) -> list[bool]:
        wanted = [(number, fd, 0, values[number].parts) for number, fd in enumerate(descriptors)]
        with self._lane() as lane, lane.files(descriptors, self._value_bytes):
            failed = lane.move("WRITE", wanted)
        return [number not in failed for number in range(len(values))]

    @contextmanager
    def reading(self, names: Sequence[str]) -> Iterator[_Reading]:
        paths, descriptors = [self._path(name) for name in names], {}
        try:
            for number, path in enumerate(paths[: _most_open()]):
                # Somebody else's file is none of ours, and not ours to remove.
                with suppress(FileNotFoundError, PermissionError), removed_where_unreadable(path):
                    descriptors[number] = self._open(path)
            with self._lane() as lane, lane.files(list(descriptors.values()), self._value_bytes):
                yield _Reading(lane, paths, descriptors)
        finally:
            for fd in descriptors.values():
                os.close(fd)

    def _open(self, path: Path) -> int:
        """Raises FileNotFoundError, also for a file that is not whole; that one is removed."""
        fd = open_own(path, os.O_RDONLY | self._flags)
        state = os.fstat(fd)
        if state.st_size != self._value_bytes:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise FileNotFoundError(path)
        if time.time() - state.st_mtime > TOUCH_S:
            # On a mount that only reads, others keep the time.
            with suppress(OSError):
                os.utime(fd)
        return fd

    def remove(self, names: Sequence[str]) -> int:
        num_removed = 0
        for name in names:
            with suppress(FileNotFoundError):
                self._path(name).unlink()
                num_removed += 1
        return num_removed

    def stats(self) -> dict[str, int]:
        return {"evicted_pages": self._bound.num_evicted, "no_space_pauses": self._bound.num_pauses}

    def close(self) -> None:
        while not self._lanes.empty():
            self._lanes.get()


def survey(folders: Sequence[str]) -> dict[str, int]:
    """What lies in the folders of such a store. Raises FileNotFoundError where there is none."""
    roots = [Path(folder) / FOLDER for folder in folders]
    for root in roots:
        if not root.is_dir():
            raise FileNotFoundError(errno.ENOENT, f"{root}: there is no store")
    sizes = [entry.num_bytes for root in roots for entry in entries_of(str(root))]
    namespaces = {folder.name for root in roots for folder in root.iterdir()}
    return {"num_records": len(sizes), "used_bytes": sum(sizes), "num_namespaces": len(namespaces)}


def _is_there(path: Path) -> bool:
    """Whether it can be looked for at all: what is damaged is written anew."""
    try:
        return path.exists()
    except OSError as error:
        if error.errno in UNREADABLE:
            return False
        raise


@contextmanager
def removed_where_unreadable(path: Path) -> Iterator[None]:
    """A file whose entry is damaged is removed, as far as it can be, and costs nothing but its page."""
    try:
        yield
    except OSError as error:
        if error.errno not in UNREADABLE:
            raise
        with suppress(OSError):
            path.unlink()


def _created(draft: Path) -> int:
    draft.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # By the page cache: O_DIRECT would wait for the file system's journal at every file.
    return os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)


def _most_open() -> int:
    """Files that one read opens, two of which may be under way: a process without a descriptor left can do nothing
    else. Pages behind those are computed."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else max(1, soft // 4)


def _is_direct(folder: Path) -> bool:
    """Whether files there can be opened past the page cache."""
    try:
        fd = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT, 0o600)
    except OSError:
        return False
    os.close(fd)
    return True
