# SPDX-License-Identifier: Apache-2.0
"""The driver calls that everything rests on, on a real device."""

import ctypes
import mmap
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from banyan import _native
from banyan.transport.cuda_ipc.copy_stream import open_copy_streams
from banyan_lab.bench.gpu import copy_batch


def until(condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    return condition()


def test_flag_when_a_stream_waits_then_it_goes_on_with_the_hosts_word(driver):
    word = driver.allocate_pinned(64)
    ctypes.memset(word, 0, 64)
    stream, event = driver.create_stream(), driver.create_event()
    driver.wait_flag(stream, word, 3)
    driver.record_event(event, stream)
    time.sleep(0.05)
    assert not driver.is_event_done(event)
    ctypes.c_uint32.from_address(word).value = 4
    assert until(lambda: driver.is_event_done(event))


def test_flag_when_the_count_goes_round_then_later_is_still_later(driver):
    word = driver.allocate_pinned(64)
    ctypes.c_uint32.from_address(word).value = 2
    stream, event = driver.create_stream(), driver.create_event()
    driver.wait_flag(stream, word, 2**32 - 1)
    driver.record_event(event, stream)
    assert until(lambda: driver.is_event_done(event))


def test_word_when_a_stream_writes_it_then_behind_what_was_enqueued_before(driver):
    """So that a lease ends with the copy and not before it."""
    memory = _native.SharedBytes.create(64, "gpu-check-word")
    start = np.frombuffer(memory, dtype=np.uint8).ctypes.data
    address, gate = driver.register_host(start, 64), driver.allocate_pinned(64)
    ctypes.memset(gate, 0, 64)
    word, stream = ctypes.c_uint32.from_address(start), driver.create_stream()
    driver.wait_flag(stream, gate, 1)
    driver.write_word(stream, address, 2**32 - 1)
    time.sleep(0.05)
    assert word.value == 0
    ctypes.c_uint32.from_address(gate).value = 1
    assert until(lambda: word.value == 2**32 - 1)
    driver.unregister_host(start)


def test_wait_event_when_another_stream_is_behind_then_ordered(driver):
    first, second, gate = driver.create_stream(), driver.create_stream(), driver.allocate_pinned(64)
    ctypes.memset(gate, 0, 64)
    events = [driver.create_event() for _ in range(2)]
    driver.wait_flag(first, gate, 1)
    driver.record_event(events[0], first)
    driver.wait_event(second, events[0])
    driver.record_event(events[1], second)
    time.sleep(0.02)
    assert not driver.is_event_done(events[1])
    ctypes.c_uint32.from_address(gate).value = 1
    assert until(lambda: driver.is_event_done(events[1]))


def test_shared_memory_of_a_peer_when_registered_for_reading_then_the_device_sees_it(driver):
    rank_table = _native.RankTable.create(2)
    pool = _native.SharedBytes.create(1 << 21, "gpu-check")
    memoryview(pool).cast("B")[:8] = b"from-cpu"
    geometry = [[(0, 4096)]]
    frame_table = _native.FrameTable(rank_table, 0, b"n" * 32, pool, 512, geometry)
    reader = _native.Peers(rank_table, 1, 1, b"n" * 32, geometry, _native.DevicePool(b"mine", 1 << 21))
    ((slot, epoch),) = reader.present()
    memory = reader.mapping(slot, epoch)
    address = driver.register_host_reading(memory.address, memory.num_bytes)
    target = torch.zeros(8, dtype=torch.uint8, device="cuda")
    driver.copy_async(target.data_ptr(), address, 8, torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    assert bytes(target.tolist()) == b"from-cpu"
    driver.unregister_host(memory.address)
    frame_table.close()


def test_host_memory_when_registered_then_the_device_writes_it(driver):
    block = mmap.mmap(-1, 1 << 20)
    start = ctypes.addressof(ctypes.c_char.from_buffer(block))
    address = driver.register_host(start, 1 << 20)
    source = torch.arange(8, dtype=torch.uint8, device="cuda")
    driver.copy_async(address, source.data_ptr(), 8, torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    assert list(block[:8]) == list(range(8))
    driver.unregister_host(start)


def test_thread_of_ours_when_a_graph_is_captured_then_it_pins_beside_it_and_the_graph_is_whole(driver):
    block, context = mmap.mmap(-1, 1 << 20), driver.current_context()
    start = ctypes.addressof(ctypes.c_char.from_buffer(block))
    # Kernels are loaded when they run first: not within the graph.
    words, graph = torch.zeros(8, dtype=torch.int64, device="cuda").add_(0), torch.cuda.CUDAGraph()

    def pin():
        driver.enter_context(context)
        driver.register_host(start, 1 << 20)
        return driver.free_bytes()

    with ThreadPoolExecutor(1) as ours:
        with torch.cuda.graph(graph):
            words += 1
            assert ours.submit(pin).result() > 0
        driver.unregister_host(start)
    graph.replay()
    torch.cuda.synchronize()
    assert words.tolist() == [1] * 8


def test_copy_stream_when_opened_then_it_runs_a_copy_and_says_how(driver):
    target = torch.zeros(8, dtype=torch.uint8, device="cuda")
    source = torch.arange(8, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()

    def try_copy(stream):
        driver.copy_async(target.data_ptr(), source.data_ptr(), 8, stream)

    opened = open_copy_streams(driver, num_sms=16, num_streams=2, try_stream=try_copy)
    torch.cuda.synchronize()
    print(opened)
    assert torch.equal(target, source) and opened.num_sms >= 16


def test_batch_when_copied_then_every_piece_is_in_place(driver):
    sources = [torch.full((64,), number, dtype=torch.uint8, device="cuda") for number in range(5)]
    targets = [torch.zeros(64, dtype=torch.uint8, pin_memory=True) for _ in range(5)]
    torch.cuda.synchronize()
    stream = driver.create_stream()
    copy_batch(driver, [t.data_ptr() for t in targets], [s.data_ptr() for s in sources], [64] * 5, stream=stream)
    torch.cuda.synchronize()
    assert [int(target[0]) for target in targets] == list(range(5))
