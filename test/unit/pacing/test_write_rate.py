# SPDX-License-Identifier: Apache-2.0
import pytest

from banyan.pacing.write_rate import FIRST_WRITE_BYTES_PER_US, SAMPLE_BYTES, WriteRate


class Drive:
    """Takes 32 MiB at once, at the rate that is asked for."""

    def __init__(self):
        self.counted = (0, 0)

    def takes(self, bytes_per_us, num_bytes=2 * SAMPLE_BYTES):
        self.counted = (self.counted[0] + num_bytes, self.counted[1] + int(num_bytes / bytes_per_us))


@pytest.fixture
def drive():
    return Drive()


@pytest.fixture
def rate(drive):
    return WriteRate(lambda: drive.counted)


def test_rate_when_nothing_or_little_was_written_then_what_is_taken_for_granted(drive, rate):
    assert rate.bytes_per_us() == FIRST_WRITE_BYTES_PER_US
    drive.takes(2000.0, num_bytes=SAMPLE_BYTES - 1)
    assert rate.bytes_per_us() == FIRST_WRITE_BYTES_PER_US


def test_rate_when_writes_were_counted_then_theirs_and_a_change_counts_half_at_once(drive, rate):
    drive.takes(2000.0)
    assert rate.bytes_per_us() == pytest.approx(2000, rel=0.01)
    assert rate.bytes_per_us() == pytest.approx(2000, rel=0.01), "nothing new was written"
    drive.takes(100.0)
    assert rate.bytes_per_us() == pytest.approx(1050, rel=0.01)


def test_rate_when_little_comes_at_a_time_then_it_adds_up(drive, rate):
    for _ in range(4):
        drive.takes(800.0, num_bytes=SAMPLE_BYTES // 2)
        found = rate.bytes_per_us()
    assert found == pytest.approx(800, rel=0.01)


def test_rate_when_a_library_told_no_time_then_nothing_is_divided_by_it(drive, rate):
    drive.counted = (10 * SAMPLE_BYTES, 0)
    assert rate.bytes_per_us() == FIRST_WRITE_BYTES_PER_US
