# SPDX-License-Identifier: Apache-2.0
"""What ``make gpu-check`` reads from traces."""

import gzip
import json

import pytest
from test.gpu.synchronisations import count


def write(folder, name, *events):
    with gzip.open(folder / f"{name}.trace.json.gz", "wt") as file:
        json.dump({"traceEvents": [{"cat": category, "name": called} for category, called in events]}, file)


def test_count_when_ranks_have_waited_then_their_calls_are_added_by_name(tmp_path):
    write(tmp_path, "0", ("cuda_runtime", "cudaStreamSynchronize"), ("cuda_runtime", "cudaLaunchKernel"))
    write(tmp_path, "1", ("cuda_driver", "cuStreamSynchronize"), ("cuda_runtime", "cudaStreamSynchronize"))
    write(tmp_path, "2", ("cpu_op", "aten::Synchronize"))
    assert count(tmp_path) == {"cudaStreamSynchronize": 2, "cuStreamSynchronize": 1}


def test_count_when_the_scheduler_was_long_in_a_call_of_memory_then_that_counts_and_another_threads_does_not(tmp_path):
    calls = [("cudaLaunchKernel", 1, 5), ("cudaLaunchKernel", 1, 5), ("cudaHostAlloc", 1, 1500)]
    calls += [("cudaFree", 1, 900), ("cudaMemcpyAsync", 1, 4000), ("cuMemHostRegister", 2, 60000)]
    events = [{"cat": "cuda_runtime", "name": name, "tid": tid, "dur": dur} for name, tid, dur in calls]
    with gzip.open(tmp_path / "0.trace.json.gz", "wt") as file:
        json.dump({"traceEvents": events}, file)
    assert count(tmp_path) == {"cudaHostAlloc": 1}


def test_count_when_no_trace_shows_the_driver_then_it_proves_nothing(tmp_path):
    write(tmp_path, "0", ("cpu_op", "aten::mm"))
    with pytest.raises(ValueError, match="no trace"):
        count(tmp_path)
