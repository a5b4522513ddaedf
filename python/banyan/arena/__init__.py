# SPDX-License-Identifier: Apache-2.0
"""The host arena: DRAM of the node as a second tier, one part for each rank, readable by all."""
