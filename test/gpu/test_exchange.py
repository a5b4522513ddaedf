# SPDX-License-Identifier: Apache-2.0
"""Two processes, on one GPU or on two: pages fetched while their owner evicts, and an owner that is killed."""

import ctypes
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from test.gpu.gpu_ranks import NUM_KEYS, NUM_PAGES, SHAPE, GpuRank, content, key
from test.gpu.pool_tensor import pool_tensor

from banyan import _native
from banyan.transport.cuda_ipc.description import PoolDescription
from banyan.transport.cuda_ipc.opening import p2p_fix_rebuild_cuda_tensor

ROOT = Path(__file__).parents[2]
NUM_FETCHES = 500
HEARTBEAT_S = 1.0


@pytest.fixture(params=["0", "1"], ids=["one_gpu", "two_gpus"])
def node(request):
    """The owner is on the GPU that is named, the reader on the first."""
    rank_table = _native.RankTable.create(2)
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'python'}:{ROOT / 'lab'}:{os.environ.get('PYTHONPATH', '')}",
    }
    owner = subprocess.Popen(
        [sys.executable, str(ROOT / "test/gpu/gpu_ranks.py"), rank_table.path, request.param],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        assert owner.stdout.readline().strip() == "100"
        rank = GpuRank(rank_table, 1)
        rank.meet_peers()
        yield owner, rank
    finally:
        owner.kill()
        owner.wait()


def fetch(rank, number, page):
    """Start to fetch the page of a key, and count on the device what is wrong with it; None when it cannot be had."""
    names = [key(number)]
    lease = rank.source.lease(rank.source.lookup(names), names) if rank.source.lookup(names).num_pages else None
    if lease is None:
        return None
    frames = torch.tensor([page], device="cuda")
    torch.cuda.current_stream().wait_stream(rank.forward)
    rank.forward.wait_stream(torch.cuda.current_stream())
    copy = rank.source.start_copy([(lease, frames)])
    with torch.cuda.stream(rank.forward):
        copy.wait_layer(3)
        wrong = rank.mismatches(page, number)
    assert copy.finish()
    return wrong


def test_fetch_when_the_owner_evicts_all_the_time_then_every_word_is_the_keys(node):
    owner, rank = node
    chance, counts = random.Random(2), []
    deadline = time.monotonic() + 120
    while len(counts) < NUM_FETCHES and time.monotonic() < deadline:
        wrong = fetch(rank, chance.randrange(NUM_KEYS), chance.randrange(NUM_PAGES))
        rank.source.poll()
        if wrong is not None:
            counts.append(wrong)
    assert len(counts) == NUM_FETCHES and owner.poll() is None
    torch.cuda.synchronize()
    assert sum(int(wrong) for wrong in counts) == 0


def test_owner_when_killed_then_its_mapping_is_closed_in_time_and_the_reader_goes_on(node):
    owner, rank = node
    while all(fetch(rank, number, 0) is None for number in range(NUM_KEYS)):
        pass
    assert len(rank.mappings._open) == 1
    owner.kill()
    owner.wait()
    started_s = time.monotonic()
    while len(rank.mappings._open) and time.monotonic() - started_s < 2 * HEARTBEAT_S:
        rank.source.poll()
        rank.mappings.attend(rank.peers.present())
        time.sleep(0.01)
    assert len(rank.mappings._open) == 0 and time.monotonic() - started_s < HEARTBEAT_S
    assert all(fetch(rank, number, 0) is None for number in range(NUM_KEYS))
    rank.write(3, 17)
    torch.cuda.synchronize()
    assert int(rank.mismatches(3, 17)) == 0


def test_copy_when_the_owner_is_killed_before_it_begins_then_it_still_reads_its_bytes(node):
    """Its memory is the device's for as long as a process has it open: rank and copies depend on that."""
    owner, rank = node
    # Kernels are loaded when they run first, and loading may wait for streams: not behind the gate.
    assert int(rank.mismatches(0, 0)) > 0
    gate = rank.driver.allocate_pinned(64)
    ctypes.memset(gate, 0, 64)
    rank.driver.wait_flag(rank.copy_stream, gate, 1)
    wrong = next(wrong for number in range(NUM_KEYS) if (wrong := fetch(rank, number, 0)) is not None)
    owner.kill()
    owner.wait()
    time.sleep(HEARTBEAT_S)
    rank.mappings.attend(rank.peers.present())
    ctypes.c_uint32.from_address(gate).value = 1
    torch.cuda.synchronize()
    assert int(wrong) == 0


def test_pool_when_opened_as_a_tensor_then_it_shows_what_the_owner_has_published(node):
    _owner, rank = node
    name = next([key(number)] for number in range(NUM_KEYS) if rank.source.lookup([key(number)]).num_pages)
    lease = rank.peers.lease(rank.source.lookup(name), name)
    ((slot, epoch, frames),) = lease.sources()
    described = PoolDescription.decode(rank.peers.description(slot, epoch))
    rank.mappings.close()
    # A process opens a handle once, and the other thread closes it.
    rank.opener.submit(lambda: None).result()
    opened = p2p_fix_rebuild_cuda_tensor(rank.driver, described, SHAPE.extents, lambda: None)
    page = int.from_bytes(frames, "little")
    for extent, page_bytes in enumerate(SHAPE.extents):
        seen = pool_tensor(opened, extent, page_bytes, device_id=0)[page].view(torch.int64)
        assert any(bool((seen == content(number, extent)).all()) for number in range(NUM_KEYS))
    lease.release()
    opened.close()
