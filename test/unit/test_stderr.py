# SPDX-License-Identifier: Apache-2.0
"""What the native core says when its log cannot be written: a full disk, a reader that has gone."""

import os
import subprocess
import sys

import pytest

READ_THAT_FAILS = """
import time
from array import array
from banyan import _native

memory, words = _native.SharedBytes.create(4096, "memory"), _native.SharedBytes.create(4096, "words")
ring, feed = _native.FlagRing(words, 1), _native.Feed(memory, array("q", [0]), 64, 1)
read = feed.read()
batch = ring.follow([read])
feed.end()
while not batch.has_ended:
    time.sleep(0.001)
time.sleep(0.1)
print("goes on", batch.has_failed)
"""


@pytest.mark.parametrize("stderr", ["a full disk", "nobody reads"])
def test_core_when_its_log_cannot_be_written_then_the_process_goes_on(stderr):
    """A line that cannot be written panicked, and the hook that says so as well: that ends a process."""
    if stderr == "a full disk":
        target = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, target = os.pipe()
        os.close(reader)
    try:
        ran = subprocess.run([sys.executable, "-c", READ_THAT_FAILS], stdout=subprocess.PIPE, stderr=target, timeout=60)
    finally:
        os.close(target)
    assert (ran.returncode, ran.stdout) == (0, b"goes on True\n")
