# SPDX-License-Identifier: Apache-2.0
"""What a pull makes of bytes that are not what its lender said."""

from __future__ import annotations

import gc
from array import array
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from test.unit.directory.rig import NAMESPACE, keys

from banyan import _native
from banyan.features.nodes.exported_arena import PartFrames
from banyan.features.nodes.pull import Ended, Pull
from banyan.features.nodes.wire import RemoteLease, pack_sums
from banyan.layout import BlockGeometry
from banyan.transport.nixl import process

NUM_LAYERS, LAYER_BYTES = 8, 4096
BLOCK = BlockGeometry(((LAYER_BYTES // 2, LAYER_BYTES // 2),) * NUM_LAYERS)
NAMES = keys(1, 2)
OFFSETS = array("q", [0, BLOCK.frame_bytes])


class Counting:
    """Brings layers of zeros, and counts them."""

    num_layers = 0

    def pull(self, source: object, token: bytes, target: object, num_layers: int, **more: Any) -> Iterator[int]:
        for layer in range(num_layers):
            self.num_layers += 1
            yield layer


@pytest.mark.parametrize(
    ("wrong", "ended", "num_layers"),
    [
        ([], Ended.WHOLE, NUM_LAYERS),
        ([(0, 1), (3, 1)], Ended.DAMAGED, NUM_LAYERS),
        ([(0, 0), (0, 1)], Ended.DAMAGED, 1),
        ([(1, 0), (4, 1)], Ended.DAMAGED, 5),
    ],
)
def test_pull_when_pages_are_wrong_then_it_goes_on_only_while_one_may_be_good(
    wrong: Sequence[tuple[int, int]], ended: Ended, num_layers: int
) -> None:
    memory = _native.SharedBytes.create(2 * BLOCK.frame_bytes, "test")
    feed = _native.Feed(memory, OFFSETS, BLOCK.block_bytes, NUM_LAYERS)
    pull = Pull(NAMESPACE, NAMES, PartFrames(memory, OFFSETS, BLOCK.layer_bytes), feed)
    places = [array("q", [offset + layer * LAYER_BYTES for offset in OFFSETS]) for layer in range(NUM_LAYERS)]
    sums = [memory.checksums(NAMESPACE, NAMES, at, LAYER_BYTES, layer) for layer, at in enumerate(places)]
    for layer, page in wrong:
        sums[layer][page] ^= 1
    carrier, read = Counting(), feed.read()
    assert pull.carry(RemoteLease(1, b"t" * 16, 1, pack_sums(sums)), "there", carrier) is ended
    assert carrier.num_layers == num_layers
    assert read.has_ended and set(read.failed_pages()) == {page for _, page in wrong}


class StillWriting:
    """Its process does not end."""

    def pull(self, *args: Any, **named: Any) -> Iterator[int]:
        raise process.StillWriting(SimpleNamespace(popen=None))
        yield


def test_pull_when_it_may_still_be_written_and_no_thread_is_left_then_its_frames_are_never_given_back(
    monkeypatch, caplog
) -> None:
    def fails(*args: Any, **named: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(process, "start_thread", fails)
    memory = _native.SharedBytes.create(2 * BLOCK.frame_bytes, "test")
    pull = Pull(
        NAMESPACE,
        NAMES,
        PartFrames(memory, OFFSETS, BLOCK.layer_bytes),
        _native.Feed(memory, OFFSETS, BLOCK.block_bytes, NUM_LAYERS),
    )
    read, sums = pull.feed.read(), pack_sums([[0, 0]] * NUM_LAYERS)
    assert pull.carry(RemoteLease(1, b"t" * 16, 1, sums), "there", StillWriting()) is Ended.LOST
    del pull
    gc.collect()
    assert read.is_late and not read.has_ended
    # Who drops a read waits for its end.
    process._awaited.pop()()
    assert "can't start new thread" in caplog.text
