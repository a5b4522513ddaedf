# SPDX-License-Identifier: Apache-2.0
"""What ``banyan doctor`` says about a store by its URL, beside what its folders lie on."""

from __future__ import annotations

from banyan.cli.finding import Finding
from banyan.store import StoreLocation, look


def examine_store(location: StoreLocation) -> list[Finding]:
    """Whether its library is there and whoever is to answer does; of plain files, what they would be refused for."""
    what = f"store on {location}"
    try:
        said = look(location)
    except (ValueError, OSError) as error:
        # Refusals name the way out behind their last colon that a space follows.
        reason, _, way_out = str(error).rpartition(": ")
        return [Finding(what, False, reason or str(error), way_out if reason else "")]
    return [Finding(what, True, said)] if said else []
