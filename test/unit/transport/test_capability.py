# SPDX-License-Identifier: Apache-2.0
"""Which way pages go on a GPU, for every fact that matters; and the stream that copies run on."""

import pytest

from banyan.transport.capability import Route, choose_route
from banyan.transport.cuda_ipc.copy_stream import open_copy_streams
from banyan.transport.cuda_ipc.driver import DriverError


@pytest.mark.parametrize(
    ("obstacle", "unreachable_devices", "reads_others", "has_arena", "route", "words"),
    [
        ("", (), False, False, Route.DIRECT, ""),
        ("3 buffers", (), False, False, Route.REFUSED, "3 buffers"),
        ("3 buffers", (1,), True, True, Route.STAGED, "3 buffers: pages go through the host arena"),
        ("", (1, 2), False, False, Route.REFUSED, "device 1, 2"),
        ("", (1,), False, True, Route.STAGED, "no peer access"),
        ("", (1,), True, True, Route.DIRECT, "device 1"),
        ("", (1,), True, False, Route.REFUSED, "device 1"),
    ],
)
def test_verdict_when_a_fact_stands_in_the_way_then_staged_or_refused_with_the_way_out(
    obstacle, unreachable_devices, reads_others, has_arena, route, words
):
    found = choose_route(obstacle, unreachable_devices, reads_others=reads_others, has_arena=has_arena)
    assert found.route is route and words in found.line
    assert (route is Route.REFUSED) == ("--banyan-share off" in found.line)


class Maker:
    def __init__(self, *, partition=True):
        self.partition = partition

    def create_stream(self):
        return 1

    def create_partition_streams(self, num_sms, num_streams):
        if not self.partition:
            raise DriverError("cuGreenCtxCreate", "CUDA_ERROR_NOT_SUPPORTED")
        return [2] * num_streams, num_sms + 4


def test_copy_stream_when_the_driver_partitions_then_its_processors_bound_the_copies():
    opened = open_copy_streams(Maker(), num_sms=12, num_streams=2, try_stream=lambda stream: None)
    assert (opened.streams, opened.num_sms, opened.is_partition) == ([2, 2], 16, True)
    assert opened.num_programs(per_sm=4) == 4 * 16 and opened.num_backup_programs == 16


def test_copy_stream_when_the_driver_does_not_partition_then_a_plain_one_and_the_reason():
    opened = open_copy_streams(Maker(partition=False), num_sms=12, num_streams=2, try_stream=lambda stream: None)
    assert (opened.streams, opened.num_sms, opened.is_partition) == ([1, 1], 12, False)
    assert opened.num_programs(per_sm=4) == 12 and opened.num_backup_programs == 12
    assert "NOT_SUPPORTED" in opened.note


def test_copy_stream_when_a_kernel_does_not_run_in_the_partition_then_a_plain_one():
    def try_stream(stream):
        if stream == 2:
            raise DriverError("kv_trans_for_dp", "CUDA_ERROR_INVALID_CONTEXT")

    assert open_copy_streams(Maker(), num_sms=12, num_streams=2, try_stream=try_stream).streams == [1, 1]


def test_copy_stream_when_no_stream_runs_a_kernel_then_drivererror():
    def try_stream(stream):
        raise DriverError("kv_trans_for_dp", "CUDA_ERROR_UNKNOWN")

    with pytest.raises(DriverError):
        open_copy_streams(Maker(), num_sms=12, num_streams=2, try_stream=try_stream)
