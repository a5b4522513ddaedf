# SPDX-License-Identifier: Apache-2.0
"""A short part of `python -m benchmark.byte_fuzz`, and that it notices what is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmark.byte_fuzz import drawn, play
from benchmark.byte_readers import Reader, readers

ROOT = Path(__file__).parents[3]
READERS = readers()
NUM_INPUTS = 20_000


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_reader_when_its_seeds_are_as_they_are_then_it_reads_them(reader: Reader) -> None:
    for seed in reader.seeds:
        reader.read(seed)


def test_readers_when_messages_are_changed_then_each_is_read_or_refused() -> None:
    played = play(time.time_ns(), NUM_INPUTS, READERS)
    assert played.wrong == []
    assert played.refused.total() > NUM_INPUTS / 100 and played.read.total() > NUM_INPUTS / 100


def test_input_when_its_number_comes_again_then_it_is_the_same() -> None:
    assert drawn(7, READERS) == drawn(7, READERS)
    assert len({drawn(number, READERS)[1] for number in range(100)}) > 50


SPOILED = """
import time
from benchmark import byte_fuzz
from benchmark.byte_readers import Reader

kept = []

def read(payload):
    if payload == b"bad":
        raise KeyError("x")
    if payload == b"slow":
        began_s = time.thread_time()
        while time.thread_time() - began_s < 0.02:
            pass
    kept.append(bytearray(b"\\1" * (1 << 20)))

byte_fuzz.SLOW_S, byte_fuzz.WARM, byte_fuzz.MOST_GROWN_BYTES, byte_fuzz.MOST_CHANGES = 0.01, 10, 32 << 20, 0
print(*byte_fuzz.play(0, 120, [Reader("one", read, (ValueError,), [b"bad", b"slow", b"good"])]).wrong, sep="\\n")
"""


def test_play_when_a_reader_raises_what_it_must_not_or_is_slow_or_keeps_all_then_it_is_said() -> None:
    """In a process of its own: what grows is the most that a process ever had."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'python'}"}
    command = [sys.executable, "-c", SPOILED]
    wrong = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert "KeyError" in wrong and "took" in wrong and "memory grew" in wrong
