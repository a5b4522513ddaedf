# SPDX-License-Identifier: Apache-2.0
"""How a rank learns whose its pages are."""
