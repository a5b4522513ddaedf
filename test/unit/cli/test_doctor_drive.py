# SPDX-License-Identifier: Apache-2.0
import errno
import os

import pytest

from banyan.cli import doctor_drive
from banyan.cli.doctor_drive import examine_drive, examine_store_drive, speed
from banyan.cli.doctor_machine import Kernel


@pytest.fixture
def kernel(tmp_path):
    """Knows ``tmp_path / "drive"`` as a mount of its own."""
    folder = tmp_path / "drive"
    folder.mkdir()

    def make(kind):
        (tmp_path / "proc").mkdir(exist_ok=True)
        (tmp_path / "proc/mounts").write_text(f"x / ext4 rw 0 0\nx {folder.resolve()} {kind} rw 0 0\n")
        return folder, Kernel(tmp_path)

    return make


@pytest.mark.parametrize(
    ("kind", "said"),
    [("xfs", ""), ("tmpfs", "--banyan-host-gb"), ("overlay", "mount a volume"), ("nfs4", "network file system")],
)
def test_place_when_it_is_no_drive_of_this_machine_then_a_note(kernel, kind, said):
    where, told = examine_drive(*kernel(kind), read_rate=lambda folder: 1e9)
    assert where.detail.startswith(kind) and where.is_ok and said in where.hint and bool(said) == bool(where.hint)
    assert told.detail.startswith("1000 MB/s") and told.is_ok


def test_folder_when_it_is_missing_or_cannot_be_written_then_bad(kernel, tmp_path):
    folder, known = kernel("xfs")
    # The second the system refuses to look for, as it does below a folder that may not be entered.
    for name in ("missing", "x" * 300):
        (missing,) = examine_drive(tmp_path / name, known)
        assert not missing.is_ok and "make it" in missing.advice

    def refuse(folder):
        raise OSError(errno.ENOSPC, "No space left on device")

    _, full = examine_drive(folder, known, read_rate=refuse)
    assert not full.is_ok and "No space" in full.detail and "room" in full.advice


def test_store_folder_when_it_is_not_there_yet_then_a_server_makes_it_and_its_drive_is_the_one_above(
    kernel, monkeypatch
):
    folder, known = kernel("xfs")
    monkeypatch.setattr(doctor_drive, "measured_rate", lambda folder: 1e9)
    yet, where, told = examine_store_drive(folder / "kv" / "a", known)
    assert yet.what == f"drive of {folder / 'kv' / 'a'}" and yet.is_ok and f"makes it in {folder}" in yet.detail
    assert where.what == f"drive of {folder}" and where.detail.startswith("xfs") and told.is_ok
    assert [one.what for one in examine_store_drive(folder, known)] == [where.what, told.what]


def test_rate_when_it_is_measured_then_nothing_is_left_behind(kernel, monkeypatch):
    monkeypatch.setattr(doctor_drive, "PROBE_BYTES", 4 << 20)
    folder, _ = kernel("xfs")
    assert doctor_drive.measured_rate(folder) > 0
    assert list(folder.iterdir()) == []


def link(tmp_path, folder, **numbers):
    device = os.stat(folder).st_dev
    drive = tmp_path / "sys/devices/pci/nvme0"
    (drive / "block").mkdir(parents=True)
    for name, text in numbers.items():
        (drive / name).write_text(text)
    block = tmp_path / "sys/dev/block"
    block.mkdir(parents=True)
    (block / f"{os.major(device)}:{os.minor(device)}").symlink_to(drive / "block")


def test_link_when_the_drive_has_one_then_its_rate_is_that_of_its_lanes(kernel, tmp_path):
    folder, known = kernel("xfs")
    link(
        tmp_path,
        folder,
        current_link_speed="16.0 GT/s PCIe",
        current_link_width="4",
        max_link_speed="16.0 GT/s PCIe",
        max_link_width="4",
    )
    bytes_per_s, runs_fully = doctor_drive.link_of(folder, known)
    assert bytes_per_s == pytest.approx(7.877e9, rel=1e-3) and runs_fully


def test_link_when_it_runs_on_fewer_lanes_then_the_speed_has_a_note(kernel, tmp_path):
    folder, known = kernel("xfs")
    link(
        tmp_path,
        folder,
        current_link_speed="5.0 GT/s",
        current_link_width="1",
        max_link_speed="16.0 GT/s",
        max_link_width="4",
    )
    told = examine_drive(folder, known, read_rate=lambda folder: 4e8)[1]
    assert "could carry 500 MB/s" in told.detail and "lspci" in told.hint


def test_speed_when_it_is_a_small_part_of_the_link_then_a_note_and_else_none():
    assert "banyan bench store" in speed("x", 1e8, (7e9, True)).hint
    assert speed("x", 3e9, (7e9, True)).hint == ""
    assert speed("x", 1e8, None).hint == ""
