# SPDX-License-Identifier: Apache-2.0
"""A torch tensor over memory that torch did not allocate: a peer's pool, for checks and tools.

By DLPack, which names the device: the one that is current here, as the mapping is, and not the one that the memory lies
on. The tensor does not own the memory: it must not be used after the mapping is closed.
"""

from __future__ import annotations

import ctypes
from typing import Any

from banyan.transport.cuda_ipc.opening import Opened

CPU, CUDA = 1, 2
"""Kinds of devices, as DLPack numbers them."""

_UNSIGNED = 1


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))


_alive: dict[int, tuple[Any, ...]] = {}
"""What the consumer of a capsule still points to, by address."""


@_Deleter
def _forget(address: int) -> None:
    _alive.pop(address, None)


def pool_tensor(opened: Opened, extent: int, page_bytes: int, *, device_id: int, device_type: int = CUDA) -> Any:
    """Bytes of one extent of an opened pool: a tensor ``[num_pages, page_bytes]`` of uint8 on that device."""
    import torch

    shape = (ctypes.c_int64 * 2)(opened.num_pages, page_bytes)
    strides = (ctypes.c_int64 * 2)(opened.strides[extent], 1)
    tensor = _Tensor(opened.bases[extent], device_type, device_id, 2, _UNSIGNED, 8, 1, shape, strides, 0)
    managed = _Managed(tensor, None, _forget)
    address = ctypes.addressof(managed)
    _alive[address] = (managed, shape, strides)
    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype, new_capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return torch.from_dlpack(new_capsule(address, b"dltensor", None))
