# SPDX-License-Identifier: Apache-2.0
"""The knobs of ``banyan route``: unit, default, check."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from banyan.config import DEFAULT_POLICY
from banyan.routing import POLICIES

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the user asked for.

    Attributes:
        servers: base URLs, without a slash at the end.
        policy: one of ``banyan.routing.POLICIES``.
        hot_rank_factor: as for ``--banyan-hot-rank-factor``.
        max_in_flight: requests at one rank at a time; more wait in the router, where they still can go elsewhere.
        max_waiting: requests that wait in the router; one more is refused with 429.
        queue_timeout_s: a request that has waited so long is refused with 503.
        max_retries: attempts at further servers for a request that reached one and got no answer.
        idle_timeout_s: an answer that stands still for so long has failed.
        probe_interval_s: between two looks at a server's load.
        health_interval_s: between two health checks, which run a token through the engine.
        failures_to_down: probes in a row.
        tokenize: whether servers are asked for the tokens of text prompts.
        max_body_bytes: larger requests are refused with 413.
        drain_timeout_s: how long running requests may take to end when the router stops.
        api_key: for the router's own questions to the servers; None for none.
    """

    servers: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 30_100
    policy: str = DEFAULT_POLICY
    hot_rank_factor: float = 2.0
    max_in_flight: int = 256
    max_waiting: int = 1024
    queue_timeout_s: float = 60.0
    max_retries: int = 1
    connect_timeout_s: float = 3.0
    idle_timeout_s: float = 600.0
    probe_interval_s: float = 0.25
    probe_timeout_s: float = 5.0
    health_interval_s: float = 10.0
    health_timeout_s: float = 30.0
    failures_to_down: int = 3
    tokenize: bool = True
    tokenize_timeout_s: float = 1.0
    max_body_bytes: int = 64 * MIB
    drain_timeout_s: float = 60.0
    api_key: str | None = None

    def __post_init__(self) -> None:
        if not self.servers:
            raise ValueError("--server: at least one")
        for url in self.servers:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.path or parts.query:
                raise ValueError(f"--server {url}: a URL like http://127.0.0.1:30000")
        if len(set(self.servers)) < len(self.servers):
            raise ValueError("--server: the same one twice")
        if self.policy not in POLICIES:
            raise ValueError(f"--policy {self.policy}: choose one of {', '.join(POLICIES)}")
        if not self.hot_rank_factor >= 1:
            raise ValueError(f"--hot-rank-factor {self.hot_rank_factor}: at least 1 (inf: no rank is hot)")
        for flag, value, least in (
            ("--max-in-flight", self.max_in_flight, 1),
            ("--max-waiting", self.max_waiting, 0),
            ("--max-retries", self.max_retries, 0),
        ):
            if value < least:
                raise ValueError(f"{flag} {value}: at least {least}")
        for flag, seconds in (("--queue-timeout-s", self.queue_timeout_s), ("--idle-timeout-s", self.idle_timeout_s)):
            if not seconds > 0:
                raise ValueError(f"{flag} {seconds}: above 0")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``banyan route``."""
    default = Settings(servers=("http://127.0.0.1:30000",))
    parser.add_argument("--server", action="append", required=True, metavar="URL", help="one SGLang server; repeat it")
    parser.add_argument("--policy", choices=tuple(POLICIES), default=default.policy, help="default %(default)s")
    parser.add_argument("--host", default=default.host, help="default %(default)s: this machine only")
    parser.add_argument("--port", type=int, default=default.port, help="default %(default)s")
    parser.add_argument(
        "--hot-rank-factor",
        type=float,
        default=default.hot_rank_factor,
        metavar="FACTOR",
        help="send nothing to a rank with more than this times the others' mean of ongoing tokens",
    )
    parser.add_argument(
        "--max-in-flight",
        type=int,
        default=default.max_in_flight,
        metavar="N",
        help="requests at one rank at a time; default %(default)s",
    )
    parser.add_argument(
        "--max-waiting",
        type=int,
        default=default.max_waiting,
        metavar="N",
        help="requests that may wait here; one more gets 429; default %(default)s",
    )
    parser.add_argument(
        "--queue-timeout-s",
        type=float,
        default=default.queue_timeout_s,
        metavar="S",
        help="a request that has waited so long gets 503; default %(default)s",
    )
    parser.add_argument(
        "--max-retries",
        type=int,
        default=default.max_retries,
        metavar="N",
        help="further servers for a request whose server was lost; default %(default)s",
    )
    parser.add_argument(
        "--idle-timeout-s",
        type=float,
        default=default.idle_timeout_s,
        metavar="S",
        help="an answer that stands still for so long has failed; default %(default)s",
    )
    parser.add_argument(
        "--no-tokenize",
        action="store_true",
        help="do not ask servers for the tokens of text prompts; compare text instead",
    )
    parser.add_argument(
        "--api-key-file",
        type=Path,
        metavar="PATH",
        help="holds the key with which the router asks the servers for their load",
    )


def take_flags(args: argparse.Namespace) -> Settings:
    """Raises ValueError for a value out of range, naming the flag, and OSError for a file that cannot be read."""
    return Settings(
        servers=tuple(url.rstrip("/") for url in args.server),
        host=args.host,
        port=args.port,
        policy=args.policy,
        hot_rank_factor=args.hot_rank_factor,
        max_in_flight=args.max_in_flight,
        max_waiting=args.max_waiting,
        queue_timeout_s=args.queue_timeout_s,
        max_retries=args.max_retries,
        idle_timeout_s=args.idle_timeout_s,
        tokenize=not args.no_tokenize,
        api_key=args.api_key_file.read_text().strip() if args.api_key_file is not None else None,
    )
