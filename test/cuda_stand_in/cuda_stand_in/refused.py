# SPDX-License-Identifier: Apache-2.0
"""What CUDA refuses."""


class Refused(RuntimeError):
    """By the name of the driver's code."""
