# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a model with states do besides."""
