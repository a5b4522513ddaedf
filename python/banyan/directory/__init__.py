# SPDX-License-Identifier: Apache-2.0
"""Who holds which page, and leases on them.

The native core is `banyan._native`; `model` is the same protocol as a model.
"""
