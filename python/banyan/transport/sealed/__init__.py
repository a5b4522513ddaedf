# SPDX-License-Identifier: Apache-2.0
"""Sockets that only those who know the secret of all nodes are heard at: page servers of nodes, and the hand-over of
pairs."""
