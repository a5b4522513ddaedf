# SPDX-License-Identifier: Apache-2.0
"""Kernels without a GPU: run by Triton's interpreter, and compiled for one that is not here."""

import importlib.util
import sys

import pytest

MODULE = "banyan.transport.kv_trans.kernel"


def load_kernel(*, interpreted: bool):
    """The kernel's module, decorated for the interpreter or for the compiler, beside whatever is imported."""
    import triton

    spec = importlib.util.find_spec(MODULE)
    module = importlib.util.module_from_spec(spec)
    # Triton finds a kernel's source and globals through its module.
    sys.modules[f"{MODULE}.{'interpreted' if interpreted else 'compiled'}"] = module
    # The knob is an environment variable, which servers of later tests would inherit.
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = interpreted
        spec.loader.exec_module(module)
    return module.kv_trans_for_dp


@pytest.fixture(scope="session")
def interpreted_kernel():
    return load_kernel(interpreted=True)


@pytest.fixture(scope="session")
def compiled_kernel():
    return load_kernel(interpreted=False)
