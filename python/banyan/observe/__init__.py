# SPDX-License-Identifier: Apache-2.0
"""What servers tell of themselves, made fit to be looked at: `banyan top`, the page at ``/banyan``, alerts.

Whatever comes from a server is text or a number of somebody else: it is coerced here, and escaped where it is shown.
"""

from banyan.observe.rates import Looks, Rates
from banyan.observe.reading import Reading

__all__ = ["Looks", "Rates", "Reading"]
