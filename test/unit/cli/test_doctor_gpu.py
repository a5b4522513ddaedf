# SPDX-License-Identifier: Apache-2.0
"""The GPU rows of ``banyan doctor``, over a driver that answers as it is told."""

from contextlib import nullcontext

import pytest
from test.unit.transport.fake_gpu import FakeDriver, FakeGpu

from banyan.cli import doctor_gpu
from banyan.cli.doctor_gpu import examine_gpus
from banyan.transport.cuda_ipc import gpu_io
from banyan.transport.cuda_ipc.driver import DriverError


class Machine(FakeDriver):
    """Four GPUs in two pairs, on two NUMA nodes."""

    def __init__(self, num_devices=4):
        super().__init__(FakeGpu())
        self._num_devices = num_devices
        self.waits_end = True

    def num_devices(self):
        return self._num_devices

    def driver_version(self):
        return 13, 0

    def device_name(self, device):
        return "Fake"

    def pci_address(self, device):
        return f"0000:0{device}:00.0"

    def num_sms(self, device):
        return 132

    def can_access(self, device, other):
        return device // 2 == other // 2

    def registers_read_only(self, device):
        return False

    def on_device(self, device):
        return nullcontext()

    def create_stream(self):
        return 1

    def destroy_stream(self, stream):
        pass

    def is_event_done(self, event):
        if self.waits_end:
            self.gpu.run()
        return super().is_event_done(event)


def rows(driver, **where):
    return {finding.what: finding for finding in examine_gpus(lambda: driver, **where)}


def test_gpus_when_there_is_no_driver_then_one_row_that_is_well():
    def missing():
        raise DriverError("cuInit", "CUDA_ERROR_NO_DEVICE")

    (found,) = examine_gpus(missing)
    assert found.is_ok and "CUDA_ERROR_NO_DEVICE" in found.detail
    assert [finding.what for finding in examine_gpus(lambda: Machine(0))] == ["GPU"]


def test_gpus_when_pairs_cannot_read_each_other_then_they_are_named():
    found = rows(Machine())["peer access"]
    assert not found.is_ok and found.detail == "2 of 6 pairs; not 0-2, 0-3, 1-2, 1-3"
    assert "--banyan-host-gb" in found.advice
    assert rows(Machine(2))["peer access"].is_ok


def test_gpus_when_there_is_one_then_it_is_said_that_two_ranks_need_two():
    assert "--dp 2 needs another one" in rows(Machine(1))["GPU"].detail


def test_gpus_when_memory_has_no_handles_then_the_way_out(monkeypatch):
    driver = Machine()
    driver.is_exportable = lambda address: False
    found = rows(driver)["CUDA IPC"]
    assert not found.is_ok and "--banyan-host-gb" in found.advice
    assert rows(Machine())["CUDA IPC"].is_ok


@pytest.mark.parametrize(("with_it", "words"), [((), "not there"), ((0, 1), "not there"), (range(4), "there")])
def test_gpus_when_some_cannot_register_memory_for_reading_only_then_the_row_is_well_and_says_so(with_it, words):
    driver = Machine()
    driver.registers_read_only = lambda device: device in with_it
    found = rows(driver)["read-only registration"]
    assert found.is_ok and found.detail.startswith(words)


def test_gpus_when_the_driver_refuses_a_question_then_that_row_says_so_and_the_others_are_there():
    driver = Machine()
    driver.refuse["export_handle"] = 0
    found = rows(driver)
    assert not found["CUDA IPC"].is_ok and "CUDA_ERROR_FAKE" in found["CUDA IPC"].detail
    assert found["stream waits"].is_ok


@pytest.mark.parametrize("waits_end", [True, False])
def test_streams_when_they_wait_for_a_word_that_is_there_then_they_go_on_or_it_is_said(monkeypatch, waits_end):
    monkeypatch.setattr(gpu_io, "WORD_PATIENCE_S", 0.01)
    driver = Machine()
    driver.waits_end = waits_end
    assert rows(driver)["stream waits"].is_ok is waits_end


def test_streams_when_the_row_is_written_then_none_waits_for_its_word_any_more(monkeypatch):
    monkeypatch.setattr(gpu_io, "WORD_PATIENCE_S", 0.01)
    driver = Machine()
    driver.waits_end = False
    # Memory is let go once the device has nothing to do.
    monkeypatch.setattr(driver, "free_pinned", lambda word: driver.gpu.run())
    rows(driver)


def test_gpus_when_they_are_near_two_nodes_then_the_rows_say_which_and_how_to_bind(tmp_path):
    for device in range(4):
        folder = tmp_path / f"bus/pci/devices/0000:0{device}:00.0"
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{device // 2}\n")
    detail = rows(Machine(), sys=tmp_path)["NUMA"].detail
    assert "GPU 3 on node 1" in detail and "SGLANG_NUMA_BIND_V2" in detail
    assert rows(Machine(), sys=tmp_path / "nothing")["NUMA"].detail == "one node"


def test_compilers_when_missing_then_named(monkeypatch):
    monkeypatch.setattr(doctor_gpu.shutil, "which", lambda name: None if name == "nvcc" else f"/bin/{name}")
    monkeypatch.setattr(doctor_gpu, "host_obstacles", lambda: ["openssl/sha.h (libssl-dev)"])
    monkeypatch.setattr(doctor_gpu.ctypes.util, "find_library", lambda name: None)
    missing = doctor_gpu.page_hash_obstacles()
    assert missing == ["nvcc", "openssl/sha.h (libssl-dev)", "libcrypto"]
