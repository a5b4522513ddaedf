# SPDX-License-Identifier: Apache-2.0
"""``banyan route``: the policies of ``banyan.routing`` in front of several servers.

Decisions, pure: ``blocks`` and ``events`` (what each rank holds, as its KV events tell), ``sent`` (the same, guessed
from what was sent), ``prompt`` (what is read of a request), ``description`` (what servers say of themselves),
``health``, ``fleet`` (who can be sent to), ``verdict`` (pass on, try elsewhere, fail), ``suspects`` (who may have ended
a server). Edges: ``connections`` and ``bodies`` (clients, within bounds), ``waiting`` (the queue), ``upstream`` (one
attempt), ``forward`` (attempts until an answer), ``tasks`` (that go on: ``probes``, ``subscription``, ``load_feed``),
``answers``, ``app``, ``run``.

All of it runs on one event loop, without locks: whatever has no ``await`` in it is atomic.
"""
