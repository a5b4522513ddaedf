# SPDX-License-Identifier: Apache-2.0
"""A store survives a change of ``--tp``: what shards of another size have stored is found, and put together anew."""

from banyan.feature import Parts

PARTS = Parts(page="stores.md", rank="banyan.features.resharding.rank.other_sizes:register")
