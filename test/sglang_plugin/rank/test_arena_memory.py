# SPDX-License-Identifier: Apache-2.0
"""A rank's part of the arena on tmpfs, from one server to the next."""

import errno
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

from banyan.arena.sizing import AutoSize
from banyan.layout import BlockGeometry
from banyan.sglang_plugin.rank import arena_memory
from banyan.transport.cuda_ipc.driver import DriverError

BLOCK = BlockGeometry(((2048, 2048),) * 2)
FRAME = 8192
NUM_FRAMES = 6
OURS, OTHER = b"o" * 32, b"x" * 32


def key(number):
    return f"{number:064x}"


@pytest.fixture
def folder():
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="banyan-test-") as name:
        yield Path(name) / "arena"


def keep(folder, *, namespace=OURS, part=0, num_parts=1, num_frames=NUM_FRAMES):
    num_bytes = num_frames * FRAME + 100
    return arena_memory.keep(folder, part, num_parts=num_parts, num_bytes=num_bytes, block=BLOCK, namespace=namespace)


def fill(arena, *frames):
    """Pages with ``frame + 1`` in every byte."""
    view = np.frombuffer(arena.memory, dtype=np.uint8).reshape(NUM_FRAMES, FRAME)
    for frame in frames:
        view[frame] = frame + 1
    keys = [key(frame) for frame in frames]
    arena.index_file.entries(OURS)
    arena.index_file.enter(frames, keys, arena.checksums(OURS)(frames, keys))


def pages(arena):
    view = np.frombuffer(arena.memory, dtype=np.uint8).reshape(NUM_FRAMES, FRAME)
    return [int(row[0]) if (row == row[0]).all() else None for row in view]


def test_keep_when_a_server_follows_then_it_finds_the_pages_and_nothing_else(folder):
    arena = keep(folder)
    fill(arena, 1, 4)
    np.frombuffer(arena.memory, dtype=np.uint8)[2 * FRAME] = 9
    del arena
    arena = keep(folder)
    assert [entry.frame for entry in arena.index_file.entries(OURS)] == [1, 4]
    assert pages(arena) == [0, 2, 0, 0, 5, 0], "what is not in the index file is renewed"


def test_keep_when_a_page_was_damaged_then_it_is_not_found(folder):
    arena = keep(folder)
    fill(arena, 1, 4)
    np.frombuffer(arena.memory, dtype=np.uint8)[4 * FRAME + 77] ^= 1
    del arena
    arena = keep(folder)
    assert [entry.frame for entry in arena.index_file.entries(OURS)] == [1]
    assert pages(arena)[4] == 0


def test_keep_when_the_weights_are_others_then_nothing_is_found(folder):
    fill(keep(folder), 1)
    assert keep(folder, namespace=OTHER).index_file.entries(OTHER) == []
    assert keep(folder).index_file.entries(OURS) == [], "and not by a third server either"


@pytest.mark.parametrize("lost", [(), ("index-0",)])
def test_keep_when_something_still_holds_the_memory_then_all_of_it_is_made_anew_and_said(
    folder, monkeypatch, caplog, lost
):
    fill(keep(folder), 1)
    for name in lost:
        (folder / name).unlink()

    def fail(_arena, *, kept):
        raise OSError(errno.EBUSY, "cannot renew")

    monkeypatch.setattr(arena_memory, "_renew", fail)
    monkeypatch.setattr(arena_memory, "LOCK_PATIENCE_S", 0.3)
    arena = keep(folder)
    assert arena.index_file.entries(OURS) == [] and pages(arena) == [0] * NUM_FRAMES
    assert "given up: [Errno 16] cannot renew" in caplog.text
    monkeypatch.undo()
    fill(arena, 2)
    del arena
    assert [entry.frame for entry in keep(folder).index_file.entries(OURS)] == [2], "the next server finds this one's"


@pytest.mark.parametrize("lost", ["part-0", "index-0"])
def test_keep_when_one_of_the_files_is_gone_then_nothing_is_found(folder, lost):
    fill(keep(folder), 1)
    (folder / lost).unlink()
    arena = keep(folder)
    assert arena.index_file.entries(OURS) == [] and pages(arena) == [0] * NUM_FRAMES


def test_keep_when_the_arena_has_another_size_then_it_is_made_anew(folder):
    fill(keep(folder), 1)
    arena = keep(folder, num_frames=3)
    assert arena.num_frames == 3 and arena.index_file.entries(OURS) == []


def test_keep_when_there_are_fewer_ranks_then_the_others_memory_is_given_back(folder):
    for part in range(3):
        fill(keep(folder, part=part, num_parts=3), part)
    arena = keep(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["index-0", "part-0"]
    assert [entry.frame for entry in arena.index_file.entries(OURS)] == [0]


def test_keep_when_another_server_lives_then_refused_with_the_flag(folder, monkeypatch, capsys):
    monkeypatch.setattr(arena_memory, "LOCK_PATIENCE_S", 0.3)
    held = keep(folder)
    with pytest.raises(SystemExit):
        keep(folder)
    assert "--banyan-keep-host-arena" in (said := capsys.readouterr().err) and "in use by another server" in said
    del held


def test_keep_when_the_folder_is_not_on_tmpfs_then_refused_with_the_flag(capsys, request):
    # The repository's own folder: a temporary one may lie on tmpfs.
    folder = request.config.rootpath / "build" / "not-on-tmpfs"
    try:
        with pytest.raises(SystemExit):
            keep(folder)
        assert not list(folder.iterdir())
    finally:
        folder.rmdir()
    assert "--banyan-keep-host-arena" in (said := capsys.readouterr().err) and "tmpfs" in said


def test_files_when_kept_then_for_this_user_only(folder):
    arena = keep(folder)
    assert folder.stat().st_mode & 0o077 == 0
    assert all(path.stat().st_mode & 0o177 == 0 for path in folder.iterdir())
    del arena


def test_allocate_when_no_page_fits_then_refused(capsys):
    with pytest.raises(SystemExit):
        arena_memory.allocate(100, BLOCK)
    assert "--banyan-host-gb" in capsys.readouterr().err


def size_of(part_bytes, free_bytes=0):
    return AutoSize(part_bytes, 1, 4, free_bytes)


def test_allocate_growing_when_used_then_memory_comes_in_steps_and_can_be_written(monkeypatch):
    monkeypatch.setattr(arena_memory, "STEP_BYTES", 16 * FRAME)
    arena = arena_memory.allocate_sized(size_of(40 * FRAME), BLOCK, arena_memory.growing)
    assert (arena.num_frames, arena.num_backed) == (40, 0)
    deadline = time.monotonic() + 10
    while arena.num_backed < 40:
        assert time.monotonic() < deadline
        arena.growth.poll(0)
    np.frombuffer(arena.memory, dtype=np.uint8)[:] = 7
    arena.growth.close()


def test_allocate_growing_when_the_reserve_would_be_touched_then_no_memory_is_taken(monkeypatch):
    monkeypatch.setattr(arena_memory._native, "available_bytes", lambda: 1000 * FRAME)
    arena = arena_memory.allocate_sized(size_of(40 * FRAME, free_bytes=4 * 1000 * FRAME), BLOCK, arena_memory.growing)
    arena.growth.poll(0)
    arena.growth.close()
    assert arena.num_backed == 0


@pytest.mark.parametrize("make", [arena_memory.growing, arena_memory.whole])
def test_allocate_when_the_size_was_chosen_and_holds_no_prefix_then_none_and_said(make, caplog):
    assert arena_memory.allocate_sized(size_of(3 * FRAME), BLOCK, make) is None
    assert "no host arena" in caplog.text


def test_allocate_whole_when_there_is_room_then_all_of_it_has_memory():
    arena = arena_memory.allocate_sized(size_of(20 * FRAME), BLOCK, arena_memory.whole)
    assert arena.num_backed == arena.num_frames == 20


class Pins:
    """A device that knows a memory from its front on; ``most_bytes`` are all that it takes."""

    is_resting = False

    def __init__(self, num_bytes, most_bytes):
        self.num_pinned_bytes, self.most_bytes = num_bytes, most_bytes

    def pin_to(self, num_bytes):
        if num_bytes > self.most_bytes:
            raise DriverError("cuMemHostRegister", "CUDA_ERROR_OUT_OF_MEMORY")
        self.num_pinned_bytes = num_bytes


def grown(arena, num_unused=0):
    for _ in range(5):
        arena.growth.poll(num_unused)
        time.sleep(0.02)
    return arena.num_backed


@pytest.mark.parametrize("make", [arena_memory.for_device, arena_memory.whole])
def test_pinned_when_the_server_starts_then_frames_of_the_first_piece_serve_and_others_follow(monkeypatch, make):
    monkeypatch.setattr(arena_memory, "PIECE_BYTES", 16 * FRAME)
    monkeypatch.setattr(arena_memory._native, "available_bytes", lambda: 1000 * FRAME)
    arena, pins = make(size_of(40 * FRAME), BLOCK), Pins(16 * FRAME, most_bytes=40 * FRAME)
    arena = arena_memory.pinned(arena, pins, ahead_steps=2)
    assert arena.num_backed == 16
    assert grown(arena) == arena.num_frames == 40 and pins.num_pinned_bytes == 40 * FRAME
    arena.growth.close()


def test_pinned_when_the_rank_rests_then_no_piece_follows_until_it_does_no_more(monkeypatch):
    monkeypatch.setattr(arena_memory, "PIECE_BYTES", 16 * FRAME)
    arena = arena_memory.allocate_sized(size_of(40 * FRAME), BLOCK, arena_memory.whole)
    pins = Pins(16 * FRAME, most_bytes=40 * FRAME)
    arena, pins.is_resting = arena_memory.pinned(arena, pins, ahead_steps=2), True
    assert grown(arena) == 16
    pins.is_resting = False
    assert grown(arena) == 40
    arena.growth.close()


def test_pinned_when_a_later_piece_is_refused_then_the_arena_stays_as_it_is_and_says_so(monkeypatch, caplog):
    monkeypatch.setattr(arena_memory, "PIECE_BYTES", 16 * FRAME)
    arena = arena_memory.pinned(
        arena_memory.allocate_sized(size_of(40 * FRAME), BLOCK, arena_memory.whole),
        Pins(16 * FRAME, most_bytes=16 * FRAME),
        ahead_steps=2,
    )
    assert grown(arena) == 16
    assert "stays at 16 frames" in caplog.text and "OUT_OF_MEMORY" in caplog.text
    arena.growth.close()


def test_pinned_when_pages_were_kept_then_all_of_it_serves_at_once(folder):
    arena = keep(folder)
    assert arena_memory.pinned(arena, Pins(NUM_FRAMES * FRAME, most_bytes=0), ahead_steps=2).num_backed == NUM_FRAMES


@pytest.mark.parametrize(("ahead_steps", "num_backed"), [(1, 16), (40, 40)])
def test_pinned_when_frames_are_unused_then_more_are_pinned_only_where_long_prompts_are_read(
    monkeypatch, ahead_steps, num_backed
):
    monkeypatch.setattr(arena_memory, "PIECE_BYTES", 16 * FRAME)
    arena = arena_memory.allocate_sized(size_of(40 * FRAME), BLOCK, arena_memory.whole)
    arena = arena_memory.pinned(arena, Pins(16 * FRAME, most_bytes=40 * FRAME), ahead_steps=ahead_steps)
    assert grown(arena, num_unused=16) == num_backed
    arena.growth.close()
