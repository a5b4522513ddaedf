# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a model with sliding windows do besides."""
