# SPDX-License-Identifier: Apache-2.0
"""A soak from the first request to the last sample.

Phases: `running` until the time is up; then nothing new is asked and all answers are waited for; `settled` when no
rank holds anything for anybody; then everything is flushed, all pages must be back, and the known prompts are asked
once more at both ranks.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from benchmark.modes import models
from benchmark.servers import Server
from benchmark.soak import samples, traffic, verdict
from benchmark.soak.asking import Client
from benchmark.soak.disturbances import DISTURBANCES, FLUSH_TIMEOUT_S, SCHEDULER, Grounds
from benchmark.soak.expected import Known
from benchmark.soak.rig import store_folder
from benchmark.soak.samples import Sample
from benchmark.soak.tally import Tally

SAMPLE_EVERY_S = 10.0
DISTURBED_EVERY_S = 8.0
REQUEST_TIMEOUT_S = 120.0
"""Longer than any disturbance: an answer that takes so long is lost."""

SETTLED_WITHIN_S = 60.0

STANDING_S = 20.0
"""Longer than a rank is stopped on purpose: one that says nothing for so long stands still."""


class Soak:
    """One soak of one server, and what it has seen."""

    def __init__(
        self, server: Server, folder: Path, known: Sequence[Known], seed: int, say: Callable[[str], None]
    ) -> None:
        self.tally = Tally()
        self.samples: list[Sample] = []
        self.left_over: list[str] = []
        self._server, self._folder, self._known, self._seed, self._say = server, folder, known, seed, say

    async def run(self, minutes: float, num_clients: int) -> None:
        # A connection for each request: uvicorn hangs up after 5 s of silence, and what is sent just then is lost, also
        # where it was this process that had no core for so long.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
            clients = [self._client(http, number) for number in range(num_clients + 1)]
            grounds = Grounds(clients[-1], models.ensure(models.LLAMA), self._schedulers())
            grounds.open.set()
            until_s = time.monotonic() + minutes * 60
            sampling = asyncio.create_task(self._sample_until(clients[-1], until_s))
            disturbing = asyncio.create_task(self._disturb_until(grounds, until_s))
            await asyncio.gather(*(self._ask_until(client, grounds, until_s) for client in clients[:-1]))
            await disturbing
            await sampling
            await self._end(clients[-1])

    def _client(self, http: Any, number: int) -> Client:
        return Client(http, self._server.url, self.tally, self._known, random.Random(f"{self._seed} {number}"))

    def _schedulers(self) -> list[int]:
        found = samples.processes(self._server.pids())
        return [int(name.split()[-1]) for name in found if name.startswith(SCHEDULER)]

    async def _ask_until(self, client: Client, grounds: Grounds, until_s: float) -> None:
        kinds, weights = list(traffic.KINDS), list(traffic.KINDS.values())
        while time.monotonic() < until_s and self._server.is_running():
            await grounds.open.wait()
            await client.rng.choices(kinds, weights)[0](client)

    async def _disturb_until(self, grounds: Grounds, until_s: float) -> None:
        kinds, weights = list(DISTURBANCES), list(DISTURBANCES.values())
        rng = grounds.client.rng
        while (rest_s := until_s - time.monotonic()) > 0 and self._server.is_running():
            await asyncio.sleep(min(rest_s, rng.random() * 2 * DISTURBED_EVERY_S))
            kind = rng.choices(kinds, weights)[0]
            self.tally.disturbances[kind.__name__] += 1
            await kind(grounds)

    async def _sample_until(self, client: Client, until_s: float) -> None:
        while time.monotonic() < until_s:
            began_s = time.monotonic()
            await self._sample(client)
            await asyncio.sleep(max(0.0, SAMPLE_EVERY_S - (time.monotonic() - began_s)))
        await self._sample(client)

    async def _sample(self, client: Client) -> Sample:
        asking = asyncio.create_task(self._info(client))
        answered, _ = await asyncio.wait({asking}, timeout=STANDING_S)
        if not answered:
            await asyncio.to_thread(self._keep_stacks)
        info = await asking
        sample = Sample(
            at_s=round(client.at_s(), 1),
            num_requests=self.tally.num_requests,
            processes=samples.processes(self._server.pids()),
            ranks={} if info is None else samples.ranks(info),
            failures={} if info is None else samples.failures(info),
            store_bytes=samples.folder_bytes(store_folder(self._folder)),
        )
        self.samples.append(sample)
        if len(self.samples) % 6 == 1:
            self._say(
                f"{sample.at_s:6.0f} s  {sample.num_requests} requests, {self.tally.num_compared} compared, "
                f"{self.tally.num_differing} differ, {self.tally.num_errors} errors"
            )
        return sample

    def _keep_stacks(self) -> None:
        """Where each rank stands, while it does."""
        for pid in self._schedulers():
            command = [str(Path(sys.executable).with_name("py-spy")), "dump", "--pid", str(pid)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            with (self._folder / "stacks.txt").open("a") as file:
                file.write(f"{time.strftime('%X')} {done.stdout}{done.stderr}\n")

    async def _info(self, client: Client) -> dict[str, Any] | None:
        """What the ranks say; None where they do not, which is an error."""
        try:
            async with client.http.get(client.url + "/server_info") as response:
                return dict(await response.json())
        except (OSError, TimeoutError) as error:
            client.failed("server_info", f"{type(error).__name__}: {error}")
            return None

    async def _end(self, client: Client) -> None:
        if not self._server.is_running():
            self.left_over.append(f"the server has ended:\n{self._server.log_tail()}")
            return
        deadline_s = time.monotonic() + SETTLED_WITHIN_S
        while (held := verdict.unsettled((await self._sample(client)).ranks)) and time.monotonic() < deadline_s:
            await asyncio.sleep(1)
        self.left_over += held
        await client.post("flush", f"/flush_cache?timeout={FLUSH_TIMEOUT_S}", {})
        self.left_over += verdict.unreturned((await self._sample(client)).ranks)
        for rank in (0, 1):
            for known in self._known:
                body = {**traffic.asked(client, known), "routed_dp_rank": rank}
                client.judge("last", known, await client.post("last", "/generate", body))
        await self._sample(client)
