"""Workers on three nodes of a real Ray cluster, which all are processes of this machine. Backends are fake."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray.cluster_utils import Cluster as RayNodes

from engine.cluster import Cluster
from engine.engine import Engine
from engine.errors import ClusterUnavailable, NodeGone
from engine.worker_process.hosts import WorkerExit
from engine.worker_process.protocol import Loaded, LogLine
from tests.fakes.backend import expected_text
from tests.fakes.engines import all_ready, ask, config, read, until
from tests.fakes.held import Hold
from tests.fakes.model import fake_spec
from tests.fakes.ports import free_port
from tests.fakes.worker import Probe, load_command, submit_command

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}
PATIENCE_S = 120.0  # Ray starts several processes anew, which takes a busy machine its time
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def hold(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hold]:
    """Holds up the workers of all nodes."""
    with pytest.MonkeyPatch.context() as patch:
        yield Hold(patch, tmp_path_factory.mktemp("hold"), "make_noisy")


@pytest.fixture(scope="module")
def nodes(hold: Hold) -> Iterator[RayNodes]:
    """A head without a name and a node "left"; nothing of it is left at the end, and nobody is told of it."""
    before = ray_processes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_MODE", "disabled")  # else a token would be looked for in, or put into, the home folder
        cluster = RayNodes(initialize_head=True, head_node_args={**NODE, "ray_client_server_port": free_port()})
        patch.setenv("RAY_ADDRESS", cluster.address)
        cluster.add_node(node_name="left", num_gpus=2, **NODE)
        try:
            yield cluster
        finally:
            cluster.shutdown()
    until_s = time.monotonic() + PATIENCE_S
    while ray_processes() - before and time.monotonic() < until_s:
        time.sleep(0.05)
    assert ray_processes() <= before


@pytest.fixture(scope="module")
def cluster(nodes: RayNodes) -> Iterator[Cluster]:
    """The cluster as an engine on its head joins it."""
    joined = Cluster("auto")
    yield joined
    joined.close()


def ray_processes() -> set[int]:
    """What runs of Ray on this machine."""
    found = psutil.process_iter(["cmdline"])
    return {each.pid for each in found if any("raylet" in part for part in each.info["cmdline"] or ())}


def runs(process: psutil.Process) -> bool:
    """Whether it does, rather than wait for whoever inherited it to take note of its end."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@asynccontextmanager
async def serving(cluster: Cluster, folder: Path, workers: int) -> AsyncIterator[Engine]:
    """An engine with so many workers on the cluster, all of them ready."""
    engine = Engine(
        config(worker_host="process", num_workers=workers, restart_backoff_s=0.5),
        new_host=cluster.new_host,
        probe=cluster.probe(),
    )
    await engine.start()
    try:
        await engine.load(fake_spec(folder, kv_cache_tokens=10**6))
        await all_ready(engine)
        yield engine
    finally:
        await engine.close(drain_s=0.0)


async def eventually(condition: Callable[[], object]) -> None:
    """Like `until`, with the patience that Ray asks for."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - many things change it, some in other processes
            await asyncio.sleep(0.01)


def places(engine: Engine) -> list[str]:
    """The node of each worker, the engine's own as ""."""
    return sorted(worker.devices[0].rpartition("/")[0] for worker in engine.publish().workers)


def switch_off(nodes: RayNodes, node: Any) -> None:
    """End everything that runs on a node, without a word to anybody."""
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    on_it = raylet.children(recursive=True)
    nodes.remove_node(node, allow_graceful=False)
    for each in on_it:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()


async def test_a_node_killed_under_load_changes_nothing_in_the_answers(
    nodes: RayNodes, cluster: Cluster, hold: Hold, tmp_path: Path
) -> None:
    doomed: Any = nodes.add_node(node_name="right", **NODE)
    await eventually(lambda: any(each.node == "right" for each in cluster.probe().read()))
    async with serving(cluster, tmp_path, workers=3) as engine:
        assert places(engine) == ["", "left", "right"]
        prompts = [f"marker {number}" for number in range(12)]
        length = 400
        hold.begin()
        reading = [
            asyncio.create_task(read(engine.submit(ask(prompt, max_tokens=length)), PATIENCE_S)) for prompt in prompts
        ]
        await until(lambda: all(row.output_tokens > 5 for row in engine.publish().requests))
        await asyncio.to_thread(switch_off, nodes, doomed)
        hold.end()
        answers = await asyncio.gather(*reading)
        assert [answer.text for answer in answers] == [expected_text(prompt.encode(), length) for prompt in prompts]
        await eventually(lambda: engine.publish().totals.worker_restarts)
        assert engine.publish().totals.requeued > 0
        await eventually(lambda: all(worker.state == "ready" for worker in engine.publish().workers))
        assert len(places(engine)) == 3
        assert "right" not in places(engine)
        await eventually(lambda: not any(device.node == "right" for device in engine.publish().devices))


async def test_every_nodes_devices_are_read_under_names_of_their_own(cluster: Cluster) -> None:
    readings = {reading.id: reading for reading in cluster.probe().read()}
    assert {"cpu", "left/cpu"} <= readings.keys()
    assert (readings["cpu"].node, readings["left/cpu"].node) == ("", "left")
    assert readings["left/cpu"].total_bytes > 0


async def test_a_worker_on_a_node_says_what_a_local_one_would(cluster: Cluster, tmp_path: Path) -> None:
    spec = fake_spec(tmp_path, device="left/cpu")
    probe = await Probe(cluster.new_host("w0", spec)).start()
    loaded = await probe.load(tmp_path)
    assert loaded.model.devices == ("left/cpu",)
    probe.send(submit_command("r", "hello", max_tokens=40))
    assert (await probe.answer("r"))[0] == expected_text(b"hello", 40)
    assert probe.host.pid is not None
    os.kill(probe.host.pid, signal.SIGKILL)
    exit_ = await probe.wait_for(WorkerExit)
    assert exit_.signal == "SIGKILL"
    assert "native out" in exit_.log_tail.splitlines()
    assert "native out" in [event.message for event in probe.events if isinstance(event, LogLine)]


async def test_a_stopped_worker_leaves_by_itself(cluster: Cluster, tmp_path: Path) -> None:
    probe = await Probe(cluster.new_host("w0", fake_spec(tmp_path, device="left/cpu"))).start()
    await probe.host.stop(PATIENCE_S)
    assert [exit_.code for exit_ in probe.exits] == [0]


async def test_an_actor_that_is_killed_takes_its_worker_with_it(cluster: Cluster, tmp_path: Path) -> None:
    probe = await Probe(cluster.new_host("w0", fake_spec(tmp_path, device="left/cpu"))).start()
    assert probe.host.pid is not None
    worker = psutil.Process(probe.host.pid)
    worker.parent().kill()
    async with asyncio.timeout(PATIENCE_S):
        exit_ = await probe.wait_for(WorkerExit)
    assert exit_.reason
    await eventually(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE)


async def test_a_worker_sees_no_gpu_but_those_that_placement_gave_it(cluster: Cluster, tmp_path: Path) -> None:
    probe = await Probe(cluster.new_host("w0", fake_spec(tmp_path, device="left/cuda:1"))).start()
    assert probe.host.pid is not None
    assert psutil.Process(probe.host.pid).environ()["CUDA_VISIBLE_DEVICES"] == "1"
    await probe.host.stop(PATIENCE_S)


async def test_a_worker_whose_node_is_not_there_says_so_at_once(cluster: Cluster, tmp_path: Path) -> None:
    host = cluster.new_host("w0", fake_spec(tmp_path, device="nowhere/cpu"))
    with pytest.raises(NodeGone, match="w0 cannot run on nowhere: it is not in the cluster"):
        await host.start(print, print)


async def joined(address: str) -> Cluster:
    """The cluster behind a Ray Client server, which on a busy machine may give up starting a process for its client."""
    for _ in range(2):
        with contextlib.suppress(ClusterUnavailable):
            return await asyncio.to_thread(Cluster, address)
    return await asyncio.to_thread(Cluster, address)


async def test_a_ray_client_computes_on_the_nodes_and_not_on_its_own_machine(nodes: RayNodes, tmp_path: Path) -> None:
    head: Any = nodes.head_node
    address = f"ray://{head.node_ip_address}:{head._ray_params.ray_client_server_port}"
    cluster = await joined(address)
    try:
        ids = [reading.id for reading in cluster.probe().read()]
        assert "cpu" not in ids
        assert "left/cpu" in ids
        probe = await Probe(cluster.new_host("w0", fake_spec(tmp_path, device="left/cpu"))).start()
        probe.send(load_command(tmp_path))
        assert (await probe.wait_for(Loaded)).model.devices == ("left/cpu",)
        await probe.host.stop(PATIENCE_S)
        assert [exit_.code for exit_ in probe.exits] == [0]
    finally:
        await asyncio.to_thread(cluster.close)


ORPHANED = """
import asyncio, sys, time
from pathlib import Path
from engine.cluster import Cluster
from tests.fakes.model import fake_spec
from tests.fakes.ports import free_port
from tests.fakes.worker import Probe

async def main():
    cluster = await asyncio.to_thread(Cluster, "auto")
    probe = await Probe(cluster.new_host("w0", fake_spec(Path(sys.argv[1]), device="left/cpu"))).start()
    print(probe.host.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_an_engine_that_is_killed_leaves_neither_worker_nor_actor(nodes: RayNodes, tmp_path: Path) -> None:
    command = (sys.executable, "-c", ORPHANED, str(tmp_path))
    engine = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
    assert engine.stdout is not None
    async with asyncio.timeout(PATIENCE_S):
        worker = psutil.Process(int(await engine.stdout.readline()))
    left = [worker, *worker.parents()[:1], *psutil.Process(engine.pid).children()]
    engine.kill()
    await engine.wait()
    await eventually(lambda: not any(map(runs, left)))


@pytest.mark.parametrize("address", ["ray://127.0.0.1:{}", "auto"])
async def test_a_cluster_that_is_not_there_is_an_error_in_seconds(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    with pytest.raises(ClusterUnavailable, match=f"cannot be joined: nothing answers at 127.0.0.1:{port}"):
        await asyncio.to_thread(Cluster, address.format(port))


async def test_an_engine_outlives_its_connection_to_ray_and_joins_again(
    cluster: Cluster, hold: Hold, tmp_path: Path
) -> None:
    async with serving(cluster, tmp_path, workers=2) as engine:
        workers = [psutil.Process(worker.pid) for worker in engine.publish().workers if worker.pid is not None]
        hold.begin()
        reading = asyncio.create_task(read(engine.submit(ask("on and on", max_tokens=300)), PATIENCE_S))
        await until(lambda: engine.publish().requests[0].output_tokens > 5)
        driver = next(each for each in psutil.Process().children() if "engine.cluster" in each.cmdline())
        driver.kill()
        await eventually(lambda: not any(map(runs, workers)))
        hold.end()
        assert (await reading).text == expected_text(b"on and on", 300)
        await eventually(lambda: all(worker.state == "ready" for worker in engine.publish().workers))
