# SPDX-License-Identifier: Apache-2.0
"""``torch.cuda`` over a device that is not there: tensors lie in the memory of the host, streams are numbers.

Computing happens where it is called, so torch's streams are in order by themselves. Kernels that Triton interprets run
on the stream that is current when they are launched, which may be a queue of the driver's.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from cuda_stand_in.device import Device
from cuda_stand_in.driver import NUM_DEVICES, NUM_SMS, Driver
from cuda_stand_in.memory import Memory
from cuda_stand_in.streams import Streams

POOL_BYTES = 64 << 10
"""Tensors of zeros from this size on lie in memory that other processes can open: KV pools do."""

TOTAL_BYTES, FREE_BYTES = 16 << 30, 12 << 30
HOST = torch.device("cpu")


class Runtime:
    """What torch is told, in one process."""

    def __init__(self, streams: Streams, memory: Memory, driver: Driver) -> None:
        self._device, self._streams, self._memory, self._driver = streams.device, streams, memory, driver

    def set_device(self, device: Any) -> None:
        number = torch.device(device).index if not isinstance(device, int) else device
        self._driver.current_device = number or 0

    # ---- into torch

    def install(self) -> None:
        cuda = torch.cuda
        for name, value in self._names().items():
            setattr(cuda, name, value)
        cuda.streams.Stream, cuda.streams.Event = self._streams.Stream, self._streams.Event
        self._install_in_c()
        torch.backends.cuda.is_built = lambda: True
        torch.get_device_module = lambda device=None: (
            torch.cpu if device is not None and str(device).startswith("cpu") else torch.cuda
        )
        self._install_modes()
        # Who asks for a tensor's device is told of the host.
        torch.cpu.device = _Nothing  # type: ignore[attr-defined]
        _install_distributed()
        _install_kernels(self._device, lambda: self._streams.current().cuda_stream)

    def _names(self) -> dict[str, Any]:
        properties = SimpleNamespace(
            name="a stand-in",
            major=8,
            minor=0,
            total_memory=TOTAL_BYTES,
            multi_processor_count=NUM_SMS,
            warp_size=32,
            max_threads_per_multi_processor=2048,
            shared_memory_per_block_optin=232448,
            L2_cache_size=50 << 20,
            gcnArchName="",
            is_integrated=0,
        )
        return {
            "Stream": self._streams.Stream,
            "Event": self._streams.Event,
            "ExternalStream": self._streams.ExternalStream,
            "StreamContext": self._streams.StreamContext,
            "stream": self._streams.StreamContext,
            "current_stream": self._streams.current,
            "default_stream": self._streams.default,
            "set_stream": self._streams.make_current,
            "set_device": self.set_device,
            "current_device": lambda: self._driver.current_device,
            "device": _Nothing,
            "device_of": _Nothing,
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "device_count": lambda: NUM_DEVICES,
            "get_device_capability": lambda *_: (8, 0),
            "get_device_name": lambda *_: properties.name,
            "get_device_properties": lambda *_args, **_named: properties,
            "get_arch_list": lambda: ["sm_80"],
            "is_bf16_supported": lambda *_args, **_named: True,
            "can_device_access_peer": lambda *_: True,
            "is_current_stream_capturing": lambda: self._device.capture.includes(self._streams.current().cuda_stream),
            "CUDAGraph": _Graph,
            "graph": self._capture,
            "synchronize": lambda *_: self._device.synchronize_all(),
            "mem_get_info": lambda *_: (FREE_BYTES, TOTAL_BYTES),
            "memory_stats": lambda *_: {},
            **{name: _answering(0) for name in _NO_BYTES},
            **{name: _answering(None) for name in _NOTHING},
        }

    @contextmanager
    def _capture(self, _graph: Any, _pool: Any = None, stream: Any = None, **_rest: Any) -> Iterator[None]:
        captured = stream or self._streams.Stream()
        with self._streams.StreamContext(captured), self._device.capture.on(captured.cuda_stream):
            yield

    def _install_in_c(self) -> None:
        found: dict[str, Any] = {
            "_cuda_getDeviceCount": lambda: NUM_DEVICES,
            "_cuda_getDevice": lambda: self._driver.current_device,
            "_cuda_setDevice": lambda device: self.set_device(device),
            "_cuda_getCurrentRawStream": lambda *_: self._streams.current().cuda_stream,
            "_cuda_exchangeDevice": lambda _number: self._driver.current_device,
            "_cuda_maybeExchangeDevice": lambda _number: self._driver.current_device,
        }
        for name, value in found.items():
            setattr(torch._C, name, value)

    def _install_modes(self) -> None:
        """Every thread has calls for the device done on the host."""
        memory = self._memory

        class OnHost(TorchFunctionMode):
            def __torch_function__(
                self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
            ) -> Any:
                named = dict(kwargs or {})
                if function in _ANSWERS:
                    return _ANSWERS[function](*args)
                if function is torch.device and args and isinstance(args[0], str) and _is_device(args[0]):
                    # With a number behind it.
                    return HOST
                is_here = _is_device(named.get("device")) or type(named.get("device")) is int
                named.pop("pin_memory", None)
                if is_here:
                    named["device"] = HOST
                if is_here and function is torch.zeros:
                    return _zeros(memory, args, named)
                return function(*(HOST if _is_device(argument) else argument for argument in args), **named)

        self._mode = OnHost()
        self._mode.__enter__()
        run = threading.Thread.run

        def run_on_host(thread: threading.Thread) -> None:
            with OnHost():
                run(thread)

        threading.Thread.run = run_on_host
        import torch.utils._device as blocks

        begin = blocks.DeviceContext.__init__
        blocks.DeviceContext.__init__ = lambda block, device: begin(block, HOST if _is_device(device) else device)
        set_default = torch.set_default_device
        torch.set_default_device = lambda device: set_default(HOST if _is_device(device) else device)


_ANSWERS: dict[Any, Callable[..., Any]] = {
    torch.Tensor.is_cuda.__get__: lambda tensor: True,
    torch.Tensor.cuda: lambda tensor, *_: tensor,
    torch.Tensor.pin_memory: lambda tensor, *_: tensor,
    torch.Tensor.is_pinned: lambda tensor, *_: True,
    torch.Tensor.record_stream: lambda tensor, stream: None,
}


_NO_BYTES = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
_NOTHING = (
    *("init", "_lazy_init", "empty_cache", "reset_peak_memory_stats", "ipc_collect"),
    *("manual_seed", "manual_seed_all"),
)


def _answering(value: int | None) -> Callable[..., int | None]:
    """A function of its own each time: torch's compiler wants each name to be another one."""
    return lambda *_args, **_named: value


class _Graph:
    """What is captured runs meanwhile, which stands for the first replay; there is no other."""

    _has_run = False

    def replay(self) -> None:
        if self._has_run:
            raise NotImplementedError("the stand-in for a GPU keeps no graphs")
        self._has_run = True


class _Nothing:
    """A context in which nothing is otherwise."""

    def __init__(self, *_args: Any) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_error: object) -> None: ...


def _is_device(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and (value == "cuda" or value.startswith("cuda:"))


def _zeros(memory: Memory, args: tuple[Any, ...], named: dict[str, Any]) -> torch.Tensor:
    shape = named.get("size", args[0] if args and isinstance(args[0], (tuple, list, torch.Size)) else args)
    dtype = named.get("dtype") or torch.get_default_dtype()
    num_elements = math.prod(shape)
    if num_elements * dtype.itemsize < POOL_BYTES:
        return torch.zeros(*args, **named)
    room = memory.buffer(num_elements * dtype.itemsize)
    return torch.frombuffer(room, dtype=torch.uint8).zero_().view(dtype).view(*shape)


def _install_distributed() -> None:
    """Groups of one rank or more talk over the host."""
    import torch.distributed as distributed

    for name in ("init_process_group", "new_group"):
        original = getattr(distributed, name)

        def begin(*args: Any, _original: Any = original, **named: Any) -> Any:
            if named.get("backend") in (None, "nccl"):
                named["backend"] = "gloo"
            named.pop("device_id", None)
            return _original(*("gloo" if argument == "nccl" else argument for argument in args), **named)

        setattr(distributed, name, begin)
        setattr(distributed.distributed_c10d, name, begin)
    distributed.is_nccl_available = lambda: True


def _install_kernels(device: Device, current_stream: Callable[[], int]) -> None:
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.interpreter import InterpretedFunction

    choose = Autotuner.run

    def run_first(tuner: Any, *args: Any, **named: Any) -> Any:
        # Nothing can be timed.
        tuner.configs = tuner.configs[:1]
        return choose(tuner, *args, **named)

    Autotuner.run = run_first
    launch = InterpretedFunction.run

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        if not warmup:
            device.enqueue(current_stream(), lambda: launch(kernel, *args, grid=grid, warmup=False, **named))

    InterpretedFunction.run = run
