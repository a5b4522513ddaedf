# SPDX-License-Identifier: Apache-2.0
"""Python imports this when it starts, wherever this folder is on its path."""

import cuda_stand_in

cuda_stand_in.install()
