"""Ray Serve's request router, by prompt prefixes (`ssd.server.replicas.prefixes`). Imported by Ray only."""

from __future__ import annotations

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from ssd.server.replicas import prefixes


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Chooses the replica for each call of `ServerReplica.answer`."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return [candidate_replicas]
        [route] = [argument for argument in pending_request.args if isinstance(argument, prefixes.Route)]
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        chosen = by_id[prefixes.TABLE.choose(route, list(by_id))]
        # Ray asks a replica for its queue otherwise, and chooses another one if it does not answer within 0.1 s
        self.replica_queue_len_cache.update(chosen.replica_id, 0)
        return [[chosen]]
