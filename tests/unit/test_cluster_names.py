"""What nodes and devices are called in the engine and in a worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.backends.base import LoadedModel
from engine.cluster.cluster import check_address
from engine.cluster.messages import NodeView
from engine.cluster.names import gpu_share, name_nodes, translation, visible_gpus
from engine.config import DeviceShare, ModelSpec
from engine.errors import InvalidRequest


def node(id_: str, *, label: str = "", hostname: str = "box", here: bool = False) -> NodeView:
    return NodeView(id=id_, label=label or "10.0.0.9", hostname=hostname, address="10.0.0.9", here=here)


def loaded(*devices: str) -> LoadedModel:
    return LoadedModel(
        backend="fake",
        architecture="x",
        dtype="float32",
        devices=devices,
        vocab_size=1,
        max_model_len=1,
        kv_tokens=1,
        page_tokens=1,
        weights_bytes=1,
        kv_bytes=1,
        parameters=1,
        shares=tuple(DeviceShare(device=device) for device in devices),
    )


def test_nodes_go_by_the_name_they_were_started_with_else_by_their_hosts() -> None:
    names = name_nodes([node("a", label="gpu-box"), node("b", hostname="rack 7"), node("c", here=True)], {})
    assert names == {"a": "gpu-box", "b": "rack-7", "c": ""}


def test_two_nodes_never_share_a_name_and_each_keeps_its_own() -> None:
    names = name_nodes([node("a"), node("b")], {"b": "box"})
    assert names == {"a": "box-2", "b": "box"}


def test_a_node_that_comes_back_gets_its_name_again() -> None:
    assert name_nodes([node("new")], {}) == {"new": "box"}


def test_a_worker_sees_its_gpus_from_zero_on_and_the_engine_their_real_ids() -> None:
    names = translation(["box/cuda:3", "box/cuda:1"])
    shares = tuple(DeviceShare(device=device, layers=2) for device in ("box/cuda:3", "box/cuda:1"))
    spec = names.to_worker(ModelSpec(path=Path("m"), name="m", shares=shares))
    assert [share.device for share in spec.shares] == ["cuda:0", "cuda:1"]
    back = names.from_worker(loaded("cuda:0", "cuda:1"))
    assert back.devices == ("box/cuda:3", "box/cuda:1")
    assert [share.device for share in back.shares] == ["box/cuda:3", "box/cuda:1"]


@pytest.mark.parametrize("device", ["cpu", "sim:1"])
def test_devices_that_are_no_gpus_keep_their_number_within_the_node(device: str) -> None:
    names = translation([f"box/{device}"])
    spec = names.to_worker(ModelSpec(path=Path("m"), name="m", device=f"box/{device}"))
    assert spec.device == device
    assert names.from_worker(loaded(device)).devices == (f"box/{device}",)


def test_a_worker_on_the_engines_machine_sees_only_its_gpu_too() -> None:
    names = translation(["cuda:2"])
    assert names.to_worker(ModelSpec(path=Path("m"), name="m", device="cuda:2")).device == "cuda:0"
    assert names.from_worker(loaded("cuda:0")).devices == ("cuda:2",)


def test_a_worker_spans_no_nodes() -> None:
    with pytest.raises(ValueError, match="devices of one node"):
        translation(["a/cuda:0", "b/cuda:0"])


@pytest.mark.parametrize(
    ("setting", "gpus", "visible"),
    [
        (None, ["cuda:1"], "1"),
        (None, ["cuda:3", "cuda:0"], "3,0"),
        ("4, 6", ["cuda:1"], "6"),
        ("GPU-aa,GPU-bb", ["cuda:1", "cuda:0"], "GPU-bb,GPU-aa"),
    ],
)
def test_gpus_are_counted_among_those_that_the_node_may_use(setting: str | None, gpus: list[str], visible: str) -> None:
    assert visible_gpus(setting, gpus) == visible


def test_each_gpus_share_is_the_part_of_its_memory_that_is_taken() -> None:
    shares = (
        DeviceShare(device="box/cuda:0", weights_bytes=3, kv_bytes=1),
        DeviceShare(device="box/cuda:1", working_bytes=1),
    )
    names = translation(["box/cuda:0", "box/cuda:1"])
    assert names.gpu_shares(shares, {"cuda:0": 8, "cuda:1": 3}) == {"cuda:0": 0.5, "cuda:1": 0.3334}


@pytest.mark.parametrize(("needed", "total"), [(0, 8), (5, 0), (9, 8)])
def test_a_gpu_of_unknown_or_full_use_is_taken_whole(needed: int, total: int) -> None:
    assert gpu_share(needed, total) == 1.0


@pytest.mark.parametrize("address", ["auto", "ray://gpu-box:10001", "ray://10.0.0.1:10001", "ray://[::1]:10001"])
def test_addresses_that_may_be_a_clusters_are_taken(address: str) -> None:
    assert check_address(address) == address


@pytest.mark.parametrize("address", ["local", "", "ray://", "ray://box", "box:6379", "ray://box:x", "ray://a b:1"])
def test_others_are_refused_by_name(address: str) -> None:
    with pytest.raises(InvalidRequest, match=r"local, auto or ray://HOST:PORT"):
        check_address(address)
