# SPDX-License-Identifier: Apache-2.0
"""Tests that import SGLang, in this process and without a server. The import takes some ten seconds, once."""

import os

from banyan.config import CPU_ISA_WITHOUT_AMX

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
# Read when torch first multiplies.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", CPU_ISA_WITHOUT_AMX)
