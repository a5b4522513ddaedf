# SPDX-License-Identifier: Apache-2.0
"""What waits for a thread is let go without the interpreter's lock: the thread may need it to come to an end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT = """
import sys, threading, time, types
tests = sys.modules["test"] = types.ModuleType("test")
tests.__path__ = ["test"]
import numpy as np
from banyan._native import Feed, FlagRing, SharedBytes
from test.unit.directory.rig import NUM_LAYERS, PAGE_BYTES, Rank, RankTable, frames

block = 2 * PAGE_BYTES * NUM_LAYERS
memory = SharedBytes.create(1 << 16, "arena")
feed = Feed(memory, np.array([0], dtype=np.int64), block, NUM_LAYERS)
read = feed.read()
rank = Rank(RankTable.create(2), 0)
ring = FlagRing(SharedBytes.create(1 << 12, "ring"), 2)
copy = rank.peers.start_copy([], [(read, [0], frames(1))])
batch = ring.follow([read])

def bring():
    time.sleep(0.5)
    for _ in range(NUM_LAYERS):
        feed.land(2 * PAGE_BYTES, [])
    feed.end()

threading.Thread(target=bring).start()
time.sleep(0.1)
if "{what}" == "copy":
    del copy
elif "{what}" == "ring":
    del batch, ring
elif "{what}" == "copy_thread":
    del rank, copy
else:
    del copy, batch, ring, rank, read
print("dropped")
"""


@pytest.mark.parametrize("what", ["copy", "ring", "copy_thread", "all"])
def test_owner_when_dropped_while_python_feeds_its_read_then_the_interpreter_goes_on(what: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.replace("{what}", what)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "dropped\n"
