# SPDX-License-Identifier: Apache-2.0
"""Digests of whole files, each computed once: what has been computed is remembered in a private file.

Invariants
  1. A digest is of every byte of its file.
  2. What is remembered of a file is believed while its device, inode, size and times are those of then, and samples of
     it too: times are the same for two images of a reproducible build, or where a tool puts them back.
  3. The memory is believed, and written, only where it is this user's, nobody else may write it, and it has one name.
  4. One process computes; others that want to know wait for it, no longer than ``WAIT_S``.

States of a memory: locked by this process -> read -> written -> unlocked. Without one that can be used everything is
computed, and the answer says why.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from banyan.decoding import decoded
from banyan.owner import open_own

MEMORY_NAME = "weights-digests"
MAX_REMEMBERED = 4096
"""Files. A checkpoint of 1 TB has a few hundred."""
MAX_MEMORY_BYTES = 4 << 20
WAIT_S = 600.0
POLL_S = 0.05
SETTLED_NS = 2_000_000_000
"""Of a file that was written this short a while ago, the next write may leave the same times."""
CHUNK_BYTES = 64 << 20
"""Read by one thread; a file's digest is that of its chunks' digests."""
READ_BYTES = 4 << 20
MAX_THREADS = 8
NUM_SAMPLES = 64
SAMPLE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class FileDigests:
    """Digests in the order of the files, and what they took.

    Attributes:
        num_read_bytes: of the files that were not remembered.
        read_s: how long reading these took.
        obstacle: why nothing is remembered; empty when it is.
    """

    digests: list[bytes]
    num_read_bytes: int
    read_s: float
    obstacle: str


_Sha256 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class _Known(msgspec.Struct, array_like=True):
    """What is remembered of a file, in hexadecimal."""

    sample: str
    digest: _Sha256


_decoder = msgspec.json.Decoder(dict[str, _Known])


def file_digests(paths: Sequence[Path], memory: Path | None) -> FileDigests:
    """Digests of these files, those that ``memory`` knows without reading them.

    Raises:
        OSError: when a file cannot be read.
        ValueError: when one changes meanwhile.
    """
    if memory is None:
        return _computed(paths, {}, "this user has no folder for caches")
    try:
        with _locked(memory) as handle:
            known = recalled(handle)
            answer = _computed(paths, known, "")
            _remember(handle, known)
            return answer
    except _Unusable as error:
        return _computed(paths, {}, f"{memory}: {error}")


class _Unusable(Exception):
    """The memory cannot be used."""


def _computed(paths: Sequence[Path], known: dict[str, _Known], obstacle: str) -> FileDigests:
    """Adds to ``known``, in the order of use, what may be remembered."""
    states = [path.stat() for path in paths]
    names = [state_name(state) for state in states]
    samples = [_sample(path, state.st_size).hex() for path, state in zip(paths, states, strict=True)]
    new = [
        index
        for index, (name, sample) in enumerate(zip(names, samples, strict=True))
        if name not in known or known[name].sample != sample
    ]
    started_s, started_ns = time.monotonic(), time.time_ns()
    read = dict(zip(new, _read([(paths[index], states[index].st_size) for index in new]), strict=True))
    for path, name in zip(paths, names, strict=True):
        if state_name(path.stat()) != name:
            raise ValueError(f"{path} is being written: start when it is complete")
    digests = []
    for index, (name, state) in enumerate(zip(names, states, strict=True)):
        digest = read[index] if index in read else bytes.fromhex(known[name].digest)
        digests.append(digest)
        known.pop(name, None)
        if max(state.st_mtime_ns, state.st_ctime_ns) < started_ns - SETTLED_NS:
            known[name] = _Known(samples[index], digest.hex())
    num_bytes = sum(states[index].st_size for index in new)
    return FileDigests(digests, num_bytes, time.monotonic() - started_s, obstacle)


def _read(files: Sequence[tuple[Path, int]]) -> list[bytes]:
    """The digest of each file of this size. Reading and hashing let other threads run."""
    chunks = [(path, start) for path, size in files for start in range(0, size, CHUNK_BYTES)]
    if not files:
        return []
    with ThreadPoolExecutor(min(MAX_THREADS, len(os.sched_getaffinity(0)))) as threads:
        parts = threads.map(_chunk_digest, chunks)
        return [
            hashlib.sha256(b"".join(next(parts) for _ in range(0, size, CHUNK_BYTES))).digest() for _, size in files
        ]


def _chunk_digest(chunk: tuple[Path, int]) -> bytes:
    path, start = chunk
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        for offset in range(start, start + CHUNK_BYTES, READ_BYTES):
            digest.update(os.pread(file.fileno(), READ_BYTES, offset))
    return digest.digest()


def _sample(path: Path, num_bytes: int) -> bytes:
    """Digest of pieces of the file, evenly spread."""
    sample = hashlib.sha256()
    last = max(0, num_bytes - SAMPLE_BYTES)
    with path.open("rb", buffering=0) as file:
        for number in range(NUM_SAMPLES):
            sample.update(os.pread(file.fileno(), SAMPLE_BYTES, last * number // (NUM_SAMPLES - 1)))
    return sample.digest()


def state_name(state: os.stat_result) -> str:
    """What tells a file from itself after a write, and from another one in its place."""
    return f"{state.st_dev}:{state.st_ino}:{state.st_size}:{state.st_mtime_ns}:{state.st_ctime_ns}"


@contextmanager
def _locked(memory: Path) -> Iterator[int]:
    """The memory, opened and locked; made where there is none."""
    try:
        memory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = open_own(memory, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise _Unusable(f"{error.strerror or error}: remove it") from error
    try:
        _lock(handle)
        yield handle
    finally:
        # The lock goes with it.
        os.close(handle)


def _lock(handle: int) -> None:
    end_s = time.monotonic() + WAIT_S
    while True:
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end_s:
                raise _Unusable(f"another process has locked it for {WAIT_S:g} s") from None
            time.sleep(POLL_S)
        except OSError as error:
            raise _Unusable(error.strerror or str(error)) from error


def recalled(handle: int) -> dict[str, _Known]:
    """What is remembered, the last used last. What cannot be read is nothing: it is computed again."""
    try:
        return decoded(_decoder, os.pread(handle, MAX_MEMORY_BYTES, 0))
    except (OSError, msgspec.DecodeError):
        return {}


def _remember(handle: int, known: dict[str, _Known]) -> None:
    kept = dict(list(known.items())[-MAX_REMEMBERED:])
    try:
        os.ftruncate(handle, 0)
        os.pwrite(handle, msgspec.json.encode(kept), 0)
    except OSError:
        # A disk without room: half of it is not read as JSON, and then computed again.
        os.ftruncate(handle, 0)
