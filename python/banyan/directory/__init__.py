# SPDX-License-Identifier: Apache-2.0
"""Who holds which page, and leases on them: the native core in `banyan._native`, and the same protocol as a model in `model`."""
