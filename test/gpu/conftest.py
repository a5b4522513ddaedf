# SPDX-License-Identifier: Apache-2.0
"""Tests that need a CUDA GPU. ``make gpu-check`` runs them; without a GPU they fail, they are not skipped."""

import os

import pytest

NOT_ON_STAND_IN = frozenset(
    {
        "test_word_when_a_stream_writes_it_then_behind_what_was_enqueued_before",
        "test_batch_when_copied_then_every_piece_is_in_place",
    }
)
"""It runs what is enqueued when it is asked, and copies no batches."""


def pytest_collection_modifyitems(items):
    if "CUDA_STAND_IN" in os.environ:
        items[:] = [item for item in items if item.name not in NOT_ON_STAND_IN]


@pytest.fixture(scope="session", autouse=True)
def gpu():
    import torch

    assert torch.cuda.is_available(), "test/gpu needs a CUDA GPU"
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    return torch.cuda.get_device_properties(0)


@pytest.fixture(scope="session")
def driver(gpu):
    from banyan.transport.cuda_ipc.driver import CudaDriver

    return CudaDriver()
