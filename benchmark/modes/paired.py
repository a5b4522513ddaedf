# SPDX-License-Identifier: Apache-2.0
"""A row of pairs: a prefill server, a decode server and a router in front of them, against one server that is none."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from benchmark.modes import asking
from benchmark.modes.asking import Answer
from benchmark.modes.rows import Mode
from benchmark.pd_servers import Pair
from benchmark.warm import ForkedServer

DECODE_POOL_TOKENS = 8000
"""SGLang keeps 512 of these for each running request."""

ALONE_POOL_TOKENS = 16_000
QUESTION_TOKENS = 40


def answers(
    mode: Mode,
    model: Path,
    folder: Path,
    asked: Sequence[Sequence[int]],
    *,
    env: Sequence[tuple[str, str]],
) -> list[Answer]:
    """What the pair of a row says to these prompts, and to a next turn of each. Its prefill server's pool is so small
    that they have left it by then."""
    shutil.rmtree(folder / "store", ignore_errors=True)
    of_both = mode.flags[: mode.flags.index("--disaggregation-transfer-backend")]
    pair = Pair(
        "on",
        "on",
        model,
        folder,
        num_shards=int(of_both[of_both.index("--tp") + 1]) if "--tp" in of_both else 1,
        transfer=mode.flags[len(of_both) + 1],
        store=folder / "store",
        prefill_args=(*of_both, "--banyan-plan", "move", "--max-total-tokens", str(mode.pool_tokens)),
        decode_args=(
            *of_both,
            *("--max-total-tokens", str(DECODE_POOL_TOKENS)),
            # Else it reserves host memory for what it retracts, 10 GiB and more.
            *("--disaggregation-decode-retraction-backup", "cpu_tensor"),
        ),
        env=env,
        kind=ForkedServer,
    )
    with pair, pair.routed() as url:
        return two_turns(asking.tokens(url), asked)


def two_turns(ask: asking.Ask, asked: Sequence[Sequence[int]]) -> list[Answer]:
    """First turns, and then a next turn of each: the prompt, what was said, and a question."""
    first = [ask(ids, None) for ids in asked]
    grown = [[*ids, *map(int, answer.said), *ids[:QUESTION_TOKENS]] for ids, answer in zip(asked, first, strict=True)]
    return [*first, *(ask(ids, None) for ids in grown)]
