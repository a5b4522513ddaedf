# SPDX-License-Identifier: Apache-2.0
"""The process that the user started: Ray's driver."""
