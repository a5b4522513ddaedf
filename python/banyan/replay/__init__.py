# SPDX-License-Identifier: Apache-2.0
"""Recorded workloads, made playable: load, sample, scale, synthesise, pace. Pure; who sends is elsewhere.

``trace`` is the vocabulary; ``formats`` reads files; ``sample`` and ``scale`` make them smaller and say what that
cost; ``synthesis`` makes prompts; ``schedule`` says when.
"""

from banyan.replay.formats import load
from banyan.replay.sample import SampleReport, Sampling, sampled
from banyan.replay.scale import Scale, scaled
from banyan.replay.schedule import Pace
from banyan.replay.sharing import RequestClass, Sharing, class_of, sharing_of
from banyan.replay.skewed import Skew, skewed_trace
from banyan.replay.synthesis import Synthesis, Vocabulary
from banyan.replay.trace import Trace, TraceError, TraceRequest

__all__ = [
    "Pace",
    "RequestClass",
    "SampleReport",
    "Sampling",
    "Scale",
    "Sharing",
    "Skew",
    "Synthesis",
    "Trace",
    "TraceError",
    "TraceRequest",
    "Vocabulary",
    "class_of",
    "load",
    "sampled",
    "scaled",
    "sharing_of",
    "skewed_trace",
]
