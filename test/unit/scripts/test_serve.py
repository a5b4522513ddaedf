# SPDX-License-Identifier: Apache-2.0
"""``make serve`` says what to type when the server answers; over a server that answers at once."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from banyan.config import CPU_ISA_WITHOUT_AMX
from benchmark.servers import free_port

ROOT = Path(__file__).parents[3]
ISA = "ONEDNN_MAX_CPU_ISA"
# Stands in for the interpreter of .venv: SGLang's launcher is a server that knows /health only.
PYTHON = f"""#!/bin/sh
if [ "$1" = -m ]; then exec {sys.executable} "$(dirname "$0")/server.py" "$@"; fi
exec {sys.executable} "$@"
"""
SERVER = """
import http.server, os, sys
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404); self.end_headers()
    def log_message(self, *words): pass
words = sys.argv[1:]
print("started with", *words, "and", os.environ["ONEDNN_MAX_CPU_ISA"], flush=True)
http.server.HTTPServer(("127.0.0.1", int(words[words.index("--port") + 1])), Health).serve_forever()
"""


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "scripts").mkdir()
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / "benchmark").mkdir()
    for path in ("scripts/serve.sh", "benchmark/processor.py"):
        shutil.copy(ROOT / path, tmp_path / path)
    (tmp_path / ".venv/bin/python").write_text(PYTHON)
    (tmp_path / ".venv/bin/python").chmod(0o755)
    (tmp_path / ".venv/bin/server.py").write_text(SERVER)
    return tmp_path


@pytest.mark.parametrize("isa", [None, "DEFAULT"])
def test_serve_when_the_server_answers_then_it_has_no_amx_unless_asked_and_the_line_to_try_names_its_port(
    checkout, isa, monkeypatch
):
    monkeypatch.delenv(ISA, raising=False)
    if isa:
        monkeypatch.setenv(ISA, isa)
    port = str(free_port())
    server = subprocess.Popen(
        [checkout / "scripts/serve.sh", "--port", port], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    said = []
    try:
        for line in server.stdout:
            said.append(line)
            if "messages" in line:
                break
    finally:
        server.kill()
        server.wait()
    text = "".join(said)
    assert f"--enable-banyan --port {port} and {isa or CPU_ISA_WITHOUT_AMX}\n" in text
    assert "--device cpu --dtype " in text
    assert f"curl http://127.0.0.1:{port}/v1/chat/completions" in text and '"role": "user"' in text
