# SPDX-License-Identifier: Apache-2.0
"""What the dispatcher knows about a request's prefix, and how it travels to the rank."""

from banyan.routing.hint import PrefixHint

__all__ = ["PrefixHint"]
