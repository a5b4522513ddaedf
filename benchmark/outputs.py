# SPDX-License-Identifier: Apache-2.0
"""Do two servers give the same tokens for the same requests?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmark.measure import RunResult
from benchmark.records import Record

MAX_LISTED = 5


def compare_outputs(results: Sequence[RunResult], label: str, reference: str) -> dict[str, Any]:
    """Compare greedy outputs of `label` with those of `reference`: same repetition, run and request.

    `identical` is False as well when nothing could be compared: silence is no proof.
    """
    theirs = _by_request(results, reference)
    ours = _by_request(results, label)
    shared = sorted(ours.keys() & theirs.keys())
    differing = [key for key in shared if not _same(ours[key], theirs[key])]
    unanswered = len(ours.keys() ^ theirs.keys())
    return {
        "reference": reference,
        "identical": bool(shared) and not differing and not unanswered,
        "num_compared": len(shared),
        "num_differing": len(differing),
        "num_without_counterpart": unanswered,
        "differences": [_difference(key, ours[key], theirs[key]) for key in differing[:MAX_LISTED]],
    }


_Key = tuple[int, int, str]


def _by_request(results: Sequence[RunResult], label: str) -> dict[_Key, Record]:
    return {
        (result.repetition, result.run, record.key): record
        for result in results
        if result.label == label
        for record in result.records
        if not record.answer.error
    }


def _same(ours: Record, theirs: Record) -> bool:
    if ours.answer.output_ids or theirs.answer.output_ids:
        return ours.answer.output_ids == theirs.answer.output_ids
    return ours.answer.text == theirs.answer.text


def _difference(key: _Key, ours: Record, theirs: Record) -> dict[str, Any]:
    pairs = zip(ours.answer.output_ids, theirs.answer.output_ids, strict=False)
    first = next((index for index, (mine, other) in enumerate(pairs) if mine != other), None)
    return {
        "repetition": key[0],
        "run": key[1],
        "request": key[2],
        "first_differing_token": first,
        "ours": ours.answer.text[:120],
        "theirs": theirs.answer.text[:120],
    }
