# SPDX-License-Identifier: Apache-2.0
"""Do two servers give the same tokens for the same requests?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmark.measure import RunResult
from benchmark.records import Record

MAX_LISTED = 5


def compare_outputs(results: Sequence[RunResult], label: str, reference: str) -> dict[str, Any]:
    """Compare greedy outputs of `label`, in all its repetitions, with those of `reference`: same run and
    request.

    `identical` is False as well when nothing could be compared or something was left out: silence is no
    proof.
    """
    theirs = _reference(results, reference)
    ours = [
        (result.repetition, result.run, record)
        for result in results
        if result.label == label
        for record in result.records
    ]
    compared, differing, alone = 0, [], 0
    for repetition, run, record in ours:
        other = theirs.get((run, record.key))
        if other is None or other.answer.error or record.answer.error:
            alone += 1
            continue
        compared += 1
        if not _same(record, other):
            differing.append(_difference(repetition, run, record, other))
    alone += len(theirs.keys() - {(run, record.key) for _, run, record in ours})
    return {
        "reference": reference,
        "identical": compared > 0 and not differing and not alone,
        "num_compared": compared,
        "num_differing": len(differing),
        "num_without_counterpart": alone,
        "differences": differing[:MAX_LISTED],
    }


def disagreements_between_runs(results: Sequence[RunResult], label: str) -> int:
    """Requests that `label` answered with other tokens in a later run than in the first one it played them
    in.

    What a server disagrees about with itself (other batches, other rounding) says nothing about two servers.
    """
    first: dict[str, Record] = {}
    num_differing = 0
    for result in results:
        for record in result.records if result.label == label else ():
            if not record.answer.error and not _same(record, first.setdefault(record.key, record)):
                num_differing += 1
    return num_differing


def _reference(results: Sequence[RunResult], label: str) -> dict[tuple[int, str], Record]:
    """Records of `label` by run and request, of the earliest repetition."""
    records: dict[tuple[int, str], Record] = {}
    for result in results:
        for record in result.records if result.label == label else ():
            records.setdefault((result.run, record.key), record)
    return records


def _same(ours: Record, theirs: Record) -> bool:
    if ours.answer.output_ids or theirs.answer.output_ids:
        return ours.answer.output_ids == theirs.answer.output_ids
    return ours.answer.text == theirs.answer.text


def _difference(repetition: int, run: int, ours: Record, theirs: Record) -> dict[str, Any]:
    pairs = zip(ours.answer.output_ids, theirs.answer.output_ids, strict=False)
    first = next((index for index, (mine, other) in enumerate(pairs) if mine != other), None)
    return {
        "repetition": repetition,
        "run": run,
        "request": ours.key,
        "first_differing_token": first,
        "ours": ours.answer.text[:120],
        "theirs": theirs.answer.text[:120],
    }
