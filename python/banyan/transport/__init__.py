# SPDX-License-Identifier: Apache-2.0
"""Moving pages where the processor cannot reach them: between the memories of GPUs, and between a GPU and the host."""
