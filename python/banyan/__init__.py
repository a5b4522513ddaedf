# SPDX-License-Identifier: Apache-2.0
"""Banyan: one prefix cache over all data-parallel ranks, DRAM and SSD of an SGLang server."""

__version__ = "0.1.0"
SGLANG_VERSION = "0.5.23"
