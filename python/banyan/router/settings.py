# SPDX-License-Identifier: Apache-2.0
"""The knobs of ``banyan route``, each written once. ``docs/router.md`` prints the same table."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

from banyan import knobs
from banyan.config import DEFAULT_POLICY, hot_rank_knob
from banyan.knobs import above_zero, at_least, check, knob
from banyan.owner import MOST_SECRET_BYTES, read_private, read_secret
from banyan.router.tenants import Keys
from banyan.routing import POLICIES

ROUTER = "router"
"""The group of knobs: one table of the documentation."""


def _regex(text: str) -> str | None:
    try:
        re.compile(text)
    except re.error as error:
        return f"no regular expression: {error}"
    return None


SERVER_FLAGS = {
    "--server": "One SGLang server; repeat it.",
    "--prefill": "One SGLang server with --disaggregation-mode prefill; repeat it.",
    "--decode": "One SGLang server with --disaggregation-mode decode; repeat it.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the user asked for. ``servers`` are base URLs, without a slash at the end.

    Attributes:
        prefills, decodes: instead of ``servers``, those of a pair's two sides.
        probe_interval_s: between two looks at a server's load.
        health_interval_s: between two health checks, which run a token through the engine.
        failures_to_down: probes in a row.
        body_timeout_s: in which a client has to send the whole of it.
        drain_timeout_s: how long running requests may take to end when the router stops.
        api_key: for the router's own questions to the servers; None for none.
        tenant_secret: what ``tenant_secret_file`` holds.
    """

    servers: tuple[str, ...] = ()
    prefills: tuple[str, ...] = ()
    decodes: tuple[str, ...] = ()
    host: str = knob(
        "127.0.0.1", "--host", ROUTER, "Listen on this address; the default is this machine only.", metavar="HOST"
    )
    port: int = knob(30_100, "--port", ROUTER, "Listen on this port.", metavar="PORT")
    policy: str = knob(
        DEFAULT_POLICY,
        "--policy",
        ROUTER,
        "Policy that chooses a request's server, as `--banyan-policy`.",
        choices=tuple(POLICIES),
        metavar="NAME",
    )
    hot_rank_factor: float = hot_rank_knob("--hot-rank-factor", ROUTER)
    max_in_flight: int = knob(
        256,
        "--max-in-flight",
        ROUTER,
        "Limit of concurrent requests at one target; more wait in the router, which may send them elsewhere.",
        metavar="N",
        check=at_least(1),
    )
    max_waiting: int = knob(
        1024,
        "--max-waiting",
        ROUTER,
        "Limit of requests that wait in the router; the router refuses more with 429.",
        metavar="N",
        check=at_least(0),
    )
    queue_timeout_s: float = knob(
        60.0,
        "--queue-timeout-s",
        ROUTER,
        "Refuse a request with 503 when it has waited this long.",
        metavar="S",
        check=above_zero("seconds"),
    )
    max_retries: int = knob(
        1,
        "--max-retries",
        ROUTER,
        "Number of other servers that the router tries for a request whose server was lost before it answered.",
        metavar="N",
        check=at_least(0),
    )
    log_json: bool = knob(
        False, "--log-json", ROUTER, "Write the log as JSON, one object for each line.", switches_to=True
    )
    connect_timeout_s: float = 3.0
    idle_timeout_s: float = knob(
        600.0,
        "--idle-timeout-s",
        ROUTER,
        "Treat an answer as failed when it sends nothing for this long.",
        metavar="S",
        check=above_zero("seconds"),
    )
    probe_interval_s: float = 0.25
    probe_timeout_s: float = 5.0
    health_interval_s: float = 10.0
    health_timeout_s: float = 30.0
    failures_to_down: int = 3
    dual_path: bool = knob(
        True,
        "--no-dual-path",
        ROUTER,
        "Each prefill server reads only its own store, even if its decode server could read a part of the prompt.",
        switches_to=False,
    )
    tokenize: bool = knob(
        True,
        "--no-tokenize",
        ROUTER,
        "Compare prompts as text instead of asking servers for their tokens.",
        switches_to=False,
    )
    tokenize_timeout_s: float = 1.0
    drop_line: str = knob(
        "",
        "--drop-line",
        ROUTER,
        "Drop lines that match this regular expression from the system text of chats.",
        metavar="REGEX",
        unset="none",
        check=_regex,
    )
    max_body_mib: int = knob(
        16,
        "--max-body-mib",
        ROUTER,
        "Limit of one request's body; the router refuses a larger one with 413.",
        metavar="MIB",
        check=at_least(1),
    )
    max_buffered_mib: int = knob(
        2048,
        "--max-buffered-mib",
        ROUTER,
        "Memory limit for bodies of unanswered requests, and one for answers not yet taken; more is refused with 503.",
        metavar="MIB",
        check=at_least(64),
    )
    body_timeout_s: float = 60.0
    drain_timeout_s: float = 60.0
    tenants_file: str = knob(
        "",
        "--tenants-file",
        ROUTER,
        "Serve only clients that show a key of this file; prefixes of its tenants are kept apart. Mode 0600.",
        metavar="PATH",
        parse=os.path.abspath,
        unset="none",
    )
    tenant_secret_file: str = knob(
        "",
        "--tenant-secret-file",
        ROUTER,
        """The secret that proves to servers which tenant sent a request: the file of their
        `--banyan-tenant-secret-file`; mode 0600.""",
        metavar="PATH",
        parse=os.path.abspath,
        unset="none",
    )
    api_key: str | None = field(default=None, repr=False)
    tenant_secret: bytes | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check(self)
        self._check_servers()
        if bool(self.tenants_file) != bool(self.tenant_secret_file):
            raise ValueError(
                "--tenants-file, --tenant-secret-file: servers believe a router by the secret: give both, and the same "
                "secret to each server as --banyan-tenant-secret-file"
            )

    def _check_servers(self) -> None:
        if self.servers and (self.prefills or self.decodes):
            raise ValueError("--server: a router serves whole servers or pairs: drop it, or --prefill and --decode")
        if bool(self.prefills) != bool(self.decodes):
            raise ValueError("--prefill, --decode: a pair has both: give at least one of each")
        if not self.urls:
            raise ValueError("--server: at least one, or --prefill and --decode")
        seen: set[tuple[str, int]] = set()
        for url in self.urls:
            address = _address(url)
            if address is None:
                raise ValueError(f"{self._flag_of(url)} {url}: a URL like http://127.0.0.1:30000")
            if address in seen:
                raise ValueError(f"{self._flag_of(url)} {url}: the same one twice")
            seen.add(address)

    def _flag_of(self, url: str) -> str:
        return "--server" if url in self.servers else "--prefill" if url in self.prefills else "--decode"

    @property
    def urls(self) -> tuple[str, ...]:
        """All servers."""
        return (*self.servers, *self.prefills, *self.decodes)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``banyan route``."""
    for flag, what in SERVER_FLAGS.items():
        parser.add_argument(flag, action="append", default=[], metavar="URL", help=what)
    knobs.add_to(parser, Settings)
    parser.add_argument(
        "--api-key-file",
        type=Path,
        metavar="PATH",
        help="Holds the key with which the router asks the servers for their load. Mode 0600.",
    )


def take_flags(args: argparse.Namespace) -> Settings:
    """Raises ValueError for a value out of range, or a file that cannot be read, naming the flag."""
    taken = Settings(
        servers=_urls(args.server),
        prefills=_urls(args.prefill),
        decodes=_urls(args.decode),
        api_key=_key(args.api_key_file) if args.api_key_file is not None else None,
        **knobs.take_from(vars(args), Settings),
    )
    if not taken.tenants_file:
        return taken
    try:
        Keys.read(Path(taken.tenants_file))
    except (OSError, ValueError) as error:
        raise ValueError(f"--tenants-file {taken.tenants_file}: {error}") from None
    try:
        return replace(taken, tenant_secret=read_secret(Path(taken.tenant_secret_file)))
    except (OSError, ValueError) as error:
        raise ValueError(f"--tenant-secret-file {taken.tenant_secret_file}: {error}") from None


def _key(path: Path) -> str:
    try:
        key = read_private(path, MOST_SECRET_BYTES).decode().strip()
    except (OSError, ValueError) as error:
        raise ValueError(f"--api-key-file {path}: {error}") from None
    if not key:
        raise ValueError(f"--api-key-file {path}: there is no key in it")
    return key


def _address(url: str) -> tuple[str, int] | None:
    """A server's host and port, however they are spelt; None for what is no URL of a server, or more than that."""
    try:
        parts = urlsplit(url)
        usual_port, port = {"http": 80, "https": 443}[parts.scheme], parts.port
    except (KeyError, ValueError):
        return None
    host = (parts.hostname or "").rstrip(".")
    if not host or "@" in parts.netloc or parts.netloc != url.partition("://")[2]:
        return None
    return "localhost" if host in ("127.0.0.1", "::1") else host, port or usual_port


def _urls(given: Sequence[str]) -> tuple[str, ...]:
    return tuple(url.rstrip("/") for url in given)
