# SPDX-License-Identifier: Apache-2.0
"""A rank's dealings with other nodes."""
