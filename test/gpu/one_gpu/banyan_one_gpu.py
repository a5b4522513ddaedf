# SPDX-License-Identifier: Apache-2.0
"""A plugin of SGLang for machines with one GPU: every data-parallel rank gets the first one.

SGLang gives rank r the GPU r and refuses a step of 0. Only for checks: ranks that share a GPU share its memory.
"""


def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.managers.data_parallel_controller.DataParallelController.launch_tensor_parallel_group"
    HookRegistry.register(target, first_gpu, HookType.BEFORE)


def first_gpu(controller, server_args, port_args, base_gpu_id, dp_rank, *rest, **named):
    return (controller, server_args, port_args, 0, dp_rank, *rest), named
