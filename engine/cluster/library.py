"""All that is used of Ray, behind a face with types. For the driver process alone; imports Ray when it joins."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil

from engine.errors import ClusterUnavailable
from engine.files import distrust, tighten_folder
from engine.installing import install_extra

OBJECT_STORE_BYTES = 128 * 2**20
"""Of a cluster that is started here: nothing is kept in it but actors' replies."""
ANSWER_S = 5.0
_NODE_ID_LABEL = "ray.io/node-id"
_PROCESSES = ("raylet", "gcs_server")
_TOKEN_RESOURCE = {"memory": 2**20}


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A living node as Ray lists it."""

    id: str
    label: str
    hostname: str
    address: str


class Ray:
    """A connection to one cluster. Every method blocks, and may be called from any thread."""

    def __init__(self, address: str) -> None:
        """Join; see `engine.cluster.open_cluster`. Raises ClusterUnavailable."""
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # nothing is reported to anybody
        if importlib.util.find_spec("ray") is None:
            raise ClusterUnavailable(
                f"--cluster needs Ray, which is not installed; `{install_extra('ray')}` brings it", lacks="ray"
            )
        self._ray: Any = importlib.import_module("ray")
        logging.getLogger("ray").setLevel(logging.ERROR)  # not before: the import sets it
        self._groups: Any = importlib.import_module("ray.util.placement_group")
        self._strategies: Any = importlib.import_module("ray.util.scheduling_strategies")
        self._errors: Any = importlib.import_module("ray.exceptions")
        wanted = os.environ.get("RAY_ADDRESS", "") if address == "auto" else address
        self._by_client = wanted.startswith("ray://")
        self._folder = ""
        try:
            self._join(wanted)
        except Exception as error:  # Ray raises whatever its parts do
            raise unavailable(wanted, error) from error

    def _join(self, wanted: str) -> None:
        """Join the cluster at `wanted`; without one, that of this machine, which is started if need be."""
        settings: dict[str, Any] = {"log_to_driver": False, "configure_logging": False, "namespace": "ericllm"}
        tighten_folder(Path.home() / ".ray")  # whoever reads Ray's token may run programs as this user
        if wanted:
            _require_answer(wanted)
            self._ray.init(wanted, **settings)
            return
        with suppress(ConnectionError):
            if _finds_only_ours():
                self._ray.init("auto", **settings)
                return
        # Ray lets everybody write into its folder, and would into /tmp/ray: one that nobody else can reach holds it.
        self._folder = tempfile.mkdtemp(prefix="ericllm-ray-", dir="/tmp")
        local = {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
        self._ray.init("local", _temp_dir=f"{self._folder}/ray", **local, **settings)

    def leave(self) -> None:
        """Leave the cluster; one that was started here ends."""
        self._ray.shutdown()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    # -- nodes --------------------------------------------------------------------------------------------------

    def own_node(self) -> str:
        """The id of the node that is this machine; "" where it is none."""
        return "" if self._by_client else str(self._ray.get_runtime_context().get_node_id())

    def nodes(self) -> list[Node]:
        """The living nodes."""
        return [
            Node(
                id=node["NodeID"],
                label=node.get("NodeName") or "",
                hostname=node.get("NodeManagerHostname") or "",
                address=node["NodeManagerAddress"],
            )
            for node in self._ray.nodes()
            if node["Alive"]
        ]

    # -- actors -------------------------------------------------------------------------------------------------

    def actor_on(self, node_id: str, kind: type, *arguments: object) -> Any:
        """An actor on that node that takes none of its resources."""
        strategy = self._strategies.NodeAffinitySchedulingStrategy(node_id, soft=False)
        return self._ray.remote(kind).options(num_cpus=0, scheduling_strategy=strategy).remote(*arguments)

    def actor_in(self, group: Any, cpus: int, kind: type, *arguments: object, calls: int, **named: object) -> Any:
        """An actor in the first bundle of a placement group, which takes up to `calls` calls at once.

        It asks for no GPU itself, so that Ray hides none from it: its group holds them.
        """
        strategy = self._strategies.PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
        options = {"num_cpus": cpus, "max_concurrency": calls, "scheduling_strategy": strategy, "max_restarts": 0}
        return self._ray.remote(kind).options(**options).remote(*arguments, **named)

    def get(self, reference: Any, patience_s: float) -> Any:
        """The value; raises what the call raised, or TimeoutError."""
        return self._ray.get(reference, timeout=patience_s)

    def wait(self, references: Sequence[Any], patience_s: float) -> set[Any]:
        """Those that are done, all of them or as many as are after `patience_s`."""
        if not references:
            return set()
        done, _ = self._ray.wait(list(references), num_returns=len(references), timeout=patience_s)
        return set(done)

    def when_done(self, reference: Any, then: Callable[[Future[Any]], None]) -> None:
        """Call `then`, on some thread, with the finished future."""
        reference.future().add_done_callback(then)

    def kill(self, actor: Any) -> None:
        """End an actor's process."""
        self._ray.kill(actor)

    def is_passing(self, error: BaseException) -> bool:
        """Whether an actor's failure may be none: it is out of reach, but not known to be dead."""
        return isinstance(error, self._errors.ActorUnavailableError)

    # -- placement groups ---------------------------------------------------------------------------------------

    def reserve(self, node_id: str, gpus: Mapping[str, float], cpus: int, patience_s: float) -> Any:
        """A placement group on that node: `cpus`, and a bundle for each further GPU; None if there is no room now.

        One bundle cannot hold parts of two GPUs: Ray takes numbers above 1 for whole ones.
        """
        shares = list(gpus.values())
        first: dict[str, float] = {"CPU": cpus} if cpus else dict(_TOKEN_RESOURCE)
        bundles = [{**first, **({"GPU": shares[0]} if shares else {})}, *({"GPU": share} for share in shares[1:])]
        where = [{_NODE_ID_LABEL: node_id}] * len(bundles)
        group = self._groups.placement_group(bundles, strategy="STRICT_PACK", bundle_label_selector=where)
        if group.wait(patience_s):
            return group
        self.release(group)
        return None

    def release(self, group: Any) -> None:
        """Give a placement group back."""
        self._groups.remove_placement_group(group)


def _finds_only_ours() -> bool:
    """Return whether Ray, left to find a cluster on this machine, would find ours or none.

    It joins any cluster whose processes it sees, else the one that a file in /tmp names: another user's would be handed
    models and prompts. Raises PermissionError where there are both, as only a person can say which is meant.
    """
    uids = {
        each.info["uids"].real
        for each in psutil.process_iter(["name", "uids"])
        if each.info["name"] in _PROCESSES and each.info["uids"]
    }
    ours = uids & {0, os.geteuid()}
    file = Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp", "ray", "ray_current_cluster")
    foreign = uids - ours or (file.exists() and distrust(file))
    if foreign and ours:
        raise PermissionError("other users have clusters on this machine too; name yours with RAY_ADDRESS=HOST:PORT")
    return not foreign


def _require_answer(address: str) -> None:
    """Raise ConnectionError where nothing listens at HOST:PORT: Ray would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdecimal():
        return  # Ray knows other forms of addresses, and says what is wrong with them
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_S).close()
    except OSError as error:
        raise ConnectionError(f"nothing answers at {host}:{port} ({error})") from error


def unavailable(address: str, error: BaseException) -> ClusterUnavailable:
    """Why a cluster cannot be joined, in one sentence."""
    text = " ".join(str(error).split())
    where = f"the Ray cluster at {address}" if address else "the Ray cluster of this machine"
    if isinstance(error, ImportError) and "grpc" in text.lower():
        why = f"the package grpcio is not installed, which ray:// needs; `{install_extra('ray')}` brings it"
    elif "client connection timeout" in text:
        why = f"{text}; a cluster that asks for a token needs RAY_AUTH_MODE=token and the token on this machine too"
    elif "ersion mismatch" in text:
        why = f"its Ray or Python is not the one of this machine: {text}"
    else:
        why = (text[:300] or type(error).__name__).rstrip(".")
    return ClusterUnavailable(f"{where} cannot be joined: {why}", address=address)
