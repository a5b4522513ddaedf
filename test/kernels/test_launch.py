# SPDX-License-Identifier: Apache-2.0
"""Launches of ``kv_trans_for_dp`` by Triton's own launcher, for a GPU that is not here."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from banyan.transport.cuda_ipc.copies import PageLists
from banyan.transport.kv_trans.launch import KvTrans, TileShape

PAGE_BYTES = [16 * 8 * 128 * 2] * 4
TABLE, CHUNKS, ROWS, SOURCES, TARGETS = ((0x7F00 + number) << 32 for number in range(5))


class Machine:
    """What Triton asks of a machine with a Hopper GPU; ``launched`` has what its driver is given."""

    def __init__(self):
        from triton.backends.compiler import GPUTarget

        self.launched = []
        self.stream = 0
        self.num_selected = 0
        self.utils = SimpleNamespace(
            load_binary=lambda *of: (1, 2, 31, 0, 1024),
            get_device_properties=lambda device: {"max_shared_mem": 1 << 17},
        )
        self.target = GPUTarget("cuda", 90, 32)

    def launcher_cls(self, source, metadata):
        def launch(*given):
            (*grid, stream, function, _packed, _metadata, _enter, _leave), numbers = given[:9], given[9:]
            self.launched.append((tuple(grid), stream, function, numbers))

        return launch

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return self.stream

    def get_current_target(self):
        return self.target

    @contextmanager
    def on_stream(self, stream):
        self.num_selected += 1
        self.stream = stream
        yield
        self.stream = 0


@pytest.fixture
def machine(monkeypatch):
    from triton.runtime.driver import driver

    made = Machine()
    # What it has found here is nothing, and it cannot be told to forget.
    monkeypatch.setattr(driver, "_active", made)
    return made


def lists(num_pages):
    return PageLists(ROWS, SOURCES, TARGETS, num_pages)


def test_launch_when_the_kernel_is_known_then_the_driver_gets_what_triton_would_give_it(machine, compiled_kernel):
    def kernel():
        return KvTrans(
            table=TABLE,
            chunks=CHUNKS,
            page_bytes=PAGE_BYTES,
            shape=TileShape.fitting(PAGE_BYTES, 256),
            num_programs=8,
            on_stream=machine.on_stream,
            kernel=compiled_kernel,
        )

    warm, cold = kernel(), kernel()
    warm.warm_up(stream=5)
    assert warm.num_registers == 31 and machine.num_selected == 1, "a stream was made the current one again"
    for each in (cold, warm):
        machine.launched.clear()
        each.enqueue(stream=7, lists=lists(3), target_row=1, extents=range(2, 4))
        each.on_grid(2).enqueue(stream=9, lists=lists(1000), target_row=0, extents=range(4))
        if each is cold:
            expected = list(machine.launched)
    assert [(grid, stream) for grid, stream, _, _ in expected] == [((6, 1, 1), 7), ((2, 1, 1), 9)]
    assert machine.launched == expected
