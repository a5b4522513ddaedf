# SPDX-License-Identifier: Apache-2.0
"""What a rank tells: figures, counters, traces, KV events, its load."""
