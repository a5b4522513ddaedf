# SPDX-License-Identifier: Apache-2.0
"""``--use-ray`` on a machine without a GPU: the actor of a rank sets a CUDA device before its loop begins."""

from __future__ import annotations

import torch

from banyan_cpu_engine import server


def register() -> None:
    set_device = torch.cuda.set_device

    def where_there_is_one(device: int) -> None:
        if not server.is_on():
            set_device(device)

    torch.cuda.set_device = where_there_is_one  # type: ignore[assignment]
