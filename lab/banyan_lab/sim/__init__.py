# SPDX-License-Identifier: Apache-2.0
"""A cluster that is not there: discrete events around the shipped policies. Every figure it yields is simulated.

Standard library only. ``engine`` and ``resources`` know nothing of serving; ``hardware``, ``llms`` and ``compute``
are data and arithmetic; the other modules put them together. Policies come from ``banyan.routing``,
``banyan.planner`` and ``banyan.pacing``: this package has none of its own.
"""
