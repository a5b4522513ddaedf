# SPDX-License-Identifier: Apache-2.0
"""Tests that need a CUDA GPU. ``make gpu-check`` runs them; without a GPU they fail, they are not skipped."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def gpu():
    import torch

    assert torch.cuda.is_available(), "test/gpu needs a CUDA GPU"
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    return torch.cuda.get_device_properties(0)


@pytest.fixture(scope="session")
def driver(gpu):
    from banyan.transport.cuda_ipc.cuda_python import CudaDriver

    return CudaDriver()
