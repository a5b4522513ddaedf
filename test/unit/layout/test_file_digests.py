# SPDX-License-Identifier: Apache-2.0
"""Files are read whole, and once; what is remembered of them is believed only where nobody else could write it."""

import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from banyan.layout import file_digests as module
from banyan.layout.file_digests import FileDigests, file_digests

LONG_AGO_NS = 1_700_000_000_000_000_000
SIZE = 1 << 20


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(range(256)) * (SIZE // 256))
    return path


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # Files of a test have just been written; a time of change cannot be set.
    monkeypatch.setattr(module, "SETTLED_NS", 0)
    return tmp_path / "caches" / "banyan" / "weights-digests"


def edit(path: Path, place: int, mtime_ns: int | None = None) -> None:
    # Times of files come from a clock that ticks every few milliseconds.
    time.sleep(0.05)
    with path.open("r+b") as file:
        file.seek(place)
        file.write(b"\xff\xfe")
    if mtime_ns is not None:
        os.utime(path, ns=(mtime_ns, mtime_ns))


def test_files_when_asked_for_again_then_they_are_not_read_again(weights: Path, memory: Path) -> None:
    first = file_digests([weights], memory)
    again = file_digests([weights], memory)
    assert (first.num_read_bytes, again.num_read_bytes) == (SIZE, 0)
    assert again.digests == first.digests and first.obstacle == ""
    assert memory.stat().st_mode & 0o777 == 0o600


def test_files_when_chunks_are_small_then_each_byte_of_each_counts(weights: Path, monkeypatch) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 100_000)
    monkeypatch.setattr(module, "READ_BYTES", 30_000)
    told = {tuple(file_digests([weights], None).digests)}
    for place in (0, 99_998, 100_000, SIZE - 2):
        edit(weights, place)
        told.add(tuple(file_digests([weights], None).digests))
    assert len(told) == 5


def test_files_when_one_is_edited_between_the_samples_then_it_is_read_again(weights: Path, memory: Path) -> None:
    before = file_digests([weights], memory)
    edit(weights, 5000)
    after = file_digests([weights], memory)
    assert after.num_read_bytes == SIZE and after.digests != before.digests


def test_files_when_an_edit_puts_the_time_back_then_it_is_seen(weights: Path, memory: Path) -> None:
    os.utime(weights, ns=(LONG_AGO_NS, LONG_AGO_NS))
    before = file_digests([weights], memory)
    edit(weights, 5000, mtime_ns=LONG_AGO_NS)
    assert file_digests([weights], memory).digests != before.digests


def test_files_when_two_images_have_the_same_times_and_inodes_then_samples_tell(weights, memory, monkeypatch) -> None:
    monkeypatch.setattr(module, "state_name", lambda state: "the same in both")
    before = file_digests([weights], memory)
    weights.write_bytes(bytes(SIZE))
    after = file_digests([weights], memory)
    assert after.num_read_bytes == SIZE and after.digests != before.digests


def test_files_when_one_has_just_been_written_then_it_is_not_remembered(weights, memory, monkeypatch) -> None:
    monkeypatch.setattr(module, "SETTLED_NS", 3600 * 10**9)
    file_digests([weights], memory)
    assert file_digests([weights], memory).num_read_bytes == SIZE


def test_files_when_one_is_being_written_then_refused(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(files: object) -> list[bytes]:
        edit(weights, 0)
        return [b""]

    monkeypatch.setattr(module, "_read", read)
    with pytest.raises(ValueError, match="is being written: start when it is complete"):
        file_digests([weights], None)


def planted(memory: Path, kind: str, poison: bytes) -> None:
    """Somebody else's idea of a memory, in its place."""
    memory.unlink()
    elsewhere = memory.parent / "elsewhere"
    if kind == "fifo":
        os.mkfifo(memory, 0o600)
        return
    elsewhere.write_bytes(poison)
    elsewhere.chmod(0o600)
    if kind == "symbolic link":
        memory.symlink_to(elsewhere)
    elif kind == "second name":
        os.link(elsewhere, memory)
    else:
        elsewhere.rename(memory)
        memory.chmod(0o660)


@pytest.mark.parametrize("kind", ["symbolic link", "second name", "open to others", "fifo"])
def test_memory_when_somebody_else_could_have_written_it_then_it_is_not_believed(
    weights: Path, memory: Path, kind: str
) -> None:
    right = file_digests([weights], memory)
    poison = memory.read_bytes().replace(right.digests[0].hex().encode(), b"00" * 32)
    planted(memory, kind, poison)
    found: FileDigests = file_digests([weights], memory)
    assert found.digests == right.digests
    assert found.num_read_bytes == SIZE and str(memory) in found.obstacle
    if kind != "fifo":
        assert memory.read_bytes() == poison, "what is not ours is not written either"


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b'{"a": 1}', b"\xff" * 100, b'{"\xc1": ["", ""]}', b'{"a":' + b"[" * 5000]
)
def test_memory_when_it_is_damaged_then_it_is_made_anew(weights: Path, memory: Path, content: bytes) -> None:
    right = file_digests([weights], memory)
    memory.write_bytes(content)
    assert file_digests([weights], memory) == FileDigests(right.digests, SIZE, pytest.approx(0, abs=60), "")
    assert file_digests([weights], memory).num_read_bytes == 0


def test_memory_when_a_digest_in_it_is_none_then_it_is_made_anew(weights: Path, memory: Path) -> None:
    right = file_digests([weights], memory)
    memory.write_bytes(memory.read_bytes().replace(right.digests[0].hex().encode(), b"zz" * 32))
    assert file_digests([weights], memory).digests == right.digests


def test_memory_when_full_then_what_was_used_last_stays(tmp_path: Path, memory: Path, monkeypatch) -> None:
    monkeypatch.setattr(module, "MAX_REMEMBERED", 3)
    paths = [tmp_path / f"{number}.safetensors" for number in range(4)]
    for path in paths:
        path.write_bytes(path.name.encode() * 1000)
        file_digests([paths[0]], memory)
        file_digests([path], memory)
    assert len(module.msgspec.json.decode(memory.read_bytes())) == 3
    assert file_digests([paths[0], paths[3]], memory).num_read_bytes == 0
    assert file_digests([paths[1]], memory).num_read_bytes > 0


def test_memory_when_others_hold_it_then_one_reads_and_the_rest_waits(weights: Path, memory: Path) -> None:
    memory.parent.mkdir(parents=True)
    program = (
        "import sys; from pathlib import Path; from banyan.layout import file_digests as m; m.SETTLED_NS = 0;"
        "print(m.file_digests([Path(sys.argv[1])], Path(sys.argv[2])).num_read_bytes)"
    )
    with memory.open("w") as held:
        memory.chmod(0o600)
        fcntl.flock(held, fcntl.LOCK_EX)
        ranks = [
            subprocess.Popen([sys.executable, "-c", program, weights, memory], stdout=subprocess.PIPE) for _ in range(3)
        ]
    read = sorted(int(rank.communicate(timeout=60)[0]) for rank in ranks)
    assert read == [0, 0, SIZE]


def test_memory_when_its_lock_does_not_come_then_the_files_are_read_without_it(weights, memory, monkeypatch) -> None:
    right = file_digests([weights], memory)
    monkeypatch.setattr(module, "WAIT_S", 0.1)
    with memory.open("r+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        found = file_digests([weights], memory)
    assert found.digests == right.digests and "locked it" in found.obstacle


def test_memory_when_its_folder_cannot_be_made_then_the_files_are_read(weights: Path, tmp_path: Path) -> None:
    found = file_digests([weights], weights / "no folder" / "memory")
    assert found.num_read_bytes == SIZE and found.obstacle != ""
