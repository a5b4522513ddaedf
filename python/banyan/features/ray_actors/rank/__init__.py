# SPDX-License-Identifier: Apache-2.0
"""A rank that Ray has started."""
