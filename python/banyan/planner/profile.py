# SPDX-License-Identifier: Apache-2.0
"""The profile of one model on one machine: what ``banyan profile`` measures and a server starts from.

A JSON file, mode 0600, written whole or not at all. This module owns its format.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from banyan.pacing import SlackTable
from banyan.planner.prefill_cost import ForwardSample, PrefillCost

FORMAT = "banyan-profile-1"


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was measured, where, and what was fitted to it.

    Attributes:
        model: path or name of the model as the server was given it.
        num_layers: layers of the model; a profile of another number is refused.
        provenance: machine, versions, command, date.
        samples: every measured forward that the fit used, microseconds.
        held_out: forwards that it did not use.
        held_out_error: mean relative error of ``cost`` on them.
    """

    format: str
    model: str
    num_layers: int
    provenance: dict[str, Any]
    samples: list[ForwardSample]
    held_out: list[ForwardSample]
    held_out_error: float
    cost: PrefillCost
    slack: SlackTable


class BadProfile(ValueError):
    """A file that is no profile, or one for something else; the message says which and what to do."""


def save(profile: Profile, path: Path) -> None:
    """Write the profile; the file appears complete, readable by its owner only."""
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(profile), indent=1))
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def load(path: Path) -> Profile:
    """Read a profile.

    Raises:
        BadProfile: for a file that cannot be read or is not a profile of this format.
    """
    try:
        profile = msgspec.json.decode(path.read_bytes(), type=Profile)
    except OSError as error:
        raise BadProfile(f"--banyan-profile {path}: {error.strerror}: write one with `banyan profile`") from error
    except (msgspec.MsgspecError, ValueError) as error:
        raise BadProfile(
            f"--banyan-profile {path}: not a profile ({error}): write it again with `banyan profile`"
        ) from error
    if profile.format != FORMAT:
        raise BadProfile(f"--banyan-profile {path}: format {profile.format}, not {FORMAT}: write it again")
    return profile


def mismatch(profile: Profile, *, num_layers: int) -> str | None:
    """Why this profile is not this model's, or None."""
    if profile.num_layers == num_layers:
        return None
    return (
        f"--banyan-profile: made for {profile.model} with {profile.num_layers} layers, this model has {num_layers}: "
        "write one for it with `banyan profile`"
    )
