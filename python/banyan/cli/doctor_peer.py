# SPDX-License-Identifier: Apache-2.0
"""What ``banyan doctor --peer`` says of the path to another node."""

from __future__ import annotations

from banyan.cli.finding import Finding
from banyan.features.nodes.path import Path, Rate
from banyan.features.nodes.tcp import IN_FLIGHT_BYTES

MOST_EARLY = 0.001
"""Of all packets: more, and some are lost, or overtake each other."""

LEAST_OF_LINK = 0.5
MOST_IN_FLIGHT = 0.6
"""Of what a page server has under way by default: above that, it is what bounds the rate."""

KNOCK = "start it with --banyan-listen, name it by that address, and let both ports through every firewall to this node"
LET_IN = "compare the files of --banyan-secret-file, and the builds"


def examine_path(path: Path) -> list[Finding]:
    """Of a path that was tried."""
    what = f"path to {path.address}"
    if path.obstacle:
        return [Finding(what, False, path.obstacle, LET_IN if "let this node in" in path.obstacle else KNOCK)]
    answers = f"lets this node in, answers in {1e3 * path.answer_s:.2f} ms (at most {1e3 * max(path.answers_s):.2f})"
    found = [Finding(what, True, answers)]
    return [*found, _of_bytes(path)]


def _of_bytes(path: Path) -> Finding:
    what = f"bytes from {path.address}"
    if path.bytes_obstacle:
        return Finding(what, False, _with(path.rates, path.bytes_obstacle), KNOCK)
    detail = _with(path.rates, f"packets of {path.segment_bytes} bytes" if path.segment_bytes else "")
    if path.num_early > MOST_EARLY * path.num_segments:
        early = f"{path.num_early} of {path.num_segments} packets came before one that belongs in front of them"
        advice = "packets are lost, or overtake each other: look for drops at cards and switches, for a policer"
        return Finding(what, False, f"{detail}; {early}", advice)
    return Finding(what, True, detail, hint=_hint(path))


def _with(rates: tuple[Rate, ...], more: str) -> str:
    told = [f"{_size(rate.num_bytes)} at {rate.bytes_per_s / 1e6:.0f} MB/s" for rate in rates]
    return "; ".join([", ".join(told)] * bool(told) + [more] * bool(more))


def _size(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB" if num_bytes >= 1 << 20 else f"{num_bytes >> 10} KiB"


def _hint(path: Path) -> str:
    if not path.rates:
        return ""
    best = max(rate.bytes_per_s for rate in path.rates)
    link = path.link_mbit * 1e6 / 8
    if link and best >= LEAST_OF_LINK * link:
        return ""
    under_way = best * path.answer_s
    if under_way >= MOST_IN_FLIGHT * IN_FLIGHT_BYTES:
        return (
            f"some {under_way / 1024:.0f} KiB are under way at once, which is what bounds this: raise "
            "--banyan-in-flight-kb on that node if nothing else needs the path"
        )
    return f"the card on this side could carry {link / 1e6:.0f} MB/s" if link else ""
