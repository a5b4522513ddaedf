# SPDX-License-Identifier: Apache-2.0
"""Which pages a rank gives up."""
