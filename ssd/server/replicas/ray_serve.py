"""Replicas of the server on Ray Serve, which places them, asks for their health and replaces them.

The proxy (`ssd.server.replicas.proxy`) is this process, not Ray's: that one knows neither this server's limits nor
prompts, and sends no request twice.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import AsyncGenerator, Mapping
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, Final, Self

from prometheus_client.core import Metric
from starlette.types import Message, Scope

from ssd.config import EngineConfig
from ssd.errors import ConfigError, EngineFailed, install_extra, one_line
from ssd.server.admission import RETRY_AFTER
from ssd.server.errors import ApiError
from ssd.server.http.bodies import LARGE, on_thread
from ssd.server.options import ServerOptions
from ssd.server.replicas.prefixes import TABLE, Route, chunk_keys
from ssd.server.replicas.proxy import ReplicaLost
from ssd.server.replicas.replica import FAILED, HEALTH_CHECK_SECONDS, ServerReplica

log = logging.getLogger("ssd")

LOCAL: Final = "local"  # Ray's address for a new cluster on this machine
_OBJECT_STORE: Final = 128 << 20  # bytes: requests above 100 kB go through it
_SHUTDOWN_SECONDS: Final = 10  # time for a replica to close its engine
_BROADCAST_SECONDS: Final = 5  # time for replicas to return their metrics or state
_DEPLOYMENT: Final = "replica"
_REASON: Final = re.compile(r"^ssd\.errors\.\w+: (.*)$", re.MULTILINE)  # in a traceback

Resources = Mapping[str, float]  # Ray's, by name: CPU, GPU, …


def needs(config: EngineConfig, nodes: Seq[Resources], replicas: int) -> dict[str, float]:
    """What each replica needs, all of it on one node: GPUs, or else an equal share of the cluster's cores."""
    if config.device == "cpu":
        most = int(max(node.get("CPU", 0) for node in nodes))
        cores = next((n for n in range(most, 0, -1) if _room({"CPU": n}, nodes) >= replicas), 1)
        wanted: dict[str, float] = {"CPU": cores}
    else:
        drafts, on_cpu = config.speculation.draft_ranks, config.speculation.draft_device == "cpu"
        wanted = {"CPU": 1 + on_cpu * drafts, "GPU": config.tensor_parallel_size + (not on_cpu) * drafts}
    if (room := _room(wanted, nodes)) < replicas:
        each = ", ".join(f"{number} {name}" for name, number in wanted.items())
        raise ConfigError(f"replicas={replicas}: the Ray cluster has room for {room} ({each} each): use fewer")
    return wanted


def _room(wanted: Resources, nodes: Seq[Resources]) -> int:
    """Replicas that fit the nodes."""
    return sum(min(int(node.get(name, 0) // number) for name, number in wanted.items()) for node in nodes)


def with_device(config: EngineConfig, nodes: Seq[Resources]) -> EngineConfig:
    """`auto` is decided by what the cluster has, not by this machine."""
    if config.device == "auto":
        return replace(config, device="cuda" if any(node.get("GPU") for node in nodes) else "cpu")
    if ":" in config.device:
        raise ConfigError(f"device={config.device!r}: Ray chooses the GPUs of replicas: use cuda")
    return config


class RayReplicas:
    """Replicas of a server in a Ray cluster, as long as this context lasts."""

    def __init__(self, config: EngineConfig, options: ServerOptions, replicas: int, address: str = LOCAL) -> None:
        """Returns when they are ready. `address`: of a cluster to join; LOCAL starts one that ends with the process."""
        if address.startswith("ray://"):
            raise ConfigError(f"ray_address={address!r}: run this command on a node of the cluster, with its HOST:PORT")
        self.lost: str | None = None
        self._closed = threading.Event()
        _connect(address)
        try:
            self._deploy(config, options, replicas)
        except BaseException:
            self.close()
            raise
        threading.Thread(target=self._watch, daemon=True).start()

    def _deploy(self, config: EngineConfig, options: ServerOptions, replicas: int) -> None:
        import ray
        from ray import serve
        from ray.serve.config import RequestRouterConfig

        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        config = with_device(config, nodes)
        wanted = needs(config, nodes, replicas)
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        serve.start(proxy_location="Disabled", logging_config={"log_level": "CRITICAL"})
        self._name = f"ssd-{secrets.token_hex(4)}"  # a cluster may have several
        deployment = serve.deployment(
            ServerReplica,
            name=_DEPLOYMENT,
            num_replicas=replicas,
            ray_actor_options={"num_cpus": wanted["CPU"], "num_gpus": wanted.get("GPU", 0)},
            placement_group_bundles=[wanted],
            placement_group_strategy="STRICT_PACK",
            max_ongoing_requests=options.max_connections,  # the replica's own limits come first
            health_check_period_s=HEALTH_CHECK_SECONDS,
            graceful_shutdown_timeout_s=_SHUTDOWN_SECONDS,
            graceful_shutdown_wait_loop_s=0.1,
            max_constructor_retry_count=1,
            request_router_config=RequestRouterConfig(
                request_router_class="ssd.server.replicas.ray_router:PrefixRouter"
            ),
            logging_config={"log_level": "WARNING", "enable_access_log": False},
        )
        # the proxy checks keys, hosts and origins, and writes the access log
        within = replace(options, api_keys=(), allowed_hosts=(), cors_origins=(), access_log=False)
        app = deployment.bind(config, within, int(time.time()), log.level)
        try:
            self._handle = serve.run(app, name=self._name, route_prefix=None)
        except RuntimeError as error:
            raise EngineFailed(self._why() or f"the replicas do not start: {error}") from error
        self._calls = self._handle.options(stream=True)

    def _why(self) -> str | None:
        """This engine's error in the traceback of a replica that has failed to start."""
        found = _REASON.findall(self._status().message)
        return found[-1] if found else None

    def _status(self) -> Any:
        from ray import serve

        return serve.status().applications[self._name].deployments[_DEPLOYMENT]

    async def answer(self, scope: Scope, body: bytes, avoid: Seq[str]) -> AsyncGenerator[Message]:
        from ray.exceptions import RayActorError
        from ray.serve.exceptions import DeploymentUnavailableError

        keys = await on_thread(len(body) > LARGE, chunk_keys, body)
        request = TABLE.enter()
        call = self._calls.answer.remote(scope, body, Route(request, keys, list(avoid)))
        ended = False
        try:
            async for messages in call:
                for message in messages:
                    if message["type"] == FAILED:
                        raise ReplicaLost(message["reason"], message["replica"])
                    yield message
            ended = True
        except RayActorError as error:
            ended = True
            raise ReplicaLost("the replica that computed this request has ended") from error
        except DeploymentUnavailableError as error:
            ended = True
            raise ApiError(503, "no replica can be started", headers=RETRY_AFTER) from error
        finally:
            TABLE.leave(request)
            if not ended:
                call.cancel()

    async def running(self) -> int:
        status = await asyncio.to_thread(self._status)
        count: int = status.replica_states.get("RUNNING", 0)
        return count

    async def metrics(self) -> dict[str, list[Metric]]:
        return dict(await self._all("metrics"))

    async def states(self) -> list[dict[str, Any]]:
        return await self._all("state")

    async def _all(self, method: str) -> list[Any]:
        """What replicas return; those that are lost meanwhile are left out."""
        from ray.serve.exceptions import DeploymentUnavailableError

        answers: list[Any] = []
        with suppress(DeploymentUnavailableError, TimeoutError):
            asked = self._handle.broadcast(method)
            answers = await asked.results_async(timeout_s=_BROADCAST_SECONDS, return_exceptions=True)
        found = [answer for answer in answers if not isinstance(answer, BaseException)]
        if not found:
            raise ApiError(503, "no replica answers", headers=RETRY_AFTER)
        return found

    def _watch(self) -> None:
        """Finds out that this machine's node of the cluster has ended: calls of replicas wait for ever then."""
        import ray

        own, alive = ray.get_runtime_context().get_node_id(), True
        while alive and not self._closed.wait(HEALTH_CHECK_SECONDS):
            try:
                alive = any(node["Alive"] and node["NodeID"] == own for node in ray.nodes())
            except Exception as error:  # after a minute without its GCS, Ray ends this process
                log.warning("Ray does not answer: %s", one_line(error))
        if not alive:
            self.lost = "the Ray cluster has lost the node of this machine: start the server again"

    def close(self) -> None:
        """Ends the replicas, and a cluster of one's own. Idempotent."""
        import ray
        from ray import serve

        self._closed.set()
        if ray.is_initialized():
            try:
                if hasattr(self, "_name") and self.lost is None:
                    serve.delete(self._name)
            finally:
                ray.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _connect(address: str) -> None:
    """Starts a Ray cluster on this machine, or joins one."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # before Ray is imported, which reads them then
    if address == LOCAL and "RAY_AUTH_MODE" not in os.environ:  # other hosts reach its ports
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    try:
        import ray
        import ray.serve
    except ImportError as error:
        raise ConfigError(f"--replicas needs the package {error.name}: {install_extra('ray')}") from error
    own = {"include_dashboard": False, "object_store_memory": _OBJECT_STORE} if address == LOCAL else {}
    try:
        ray.init(address=address, logging_level=logging.WARNING, **own)
    except (ConnectionError, ValueError, RuntimeError) as error:
        what = "a Ray cluster cannot be started here" if own else f"ray_address={address!r}: cannot be joined"
        raise ConfigError(f"{what} ({one_line(error)})") from error
