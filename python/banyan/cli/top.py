# SPDX-License-Identifier: Apache-2.0
"""``banyan top URL``: a server's ranks, hits, copies, store and alerts in a terminal, again and again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from banyan.observe import Looks, Reading, asking
from banyan.observe.summary import summary
from banyan.telemetry import WINDOW_MINUTES

COLOURS = {"own": "green", "peer": "cyan", "host": "blue", "store": "magenta", "computed": "bright_black"}
WORDS = {"own": "own pool", "peer": "peers", "host": "arena", "store": "store", "computed": "computed"}
COLUMNS = ("run", "wait", "free", "pool", "quarantine", "hits", "fetched/s", "evicted copies", "last", "displaced")
BAR_CELLS = 60


def look(url: str, api_key: str | None) -> Reading:
    """``asking.look``, for who waits. Proxies are those of the environment."""

    async def ask() -> Reading:
        async with aiohttp.ClientSession(trust_env=True) as session:
            return await asking.look(session, url.rstrip("/"), api_key)

    return asyncio.run(ask())


def watch(look: Callable[[], Reading], *, interval_s: float, console: Console) -> None:
    """Show the server until interrupted. While it does not answer, what was seen last stays, with the reason."""
    looks = Looks()
    seen: RenderableType = picture(summary(looks.rates(look())))
    with Live(seen, console=console, auto_refresh=False, screen=console.is_terminal) as live:
        while True:
            time.sleep(interval_s)
            try:
                now = look()
            except asking.Unanswered as error:
                live.update(Group(Text(str(error), style="bold red"), seen), refresh=True)
                continue
            seen = picture(summary(looks.rates(now)))
            live.update(seen, refresh=True)


def picture(told: Mapping[str, Any]) -> RenderableType:
    """What `banyan top` shows of a summary. Text of the server is shown as it is, never as markup. What needs attention
    is first: a screen shows no more than it has lines."""
    parts: list[RenderableType] = [
        _title(told),
        *_alerts(told),
        Text(),
        _hits(told),
        _ceiling(told["ceiling"]),
        Text(),
        _ranks(told),
        _memory(told),
    ]
    if told["store"] is not None:
        parts.append(_store(told["store"]))
    return Group(*parts, Text(), *_changing_lines(told))


def _title(told: Mapping[str, Any]) -> Text:
    at = time.strftime("%H:%M:%S", time.localtime(told["taken_s"]))
    span = "since the start" if told["is_since_start"] else "since the last look"
    shards = f"  first of {told['num_shards']} shards of each rank" if told["num_shards"] > 1 else ""
    return Text.assemble(("banyan top", "bold"), f"  {told['url']}  {told['model']}  {at}  rates {span}{shards}")


def _hits(told: Mapping[str, Any]) -> Text:
    """A bar of prompt tokens by where they came from, and its legend."""
    hits, whole = told["hits"], sum(told["hits"].values())
    if not whole:
        return Text("hits      no prompt was answered")
    bar, cells, done = Text("hits      "), 0, 0.0
    for source, tokens in hits.items():
        done += tokens
        end = round(BAR_CELLS * done / whole)
        bar.append("█" * (end - cells), style=COLOURS[source])
        cells = end
    bar.append("\n          ")
    for source, tokens in hits.items():
        bar.append("■ ", style=COLOURS[source])
        bar.append(f"{WORDS[source]} {tokens / whole:.1%}   ")
    return bar.append(f"of {_count(whole)} prompt tokens")


def _ceiling(told: Mapping[str, float]) -> Text:
    """What could have been found: at most, and with other memory. It is counted from the server's start, or from
    when its weights have changed."""
    if not any(told.values()):
        return Text("ceiling   no prompt was answered in the last 24h")
    most = ", ".join(f"{told[name]:.1%} ({name})" for name in WINDOW_MINUTES)
    return Text(
        f"ceiling   {most} could have been found if nothing had gone\n"
        f"          by age: half the memory {told['half']:.1%}, as it is {told['same']:.1%}, twice {told['double']:.1%}"
    )


def _ranks(told: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1))
    table.add_column("rank")
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for rank in told["ranks"]:
        values, per_s = rank["values"], rank["per_s"]
        pool = values.get("num_pool_pages", 0)
        prompts = sum(rank["hits"].values())
        table.add_row(
            str(rank["dp_rank"]),
            _or_dash(rank["num_running"]),
            _or_dash(rank["num_waiting"]),
            f"{values.get('num_free_pages', 0) / pool:.0%}" if pool else "-",
            f"{_count(pool * rank['page_tokens'])} tok",
            f"{_count(values.get('num_quarantined_pages', 0))}",
            f"{1 - rank['hits']['computed'] / prompts:.1%}" if prompts else "-",
            _bytes(per_s["fetched_bytes"]),
            _count(values.get("evicted_duplicate_pages", 0)),
            _count(values.get("evicted_last_pages", 0)),
            _count(values.get("displaced_pages", 0)),
        )
    return table


def _memory(told: Mapping[str, Any]) -> Text:
    """How much of the pools is there once, and the arena."""
    ranks = [rank["values"] for rank in told["ranks"]]

    def total(name: str) -> float:
        return float(sum(values.get(name, 0) for values in ranks))

    text = Text(f"\npools     {told['distinct_share']:.1%} of the pages held are distinct\narena     ")
    if not total("num_arena_frames"):
        return text.append("none")
    used = f"{_count(total('num_arena_pages'))} of {_count(total('num_arena_frames'))} pages"
    return text.append(
        f"{used}, {_count(total('num_arena_evicted_pages'))} evicted, "
        f"{_count(total('backups_dropped_pages'))} not taken down in time"
    )


def _pages_of(store: Mapping[str, Any]) -> str:
    """Not every library tells how many there are."""
    return "" if store["num_records"] is None else f"{_count(store['num_records'])} pages, "


def _store(store: Mapping[str, Any]) -> Text:
    wear = f"{_bytes(store['written_bytes_per_day'])}/day"
    if store["allowed_bytes_per_day"]:
        wear += f" of {_bytes(store['allowed_bytes_per_day'])} allowed"
    return Text(
        f"store     {_pages_of(store)}{_count(store['backlog_pages'])} pages wait to be written, "
        f"{_bytes(store['written_bytes'])} written: {wear}; "
        f"{_count(store['checksum_failures'])} damaged, {_count(store['stalls'])} stalls"
    )


def _alerts(told: Mapping[str, Any]) -> list[Text]:
    if not told["alerts"]:
        return [Text("alerts    none", style="green")]
    lines = []
    for alert in told["alerts"]:
        style = "bold red" if alert["severity"] == "critical" else "yellow"
        since = " (counted since the start)" if alert["is_since_start"] else ""
        said = f" (rank {', '.join(map(str, alert['ranks']))}): {alert['summary']}{since}. {alert['advice']}"
        lines.append(Text.assemble((f"{alert['severity']:9} {alert['name']}", style), said))
    return lines


def _changing_lines(told: Mapping[str, Any]) -> list[Text]:
    """Where prompts of a session change in every turn."""
    return [
        Text(
            f"line      rank {line['dp_rank']}: after token {line['place']} of {line['num_tokens']}"
            f"{' in ' + line['part'] if line['part'] else ''}, in {line['num_prompts']} prompts of a session in a row"
            f"{': ' + repr(line['text']) if line['text'] else ''}"
        )
        for line in told["changing_lines"]
    ]


def _count(number: float) -> str:
    """Three digits or so, as people read them."""
    for unit in ("", "k", "M", "G"):
        if abs(number) < 1000 or unit == "G":
            break
        number /= 1000
    return f"{number:.0f}{unit}" if not unit or number >= 100 else f"{number:.1f}{unit}"


def _bytes(number: float) -> str:
    return f"{_count(number)}B" if number >= 1000 else f"{number:.0f} B"


def _or_dash(value: Any) -> str:
    return "-" if value is None else str(value)
