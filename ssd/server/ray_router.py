"""Ray Serve's choice of a replica by the beginnings of prompts (`ssd.server.prefixes`)."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from ssd.server.prefixes import PrefixTable


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Of calls of `Replica.answer`; it lives in the proxy's process."""

    def initialize_state(self, **kwargs: Any) -> None:
        self._table = PrefixTable()
        self._in_flight: Counter[str] = Counter()  # requests, by replica

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return [candidate_replicas]
        keys, avoid = (pending_request.kwargs[name] for name in ("prefix", "avoid"))
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        load = {id_: self._in_flight[id_] for id_ in by_id.keys() - avoid or by_id}
        chosen = by_id[self._table.choose(keys, load)]
        # Ray asks a replica for its queue otherwise, and chooses another one if it does not answer within 0.1 s
        self.replica_queue_len_cache.update(chosen.replica_id, self._in_flight[chosen.replica_id.unique_id])
        return [[chosen]]

    def on_send_request(self, replica_id: ReplicaID) -> None:
        super().on_send_request(replica_id)
        self._in_flight[replica_id.unique_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        super().on_request_completed(replica_id, internal_request_id)
        self._in_flight[replica_id.unique_id] -= 1
        if self._in_flight[replica_id.unique_id] <= 0:
            del self._in_flight[replica_id.unique_id]
