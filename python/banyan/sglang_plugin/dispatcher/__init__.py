# SPDX-License-Identifier: Apache-2.0
"""The data-parallel controller: which rank a request goes to, and requests held back for what another rank computes."""
