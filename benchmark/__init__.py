# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of a running server; they speak HTTP and never import the engine."""
