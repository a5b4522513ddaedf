# SPDX-License-Identifier: Apache-2.0
"""A program that generates with SGLang's Engine: `python -m benchmark.modes.program OUT NUM_RANKS ARGUMENTS`.

ARGUMENTS are Engine's, in JSON; what Banyan is to do stands in the environment, as for any such program. It asks what
`asking.in_turn` asks of servers, and leaves the answers in OUT.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmark.modes import asking
from benchmark.modes.asking import Answer


def main(out: Path, num_ranks: int, arguments: dict[str, Any]) -> None:
    from sglang.srt.entrypoints.engine import Engine

    running = Engine(**arguments)

    def ask(ids: Sequence[int], rank: int | None) -> Answer:
        told = running.generate(
            input_ids=list(ids), sampling_params=asking.GREEDY, return_logprob=True, routed_dp_rank=rank
        )
        return asking.answer_of(told)

    try:
        answers = asking.in_turn(ask, num_ranks, asking.prompts())
    finally:
        running.shutdown()
    out.write_text(json.dumps([asdict(answer) for answer in answers]))


def read(out: Path) -> list[Answer]:
    """What a program has left."""
    return [Answer(**{**one, "said": tuple(one["said"])}) for one in json.loads(out.read_text())]


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
