# SPDX-License-Identifier: Apache-2.0
"""A stand-in for a GPU, for tests of the engine's CUDA path on machines that have none.

Every process whose ``PYTHONPATH`` starts with the folder above this one, and that has ``CUDA_STAND_IN``, sees eight
GPUs that read each other. Computing is done by torch on the host; Triton's kernels are interpreted; copies and events
obey ``device``; memory of pools is shared memory (``memory``); the driver's calls are those of ``driver``. What it does
not have is refused by whoever asks for it: graphs, kernels that are compiled.
"""

from __future__ import annotations

import os
import sys

VARIABLE = "CUDA_STAND_IN"
"""The order in which queues run: see ``device``."""


def install() -> None:
    """Make this process see the stand-in, where it is asked for. Once, before SGLang is imported."""
    order = os.environ.get(VARIABLE)
    if order is None or any("resource_tracker" in word for word in sys.orig_argv):
        return  # Python's own helper needs no torch.
    # Whatever it was: nothing here could run what is compiled.
    os.environ["TRITON_INTERPRET"] = "1"
    from cuda.bindings import driver as bindings

    from banyan import config
    from cuda_stand_in import engine
    from cuda_stand_in.device import Device
    from cuda_stand_in.driver import Driver
    from cuda_stand_in.memory import Memory
    from cuda_stand_in.runtime import Runtime
    from cuda_stand_in.saver import Saver
    from cuda_stand_in.streams import Streams

    device, memory = Device(order), Memory()
    # A server that is forked may be told another order than the process that has imported for it.
    os.register_at_fork(after_in_child=lambda: device.obey(os.environ[VARIABLE]))
    streams = Streams(device)
    driver = Driver(bindings, streams, memory, exports=lambda: not config.uses_expandable_segments())
    driver.install()
    Runtime(streams, memory, driver).install()
    engine.install(Saver(memory).install)
