# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of `banyan bench gpu`; the rest of it needs a GPU."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from banyan_lab.bench import gpu as bench_gpu
from banyan_lab.bench.gpu_pools import model_shapes


def test_rates_when_rounds_differ_then_ratios_are_of_each_round():
    rates = bench_gpu._rates(([2.0, 4.0, 2.0], [1.0, 3.0, 2.0]), 4_000_000, "copy", "device_copy")
    assert rates["copy_gbps"] == pytest.approx(2.0) and rates["device_copy_gbps"] == pytest.approx(2.0)
    assert (rates["ratio_min"], rates["ratio"], rates["ratio_max"]) == (0.5, 0.75, 1.0)


def test_shapes_when_listed_then_block_bytes_are_those_of_the_models():
    blocks = {shape.name: shape.block_bytes for shape in model_shapes(16)}
    assert blocks == {
        "8B, page 16": 32 * 2 * 16 * 8 * 128 * 2,
        "70B, page 16": 80 * 2 * 16 * 8 * 128 * 2,
        "MLA, page 16": 61 * 16 * 576 * 2,
    }


def test_batch_when_made_then_one_copy_for_each_extent_of_each_page():
    def extent(base, stride):
        return SimpleNamespace(data_ptr=lambda: base, stride=lambda _dim: stride)

    pools = SimpleNamespace(
        shape=SimpleNamespace(extents=(8, 16)),
        places=[[extent(1000, 8), extent(2000, 16)], [extent(0, 24), extent(8, 24)]],
    )
    targets, sources, sizes = bench_gpu._batch(pools, source_row=1, target_row=0, order=[0, 2])
    assert sources == [0, 8, 48, 56] and targets == [1016, 2032, 1000, 2000] and sizes == [8, 16, 8, 16]


def test_run_when_there_is_no_gpu_then_one_line_and_no_trace(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False)))
    with pytest.raises(SystemExit, match="no CUDA GPU"):
        bench_gpu.run()


def test_gpu_check_when_only_what_it_names_is_installed_then_its_modules_are_found():
    script = (
        "import sys\n"
        "for name in ('msgspec', 'rich', 'prometheus_client', 'psutil', 'sglang', 'torch'): sys.modules[name] = None\n"
        "import banyan_lab.bench.gpu_pools, banyan.layout, banyan.transport.cuda_ipc.peers\n"
        "from banyan.cli import main\n"
        "main(['bench', 'gpu', '--json'])\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "banyan bench gpu: import of torch" in ended.stderr, ended.stderr
