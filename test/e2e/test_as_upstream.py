# SPDX-License-Identifier: Apache-2.0
"""Prefixes between data-parallel ranks, tested as SGLang tests its own servers: with its test case, its launch helper
and its registration, so that this file could stand among them.

    python test/e2e/test_as_upstream.py
"""

import os
import sys
import unittest
from pathlib import Path

import pytest
import requests
from sglang.srt.utils import kill_process_tree
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import DEFAULT_TIMEOUT_FOR_SERVER_LAUNCH, CustomTestCase, popen_launch_server

ROOT = Path(__file__).parents[2]
sys.path[:0] = [path for path in (str(ROOT), str(ROOT / "python")) if path not in sys.path]

from benchmark.modes import asking, models  # noqa: E402
from benchmark.servers import cpu_env, free_port  # noqa: E402

pytestmark = [pytest.mark.e2e, pytest.mark.further]
register_cpu_ci(est_time=60, suite="base-b-test-cpu")
FLAGS = ["--dp", "2", "--device", "cpu", "--max-total-tokens", "8000", "--sleep-on-idle"]


class TestPrefixesBetweenRanks(CustomTestCase):
    @classmethod
    def setUpClass(cls):
        cls.url = f"http://127.0.0.1:{free_port()}"
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
        cls.process = popen_launch_server(
            str(models.ensure(models.LLAMA, ROOT / models.FOLDER)),
            cls.url,
            timeout=DEFAULT_TIMEOUT_FOR_SERVER_LAUNCH,
            other_args=[*FLAGS, "--enable-banyan", "--banyan-plan", "move"],
            env={**dict(cpu_env(dp=2)), "PATH": path},
            device="cpu",
        )

    @classmethod
    def tearDownClass(cls):
        kill_process_tree(cls.process.pid)

    def setUp(self):
        requests.post(f"{self.url}/flush_cache?timeout=30", timeout=30).raise_for_status()
        self.ask = asking.tokens(self.url)

    def test_prompt_when_the_other_rank_has_computed_it_then_its_pages_are_fetched(self):
        (prompt,) = asking.prompts(1)
        computed, fetched = (self.ask(prompt, rank) for rank in (0, 1))
        self.assertEqual(fetched.said, computed.said)
        self.assertEqual(fetched.first_log_probability, computed.first_log_probability)
        self.assertEqual(fetched.cached["peer"], (len(prompt) - 1) // 16 * 16)

    def test_prompt_when_the_cache_was_flushed_then_nothing_is_fetched(self):
        (prompt,) = asking.prompts(1)
        self.ask(prompt, 0)
        requests.post(f"{self.url}/flush_cache?timeout=30", timeout=30).raise_for_status()
        self.assertEqual(sum(self.ask(prompt, 1).cached.values()), 0)


if __name__ == "__main__":
    unittest.main()
