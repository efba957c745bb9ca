"""A cluster's nodes as the engine waits for them, with a driver whose views are written down."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from engine.cluster import cluster as module
from engine.cluster.cluster import Cluster
from engine.cluster.messages import ClusterView, ModelPlace, NodeView, Request, Start, Started
from engine.errors import NodeGone
from tests.fakes.model import fake_spec

LEFT = NodeView(id="1", label="left", hostname="left", address="10.0.0.1")
MODEL = ModelPlace(path="/models/m", name="m")


class Driver:
    """Shows the views one after the other, the last one again and again, and starts whatever it is asked to."""

    def __init__(self, views: list[ClusterView]) -> None:
        self._views = views
        self.started: list[str] = []

    def call(self, request: Request, patience_s: float) -> ClusterView | Started:
        """Answer at once."""
        if isinstance(request, Start):
            self.started.append(request.node)
            return Started(address="10.0.0.1", port=1, path="/models/m", pid=1)
        return self._views.pop(0) if len(self._views) > 1 else self._views[0]

    def close(self) -> None:
        """Nothing runs."""


Join = Callable[..., tuple[Cluster, Driver]]


@pytest.fixture
def join(monkeypatch: pytest.MonkeyPatch) -> Join:
    """Join a cluster that looks like these views."""

    def joined(*views: ClusterView) -> tuple[Cluster, Driver]:
        driver = Driver(list(views))
        monkeypatch.setattr(module, "DriverClient", lambda *_: driver)
        monkeypatch.setattr(module, "_LOOK_AGAIN_S", 0.0)
        return Cluster("auto"), driver

    return joined


def start_on_left(cluster: Cluster, folder: Path) -> Started:
    """Start a worker there."""
    host = cluster.new_host("w0", msgspec.structs.replace(fake_spec(folder), device="left/cpu"))
    return cluster.start_worker(host, MODEL, b"token")


def test_a_worker_waits_for_a_node_that_has_not_answered_since_the_cluster_was_joined(
    join: Join, tmp_path: Path
) -> None:
    nobody = ClusterView(nodes=(), awaits=True)
    cluster, driver = join(nobody, nobody, ClusterView(nodes=(LEFT,)))
    assert start_on_left(cluster, tmp_path).pid == 1
    assert driver.started == ["1"]
    cluster.close()


@pytest.mark.parametrize("patience_s", [module.REJOIN_PATIENCE_S, 0.0])
def test_a_node_that_is_not_in_the_cluster_or_never_answers_is_gone(
    join: Join, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patience_s: float
) -> None:
    monkeypatch.setattr(module, "REJOIN_PATIENCE_S", patience_s)
    cluster, driver = join(ClusterView(nodes=(), awaits=not patience_s))
    with pytest.raises(NodeGone, match="w0 cannot run on left: it is not in the cluster"):
        start_on_left(cluster, tmp_path)
    assert driver.started == []
    cluster.close()


def test_a_start_that_waits_for_its_node_ends_with_its_worker(join: Join, tmp_path: Path) -> None:
    cluster, driver = join(ClusterView(nodes=(), awaits=True))
    host = cluster.new_host("w0", msgspec.structs.replace(fake_spec(tmp_path), device="left/cpu"))
    with ThreadPoolExecutor(1) as threads:
        starting = threads.submit(cluster.start_worker, host, MODEL, b"token")
        host.kill()
        with pytest.raises(NodeGone):
            starting.result(module.REJOIN_PATIENCE_S / 2)
    assert driver.started == []
    cluster.close()
