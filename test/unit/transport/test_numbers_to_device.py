# SPDX-License-Identifier: Apache-2.0
"""Page numbers on their way to the device: none is lost in memory that others are written to, none pins memory."""

from array import array

from test.unit.transport.fake_gpu import FakeDriver, FakeGpu

from banyan.transport.cuda_ipc.numbers_to_device import NumbersToDevice

SCHEDULE = 3


def rig(num_pages):
    gpu = FakeGpu()
    driver = FakeDriver(gpu)
    return gpu, driver, NumbersToDevice(driver, current_stream=lambda: SCHEDULE, num_pages=num_pages)


def words(*numbers):
    return array("q", numbers).tobytes()


def test_numbers_when_the_device_is_late_then_later_ones_do_not_touch_them():
    gpu, _, uploads = rig(num_pages=4)
    targets = [gpu.buffer([0, 0]) for _ in range(2)]
    assert uploads.send(words(7, 8), targets[0].address) and uploads.send(words(9, 10), targets[1].address)
    gpu.run()
    assert [list(target.words) for target in targets] == [[7, 8], [9, 10]]


def test_numbers_when_too_many_are_on_their_way_then_refused_until_some_have_come():
    gpu, _, uploads = rig(num_pages=2)
    target = gpu.buffer([0, 0])
    assert uploads.send(words(1, 2), target.address)
    assert not uploads.send(words(3), target.address)
    gpu.run()
    assert list(target.words) == [1, 2] and uploads.send(words(3), target.address)


def test_numbers_when_they_go_up_for_long_then_memory_is_pinned_once():
    gpu, driver, uploads = rig(num_pages=3)
    target = gpu.buffer([0, 0, 0])
    for number in range(100):
        assert uploads.send(words(*[number] * (1 + number % 3)), target.address)
        gpu.run()
        assert target.words[0] == number
    assert driver.names().count("allocate_pinned") == driver.names().count("create_event") == 1
