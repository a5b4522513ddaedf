# SPDX-License-Identifier: Apache-2.0
"""A tensor over a peer's opened pool shows the peer's bytes and owns nothing."""

import ctypes
import gc

from test.gpu import pool_tensor as tensor
from test.unit.transport.fake_gpu import FakeDriver, FakeGpu

from banyan.transport.cuda_ipc.description import PoolDescription, describe
from banyan.transport.cuda_ipc.opening import p2p_fix_rebuild_cuda_tensor


def test_tensor_when_made_over_an_opened_pool_then_it_is_the_peers_memory():
    gpu = FakeGpu()
    driver = FakeDriver(gpu)
    addresses = [gpu.allocate(4 * 8), gpu.allocate(4 * 16)]
    announced = describe(driver, bytes(16), list(zip(addresses, (4 * 8, 4 * 16), strict=True))).encode()
    opened = p2p_fix_rebuild_cuda_tensor(driver, PoolDescription.decode(announced), (8, 16), lambda: None)
    seen = tensor.pool_tensor(opened, 1, 16, device_id=0, device_type=tensor.CPU)
    assert tuple(seen.shape) == (4, 16)
    ctypes.memset(addresses[1] + 2 * 16, 7, 16)
    assert seen.sum(dim=1).tolist() == [0, 0, 7 * 16, 0]
    del seen
    gc.collect()
    assert not tensor._alive and driver.mapped, "the mapping is not the tensor's"
    opened.close()
    assert not driver.mapped
