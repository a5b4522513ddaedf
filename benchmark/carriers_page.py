# SPDX-License-Identifier: Apache-2.0
"""The table of docs/benchmarks/network.md with the page server, Mooncake and a shared mount side by side, written by
``make docs``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmark.kept_table import kept_page, wrapped
from benchmark.metrics import ranged
from benchmark.provenance import place_and_time

KEPT = Path(__file__).parents[1] / "docs" / "benchmarks" / "remote_carriers.json"
"""What ``python -m benchmark.remote --carriers`` writes as ``carriers_figures.json``."""

TITLES = {
    "page_server": "page server",
    "page_server_by_nixl": "page server, by NIXL",
    "mooncake": "Mooncake",
    "mount": "shared mount",
}
Figures = Mapping[str, Any]


def table() -> str:
    """What the carriers came to in the kept run, and where it ran."""
    return kept_page(KEPT, page)


def page(run: Mapping[str, Any]) -> str:
    shown = [(TITLES[name], found) for name, found in run["carriers"].items()]
    head = "| figure | " + " | ".join(title for title, _ in shown) + " |\n|" + "---|" * (len(shown) + 1)
    rows = "\n".join(f"| {title} | {' | '.join(cell(found) for _, found in shown)} |" for title, cell in ROWS.items())
    return f"{head}\n{rows}\n\n{wrapped(_conditions(run))}\n"


def _conditions(run: Mapping[str, Any]) -> str:
    sizes = run["sizes"]
    right = "All" if run["outputs_identical"] else "Not all"
    return (
        f"`python -m benchmark.remote --carriers`, {place_and_time(run['provenance'])}. Two servers of one compute "
        f"thread each, not pinned, for every carrier, which take turns; all on one host, so that the mount is a local "
        f"folder, and Mooncake's master and lender share the two cores. {sizes['num_prompts']} prompts of "
        f"{sizes['prompt_tokens']} tokens in each of {sizes['num_repeats']} repeats, the same for every carrier, one "
        f"at a time; short ones have {sizes['short_tokens']}. Means of a repeat, median and range of them; of what a "
        f"forward waited and of publication, median and range of all prompts. {right} of "
        f"{run['num_compared']} answers were those of the writer."
    )


def _seconds(name: str) -> Callable[[Figures], str]:
    return lambda found: f"{ranged(found[name])} s"


def _milliseconds(name: str) -> Callable[[Figures], str]:
    def cell(found: Figures) -> str:
        median, least, most = (1e3 * found[name][of] for of in ("median", "min", "max"))
        return f"{median:.0f} ({least:.0f}-{most:.0f}) ms"

    return cell


def _ratio(name: str) -> Callable[[Figures], str]:
    def cell(found: Figures) -> str:
        median, least, most = (found[name][of] for of in ("median", "min", "max"))
        return f"{median:.3f} ({least:.3f}-{most:.3f})"

    return cell


def _page_server_ratio(found: Figures) -> str:
    return "-" if set(found["page_server_ratio"]["values"]) == {1.0} else _ratio("page_server_ratio")(found)


def _alone(found: Figures) -> str:
    """Prompts of which something was carried."""
    came = {delay: [share > 0 for share in shares["values"]] for delay, shares in found["alone"].items()}
    return ", ".join(f"{sum(some)} of {len(some)} after {delay} s" for delay, some in came.items())


def _bytes(found: Figures) -> str:
    kinds = {"memory": found["memory_bytes_per_page"], "disk": found["disk_bytes_per_page"]}
    return ", ".join(f"{size / 1024:.0f} KiB of {kind}" for kind, size in kinds.items() if size) or "nothing"


def _killed(who: str) -> Callable[[Figures], str]:
    def cell(found: Figures) -> str:
        one = found["killed"].get(who)
        if one is None:
            return "there is none"
        times = ", ".join(f"{took_s:.2f} s" for took_s in one["took_s"])
        shares = ", ".join(f"{share:.0%}" for share in one["token_shares"])
        return f"{one['num_right']} of {one['num_asked']} right; {times}; carried {shares}"

    return cell


ROWS: Mapping[str, Callable[[Figures], str]] = {
    "time to the first token, carried": _seconds("carried_s"),
    "the same, computed": _seconds("compute_s"),
    "computed at the writer": _seconds("write_s"),
    "carried to computed": _ratio("ttft_ratio"),
    "the page server's to this one's": _page_server_ratio,
    "a carried prompt's forward waited for layers": _milliseconds("carried_stall_s"),
    "tokens that were carried, the least": lambda found: f"{found['least_token_share']:.0%}",
    "from the writer's answer until all pages can be had, while it is awake": _milliseconds("lag_s"),
    "short prompts carried, asked so long after the answer of a writer that sleeps when idle": _alone,
    "processor time of a carried prompt": _seconds("carried_cpu_s"),
    "processor time of a computed one": _seconds("compute_cpu_s"),
    "processor time of computing it at the writer and publishing it": _seconds("write_cpu_s"),
    "a page takes, beside the arena's copy": _bytes,
    "the writer is killed": _killed("writer"),
    "then Mooncake's lender, too": _killed("lender"),
}
