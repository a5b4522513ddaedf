# SPDX-License-Identifier: Apache-2.0
"""Pages between nodes: the door that lends a node's arena frames, and what borrows from other nodes' doors."""
