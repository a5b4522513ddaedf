# SPDX-License-Identifier: Apache-2.0
"""SGLang's lock on the loads of all ranks, where one of them is stopped while it holds it; with SGLang's own file."""

import fcntl
from functools import partial
from itertools import permutations

import msgspec
import pytest
from sglang.srt.managers import load_snapshot
from sglang.srt.managers.load_snapshot import (
    LoadSnapshot,
    ShmLoadSnapshotReader,
    ShmLoadSnapshotWriter,
    snapshot_decoder,
    snapshot_encoder,
)

from banyan.config import Config
from banyan.sglang_plugin import load_file, runtime

BUSY = LoadSnapshot(
    **{"timestamp": 1.8e9, "dp_rank": 1, "num_running_reqs": 3, "num_waiting_reqs": 2, "num_used_tokens": 70_000},
    **{"num_waiting_uncached_tokens": 9_000, "num_total_tokens": 70_000, "num_active_tokens": 70_000},
    **{"max_total_num_tokens": 100_000, "max_running_requests": 64, "token_usage": 0.7, "gen_throughput": 31.4},
    **{"cache_hit_rate": 0.5, "utilization": 0.9, "total_prefill_uncached_tokens": 1 << 33},
    **{"total_prefill_busy_us": 1 << 34, "memory": load_snapshot.MemoryMetrics(1.0, 2.0, 0.0, 100_000)},
)
IDLE = LoadSnapshot(timestamp=1.9e9, dp_rank=1, max_total_num_tokens=100_000)
LATER = msgspec.structs.replace(BUSY, timestamp=2.1e9, num_running_reqs=300, num_used_tokens=12, cache_hit_rate=0.1)


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setattr(runtime, "config", Config)
    original = load_snapshot.file_lock
    monkeypatch.setattr(load_snapshot, "file_lock", partial(load_file.around_file_lock, original))
    return str(tmp_path / "loads")


# Without the hook all wait for ever.
@pytest.mark.timeout(60)
@pytest.mark.parametrize("lock_type", [fcntl.LOCK_EX, fcntl.LOCK_SH], ids=["a rank", "the dispatcher"])
def test_loads_when_somebody_is_stopped_with_the_lock_then_the_others_tell_and_read_them(path, lock_type):
    writers = [ShmLoadSnapshotWriter(path, 2, rank) for rank in range(2)]
    reader = ShmLoadSnapshotReader(path, 2)
    with open(path) as stopped:
        fcntl.flock(stopped, lock_type)
        for writer, num_running in zip(writers, (3, 4), strict=True):
            writer.write(LoadSnapshot(dp_rank=writer.dp_rank, num_running_reqs=num_running))
        assert [load.num_running_reqs for load in reader.read_all()] == [3, 4]
    with open(path) as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_lock_when_it_is_free_then_it_is_held_until_the_end(path):
    ShmLoadSnapshotWriter(path, 1, 0).close()
    with open(path) as own, open(path) as other:
        with load_snapshot.file_lock(own.fileno(), fcntl.LOCK_EX), pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_lock_when_banyan_is_off_then_it_is_sglangs(monkeypatch):
    monkeypatch.setattr(runtime, "config", lambda: None)
    assert load_file.around_file_lock(lambda *args: args, 7, fcntl.LOCK_SH) == (7, fcntl.LOCK_SH)


@pytest.mark.parametrize(("old", "new"), permutations((BUSY, LATER, IDLE), 2))
def test_load_when_it_is_read_while_it_is_written_then_it_is_none_or_that_ranks(old, new):
    before, after = snapshot_encoder.encode(old), snapshot_encoder.encode(new)
    after += b"\0" * (len(before) - len(after))
    num_read = 0
    for cut in range(1, len(before)):
        try:
            load = snapshot_decoder.decode(after[:cut] + before[cut:])
        except msgspec.DecodeError:
            continue
        num_read += 1
        assert (load.dp_rank, load.max_total_num_tokens) == (1, 100_000)
    assert num_read < len(before) - 1 or IDLE not in (old, new)
