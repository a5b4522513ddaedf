# SPDX-License-Identifier: Apache-2.0
"""How much of a request's prompt SGLang looks for: by its own rule, in a request that stands in for one of SGLang's."""

from sglang.srt.managers.schedule_batch import Req


class Matched:
    """What the rule reads of a request, as it is where nothing is asked of the prompt."""

    dllm_config, return_logprob, logprob_start_len, cache_salt, session = None, False, -1, None, None
    positional_embed_overrides = None
    _compute_max_prefix_len = Req._compute_max_prefix_len

    def is_dllm(self):
        return False

    def finished(self):
        return False
