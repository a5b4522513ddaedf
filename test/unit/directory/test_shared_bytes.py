# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import errno
import fcntl
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from banyan._native import SharedBytes

MFD_NOEXEC_SEAL, F_SEAL_EXEC = 0x8, 0x20
"""Of linux/memfd.h and linux/fcntl.h; Python does not have them."""


def test_create_when_memory_is_short_then_oserror_names_the_size() -> None:
    num_bytes = 1 << 50
    with pytest.raises(OSError, match=f"pool: cannot reserve {num_bytes} bytes"):
        SharedBytes.create(num_bytes, "pool")


@pytest.mark.parametrize(("num_bytes", "label"), [(0, "pool"), (8, "po\0ol")])
def test_create_when_arguments_cannot_be_right_then_valueerror(num_bytes: int, label: str) -> None:
    with pytest.raises(ValueError, match=r"0 bytes|zero byte"):
        SharedBytes.create(num_bytes, label)


def test_view_when_the_object_is_dropped_then_still_mapped() -> None:
    shared = SharedBytes.create(4096, "pool")
    view = np.frombuffer(shared, dtype=np.uint8)
    assert not view.any()
    del shared
    view[:] = 7
    assert view.sum() == 7 * 4096


def test_views_when_two_then_the_same_bytes() -> None:
    shared = SharedBytes.create(64, "pool")
    np.frombuffer(shared, dtype=np.uint8)[3] = 5
    assert memoryview(shared)[3] == 5
    assert shared.num_bytes == len(shared) == 64


def test_memory_when_made_then_private_to_the_user_and_of_fixed_size() -> None:
    shared = SharedBytes.create(12345, "check-mode")
    with open("/proc/self/maps") as maps:
        assert re.search(r"memfd:banyan-check-mode", maps.read())
    fds = [fd for fd in os.listdir("/proc/self/fd") if "banyan-check-mode" in _target(fd)]
    assert len(fds) == 1
    assert os.stat(f"/proc/self/fd/{fds[0]}").st_mode & 0o777 == 0o600
    with pytest.raises(PermissionError):
        os.truncate(int(fds[0]), 1)
    del shared
    assert not [fd for fd in os.listdir("/proc/self/fd") if "banyan-check-mode" in _target(fd)]


def test_memory_when_made_then_nobody_can_ever_run_it() -> None:
    try:
        os.close(os.memfd_create("check", MFD_NOEXEC_SEAL))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        pytest.skip("a kernel before 6.3 has no such memory")
    shared = SharedBytes.create(4096, "check-seals")
    (fd,) = [fd for fd in os.listdir("/proc/self/fd") if "banyan-check-seals" in _target(fd)]
    assert fcntl.fcntl(int(fd), fcntl.F_GET_SEALS) & F_SEAL_EXEC
    del shared


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


@pytest.fixture
def on_tmpfs() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="banyan-test-") as folder:
        yield Path(folder)


def test_keep_when_the_same_file_is_named_again_then_its_bytes_are_found(on_tmpfs: Path) -> None:
    path = str(on_tmpfs / "part-0")
    first, was_there = SharedBytes.keep(path, 8192)
    assert not was_there
    memoryview(first)[100] = 7
    with pytest.raises(BlockingIOError, match="in use by another server"):
        SharedBytes.keep(path, 8192)
    del first
    second, was_there = SharedBytes.keep(path, 8192)
    assert was_there and memoryview(second)[100] == 7
    second.forget(0, 4096)
    assert memoryview(second)[100] == 0


def test_checksums_when_page_key_or_namespace_differ_then_they_differ() -> None:
    shared = SharedBytes.create(8192, "pool")
    keys = [f"{number:064x}" for number in (1, 2)]
    offsets = np.array([0, 4096], dtype=np.int64)
    first, second = shared.checksums(b"n" * 32, keys, offsets, 4096)
    assert first != second, "the same bytes under another key"
    assert shared.checksums(b"m" * 32, keys, offsets, 4096) != [first, second]
    memoryview(shared)[5000] = 1
    assert shared.checksums(b"n" * 32, keys, offsets, 4096)[0] == first
    assert shared.checksums(b"n" * 32, keys, offsets, 4096)[1] != second


@pytest.mark.parametrize("offsets", [[0], [0, 4097], [-1, 0]])
def test_checksums_when_pages_are_not_inside_then_refused(offsets: list[int]) -> None:
    shared = SharedBytes.create(8192, "pool")
    with pytest.raises(ValueError, match="2 keys and"):
        shared.checksums(b"n" * 32, ["0" * 64, "1" * 64], np.array(offsets, dtype=np.int64), 4096)
