# SPDX-License-Identifier: Apache-2.0
"""The pools of a model with sliding windows, in a rank."""
