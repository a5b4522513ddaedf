# SPDX-License-Identifier: Apache-2.0
"""Recorded workloads, made playable: load, sample, scale, synthesise, pace. Pure; who sends is elsewhere.

``trace`` is the vocabulary; ``formats`` reads files; ``sample`` and ``scale`` make them smaller and say what that
cost; ``synthesis`` makes prompts; ``schedule`` says when.
"""

from banyan_lab.replay.formats import load
from banyan_lab.replay.sample import Sampling, sampled
from banyan_lab.replay.scale import Scale, scaled
from banyan_lab.replay.schedule import Pace
from banyan_lab.replay.sharing import RequestClass, Sharing, class_of, sharing_of
from banyan_lab.replay.skewed import Skew, skewed_trace
from banyan_lab.replay.synthesis import Synthesis, Vocabulary
from banyan_lab.replay.trace import Trace, TraceError, TraceRequest

__all__ = [
    "Pace",
    "RequestClass",
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
