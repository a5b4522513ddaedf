# SPDX-License-Identifier: Apache-2.0
"""The laboratory: what measures and simulates. Nothing that serves a request is here, and nothing of it imports this.

A distribution of its own, ``banyan-lab``. ``bench`` measures the native core, ``trace`` one request, ``sim`` simulates
clusters around the shipped policies, ``replay`` reads recorded workloads. ``banyan.cli`` finds the commands by their
entry points; experiments on running servers are in the repository's ``benchmark/`` folder, which uses this package and
is not packaged.
"""
