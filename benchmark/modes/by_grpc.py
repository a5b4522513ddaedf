# SPDX-License-Identifier: Apache-2.0
"""Servers that speak gRPC in place of HTTP, asked as SGLang's gateway asks them: token ids in, token ids out.

Their servicer takes no rank from a client and does not say where cached tokens came from: SGLang's placement takes the
ranks in turn, and the ranks' figures tell what was fetched.
"""

from __future__ import annotations

import re
import time
import urllib.request
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
from smg_grpc_proto import sglang_scheduler_pb2 as messages
from smg_grpc_proto import sglang_scheduler_pb2_grpc as calls

from benchmark.modes.asking import GREEDY, TIMEOUT_S, Answer, Ask
from benchmark.modes.models import FIRST_PLAIN_TOKEN
from benchmark.servers import ServerSpec, free_port
from benchmark.warm import ForkedServer

WAKING = (FIRST_PLAIN_TOKEN,) * 4
"""Less than a page."""

PEER_TOKENS = re.compile(r"^banyan_peer_tokens_total\{.*\} (\S+)$", re.MULTILINE)


class GrpcServer(ForkedServer):
    """One of them. ``url``: where it shows figures by HTTP."""

    def __init__(self, spec: ServerSpec, model: Path, log_dir: Path) -> None:
        figures = free_port()
        super().__init__(
            replace(spec, args=(*spec.args, "--smg-http-sidecar-port", str(figures))),
            model,
            log_dir,
        )
        self.url = f"http://127.0.0.1:{figures}"
        self._stub: Any = calls.SglangSchedulerStub(grpc.insecure_channel(f"127.0.0.1:{self.port}"))

    def _generates(self, timeout_s: float) -> bool:
        try:
            return bool(self._stub.HealthCheck(messages.HealthCheckRequest(), timeout=timeout_s).healthy)
        except grpc.RpcError:
            return False

    def tokens(self) -> Ask:
        """Asks for greedy tokens; a rank is not named."""

        def ask(ids: Sequence[int], rank: int | None) -> Answer:
            return Answer(tuple(self.answers(ids, messages.SamplingParams(**GREEDY))))

        return ask

    def answers(self, ids: Sequence[int], sampling: messages.SamplingParams, **said: Any) -> list[int]:
        """The tokens of one answer, to a request that has also what is ``said``. Raises grpc.RpcError for one that is
        refused."""
        request = {
            "request_id": uuid.uuid4().hex,
            "tokenized": messages.TokenizedInput(input_ids=ids),
            "sampling_params": sampling,
        }
        *_, last = self._stub.Generate(messages.GenerateRequest(**request | said), timeout=TIMEOUT_S)
        return list(last.complete.output_ids)

    def peer_tokens(self) -> int:
        """Tokens that its ranks have fetched from one another. A rank shows what it has counted a second later, in its
        next step."""
        time.sleep(1.5)
        for _ in range(self.spec.dp):
            self.tokens()(WAKING, None)
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=TIMEOUT_S) as response:
            return sum(int(float(number)) for number in PEER_TOKENS.findall(response.read().decode()))
