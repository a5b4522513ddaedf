# SPDX-License-Identifier: Apache-2.0
"""The servers of a soak: one that shares, with pools, an arena and maybe a store that are too small for what it is
asked, and one that shares nothing, which says beforehand what is right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmark.modes import models
from benchmark.modes.run import ENV
from benchmark.servers import Server, ServerSpec, Share, cpu_env, wait_ready
from benchmark.soak import expected
from benchmark.soak.expected import Known
from benchmark.warm import ForkedServer

POOL_TOKENS = 6000
ARENA_GIB, STORE_GIB = 0.02, 0.04
ADAPTER = "tiny"
EVERY = 4
"""So many known prompts have one that is known with the adapter, too."""

TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
ENGINE = (
    *("--device", "cpu", "--dtype", "float32", "--context-length", "4096", "--sleep-on-idle", "--enable-cache-report"),
    *("--enable-metrics", "--schedule-conservativeness", "0.3"),
)


def sharing(folder: Path, num_cores: int, kind: type[Server] = Server, more: tuple[str, ...] = ()) -> Server:
    """The server under soak. `kind`: whose processes are its own, or forked (benchmark.warm), of which nobody can tell
    what they use themselves. `more`: flags."""
    flags = (
        *("--max-total-tokens", str(POOL_TOKENS), "--banyan-host-gb", str(ARENA_GIB)),
        # An order by what is cached, which passes nobody over for long.
        *("--schedule-policy", "lpm", *more),
    )
    return kind(_spec(folder, "on", flags, num_cores), models.ensure(models.LLAMA), folder)


def store(folder: Path) -> tuple[str, ...]:
    """The flags of an empty store. Without one pages go down to the arena as they leave the pool."""
    size = ("--banyan-store-gb", str(STORE_GIB), "--banyan-store-admit", "first")
    return ("--banyan-store", str(store_folder(folder)), *size)


def store_folder(folder: Path) -> Path:
    return folder / "store"


def learn(folder: Path, num_cores: int, seed: int, say: Callable[[str], None]) -> list[Known]:
    """What a server that shares nothing says to the known prompts."""
    asked = expected.prompts(seed)
    spec = _spec(folder, "off", ("--max-total-tokens", "40000"), num_cores)
    with ForkedServer(spec, models.ensure(models.LLAMA), folder) as server:
        wait_ready([server])
        known = expected.learn(server.url, asked, None) + expected.learn(server.url, asked[::EVERY], ADAPTER)
    num_asked = len(asked) + len(asked[::EVERY])
    say(f"{len(known)} of {num_asked} prompts have tokens that no rounding changes")
    return known


def _spec(folder: Path, share: Share, flags: tuple[str, ...], num_cores: int) -> ServerSpec:
    folder.mkdir(parents=True, exist_ok=True)
    template = folder / "chat.jinja"
    template.write_text(TEMPLATE)
    adapters = (
        "--enable-lora",
        "--lora-paths",
        f"{ADAPTER}={models.ensure_adapter()}",
        "--lora-backend",
        "torch_native",
    )
    env = (*cpu_env(dp=2, num_cores=num_cores), *ENV)
    return ServerSpec(share, 2, share, (*ENGINE, "--chat-template", str(template), *adapters, *flags), env)
