# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a node find again when memory is short: a model, its yardsticks, and the real engine beside it."""
