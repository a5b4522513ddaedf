# SPDX-License-Identifier: Apache-2.0
"""The driver through NVIDIA's bindings: every call exists there as we call it; errors and handles are translated."""

import ast
import contextlib
import ctypes
import inspect
import threading
from concurrent.futures import ThreadPoolExecutor
from enum import IntEnum
from types import SimpleNamespace

import pytest

from banyan.transport.cuda_ipc import driver as calls
from banyan.transport.cuda_ipc.driver import CudaDriver, DriverError


class Result(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_UNKNOWN = 999


class Handle:
    def __init__(self):
        self.block = ctypes.create_string_buffer(bytes(range(64)), 64)

    def getPtr(self):
        return ctypes.addressof(self.block)


def bindings(**calls):
    flags = SimpleNamespace(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS=1)
    return SimpleNamespace(
        CUresult=Result,
        CUipcMemHandle=Handle,
        CUipcMem_flags=flags,
        cuInit=lambda flags: (Result.CUDA_SUCCESS,),
        **calls,
    )


def calls_in_source():
    for node in ast.walk(ast.parse(inspect.getsource(calls))):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "_call":
            yield node.args[0].value, len(node.args) - 1


@pytest.mark.parametrize(("name", "num_arguments"), sorted(set(calls_in_source())))
def test_call_when_compared_with_the_bindings_then_it_takes_that_many_arguments(name, num_arguments):
    real = pytest.importorskip("cuda.bindings.driver")
    signature = getattr(real, name).__doc__.strip().splitlines()[0]
    inside = signature[signature.index("(") + 1 : signature.rindex(")")]
    assert (inside.count(",") + 1 if inside else 0) == num_arguments, signature


def test_constants_when_compared_with_the_bindings_then_they_exist():
    real = pytest.importorskip("cuda.bindings.driver")
    for node in ast.walk(ast.parse(inspect.getsource(calls))):
        if isinstance(node, ast.Attribute) and node.attr.startswith("CU_"):
            assert hasattr(getattr(real, node.value.attr), node.attr), node.attr


def test_driver_when_there_is_none_here_then_it_says_so():
    pytest.importorskip("cuda.bindings.driver")
    with contextlib.suppress(OSError):
        ctypes.CDLL("libcuda.so.1")
        pytest.skip("there is one")
    with pytest.raises(DriverError, match="cuInit: "):
        CudaDriver()


def test_call_when_it_fails_then_the_error_names_call_and_code():
    driver = CudaDriver(bindings(cuMemFree=lambda address: (Result.CUDA_ERROR_UNKNOWN,)))
    with pytest.raises(DriverError, match="cuMemFree: CUDA_ERROR_UNKNOWN"):
        driver.free(1)


@pytest.mark.parametrize(("code", "expected"), [(Result.CUDA_SUCCESS, True), (Result.CUDA_ERROR_NOT_READY, False)])
def test_event_when_queried_then_not_ready_is_no_error(code, expected):
    assert CudaDriver(bindings(cuEventQuery=lambda event: (code,))).is_event_done(1) is expected


def test_event_when_the_context_is_broken_then_an_error():
    with pytest.raises(DriverError, match="cuEventQuery"):
        CudaDriver(bindings(cuEventQuery=lambda event: (Result.CUDA_ERROR_UNKNOWN,))).is_event_done(1)


def test_handle_when_exported_and_opened_then_its_64_bytes_cross_unchanged():
    opened = []

    def open_handle(handle, flags):
        opened.append(handle.block.raw)
        return Result.CUDA_SUCCESS, 0x1000

    driver = CudaDriver(
        bindings(cuIpcGetMemHandle=lambda base: (Result.CUDA_SUCCESS, Handle()), cuIpcOpenMemHandle=open_handle)
    )
    handle = driver.export_handle(7)
    assert handle == bytes(range(64))
    assert driver.open_handle(handle) == 0x1000
    assert opened == [handle]
    with pytest.raises(DriverError, match="a handle of 3 bytes"):
        driver.open_handle(b"abc")


def test_thread_when_it_enters_the_context_then_it_may_call_beside_captures_and_one_that_has_it_stays_as_it_is():
    seen, current = [], threading.local()

    def enter(context):
        current.context = context
        return (Result.CUDA_SUCCESS,)

    def exchange(mode):
        seen.append((threading.current_thread() is threading.main_thread(), mode))
        return Result.CUDA_SUCCESS, 0

    found = bindings(
        cuCtxGetCurrent=lambda: (Result.CUDA_SUCCESS, getattr(current, "context", 0)),
        cuCtxSetCurrent=enter,
        cuThreadExchangeStreamCaptureMode=exchange,
    )
    found.CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED="relaxed")
    driver, current.context = CudaDriver(found), 7
    driver.enter_context(7)
    with ThreadPoolExecutor(1) as ours:
        for _ in range(2):
            ours.submit(driver.enter_context, 7).result()
        assert ours.submit(driver.current_context).result() == 7
    assert seen == [(False, "relaxed")]


@pytest.mark.parametrize(("supported", "flags"), [(0, 0x03), (1, 0x0B)])
def test_memory_when_the_device_only_reads_it_then_the_flag_is_used_only_where_the_device_has_it(supported, flags):
    seen = []

    def register(address, num_bytes, flags):
        seen.append(flags)
        return (Result.CUDA_SUCCESS,)

    found = bindings(
        cuCtxGetDevice=lambda: (Result.CUDA_SUCCESS, 0),
        cuDeviceGetAttribute=lambda attribute, device: (Result.CUDA_SUCCESS, supported),
        cuMemHostRegister=register,
        cuMemHostGetDevicePointer=lambda address, flags: (Result.CUDA_SUCCESS, address),
    )
    found.CUdevice_attribute = SimpleNamespace(CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED=1)
    assert CudaDriver(found).register_host_reading(4096, 64) == 4096
    assert seen == [flags]
