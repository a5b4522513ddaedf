# SPDX-License-Identifier: Apache-2.0
"""The announced form of a pool: round trip, one export for each allocation, and no trust in what is read."""

import msgspec
import pytest
from msgspec.structs import replace
from test.unit.transport.fake_gpu import FakeDriver, FakeGpu

from banyan.transport.cuda_ipc.description import PlacedExtent, PoolDescription, Probe, Segment, describe

SIMPLE = PoolDescription(b"u" * 16, (Segment(b"h" * 64, 100),), (PlacedExtent(0, 0, 60), PlacedExtent(0, 60, 40)))


PROBED = replace(SIMPLE, probe=Probe(b"n" * 16, PlacedExtent(0, 60, 40)))


@pytest.mark.parametrize("description", [SIMPLE, PROBED])
def test_description_when_decoded_then_equal(description):
    assert PoolDescription.decode(description.encode()) == description


@pytest.mark.parametrize(
    ("extent", "reason"),
    [
        (PlacedExtent(5, 60, 40), "segment 5 of 1"),
        (PlacedExtent(0, 60, 41), "leaves its segment"),
        (PlacedExtent(0, 2**64 - 1, 40), "leaves its segment"),
        (PlacedExtent(0, -1, 40), ">= 0"),
    ],
)
def test_description_when_an_extent_or_the_probe_leaves_its_segment_then_valueerror(extent, reason):
    for damaged in (replace(SIMPLE, extents=(extent,)), replace(SIMPLE, probe=Probe(b"n" * 16, extent))):
        with pytest.raises(ValueError, match=reason):
            PoolDescription.decode(damaged.encode())


@pytest.mark.parametrize(
    "damage",
    [lambda data: data[:20], lambda data: b"X" + data[1:], lambda data: data + b"\0", lambda data: b""],
    ids=["short", "other", "long", "none"],
)
def test_description_when_damaged_then_valueerror(damage):
    with pytest.raises(msgspec.DecodeError):
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
