# SPDX-License-Identifier: Apache-2.0
"""What a process learns about its server from SGLang."""

import pytest
from sglang.srt.runtime_context import create_context, get_context, use_context
from sglang.srt.server_args import ServerArgs

from banyan.sglang_plugin import runtime


@pytest.mark.parametrize(("device", "is_on_gpu"), [("cuda", True), ("cpu", False)])
def test_device_when_the_user_has_named_none_then_it_is_the_one_that_sglang_found(device, is_on_gpu):
    args = ServerArgs(model_path="none")
    with use_context(create_context(args, role="scheduler")):
        get_context().override("test", device=device)
        assert args.device is None and runtime.is_on_gpu() is is_on_gpu
