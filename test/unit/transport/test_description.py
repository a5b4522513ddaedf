# SPDX-License-Identifier: Apache-2.0
"""The announced form of a pool: round trip, one export for each allocation, and no trust in what is read."""

from dataclasses import replace

import pytest
from test.unit.transport.fake_gpu import FakeDriver, FakeGpu

from banyan.transport.cuda_ipc.description import PlacedExtent, PoolDescription, Probe, Segment, describe

SIMPLE = PoolDescription(b"u" * 16, (Segment(b"h" * 64, 100),), (PlacedExtent(0, 0, 60), PlacedExtent(0, 60, 40)))


PROBED = replace(SIMPLE, probe=Probe(b"n" * 16, PlacedExtent(0, 60, 40)))


@pytest.mark.parametrize("description", [SIMPLE, PROBED])
def test_description_when_decoded_then_equal(description):
    assert PoolDescription.decode(description.encode()) == description


def test_probe_when_it_leaves_its_segment_then_valueerror():
    data = PROBED.encode()
    with pytest.raises(ValueError, match="leaves its segment"):
        PoolDescription.decode(data[:-24] + (41).to_bytes(8, "little") + data[-16:])


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda data: data[:20], "too short"),
        (lambda data: b"X" + data[1:], "no pool description"),
        (lambda data: data[:8] + b"\x09" + data[9:], "no pool description"),
        (lambda data: data + b"\0", "do not make"),
        (lambda data: data[:-24] + b"\x05" + data[-23:], "segment 5 of 1"),
        (lambda data: data[:-8] + (41).to_bytes(8, "little"), "leaves its segment"),
        (lambda data: data[:-8] + (2**64 - 1).to_bytes(8, "little"), "leaves its segment"),
    ],
)
def test_description_when_damaged_then_valueerror(damage, reason):
    with pytest.raises(ValueError, match=reason):
        PoolDescription.decode(damage(SIMPLE.encode()))


def test_describe_when_extents_share_an_allocation_then_it_is_exported_once():
    gpu = FakeGpu()
    driver = FakeDriver(gpu)
    both, single = gpu.allocate(128), gpu.allocate(64)
    description = describe(driver, b"u" * 16, [(both, 64), (both + 64, 64), (single, 64)])
    assert driver.names().count("export_handle") == 2
    assert [(e.segment, e.offset_bytes) for e in description.extents] == [(0, 0), (0, 64), (1, 0)]


def test_describe_when_an_extent_leaves_its_allocation_then_valueerror():
    gpu = FakeGpu()
    with pytest.raises(ValueError, match="leaves its segment"):
        describe(FakeDriver(gpu), b"u" * 16, [(gpu.allocate(64), 65)])
