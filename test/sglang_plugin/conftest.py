# SPDX-License-Identifier: Apache-2.0
"""Tests that import SGLang, in this process and without a server. The import takes some ten seconds, once."""

import os

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
