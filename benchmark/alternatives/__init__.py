# SPDX-License-Identifier: Apache-2.0
"""Banyan beside what else one would use: the same work and memory, in turns. `python -m benchmark.alternatives`"""
