"""Every message between the engine and the process that holds Ray for it, framed as a worker's are."""

from __future__ import annotations

import msgspec

from engine.errors import ErrorInfo
from engine.snapshot import DeviceReading
from engine.worker_process.hosts import WorkerExit

# --- engine -> driver ---------------------------------------------------------------------------------


class Join(msgspec.Struct, frozen=True, kw_only=True, tag="join"):
    """Join the cluster at `address` ("auto" or ray://HOST:PORT); answered by ClusterView.

    gib: of each simulated device of a node, in place of its own; () takes those.
    """

    address: str
    gib: tuple[float, ...] = ()


class Look(msgspec.Struct, frozen=True, kw_only=True, tag="look"):
    """How are the nodes? Answered by ClusterView. pids: by node id, the processes there that are the engine's."""

    pids: dict[str, list[int]] = {}


class ModelPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Which folders a worker is going to read. name: what the model was asked for by; sizes: bytes of its files by
    name, as the engine's machine has them; others: further folders that must be there (a draft model, an adapter)."""

    path: str
    name: str
    sizes: dict[str, int] = {}
    others: tuple[str, ...] = ()


class Start(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """Reserve room on a node and start a worker's actor there; answered by Started.

    key: identifies this start from now on.  node, node_name: its id, and what the engine calls it.
    gpus: the share, 0..1, of each GPU by its id on the node, in order of the layers.
    token: to be shown on connecting.
    """

    key: str
    worker_id: str
    node: str
    node_name: str
    gpus: dict[str, float]
    token: bytes
    model: ModelPlace


class Kill(msgspec.Struct, frozen=True, kw_only=True, tag="kill"):
    """Kill a worker."""

    key: str


class Discard(msgspec.Struct, frozen=True, kw_only=True, tag="discard"):
    """Kill what is left of a worker's actor, and give back what was reserved for it."""

    key: str


Request = Join | Look | Start | Kill | Discard


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A request, and what its reply is called."""

    id: int
    request: Request


# --- driver -> engine ---------------------------------------------------------------------------------


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """One living node. label: the name that it was started with, or its address.  here: the engine's own machine, whose
    devices are not listed.  problem: why no worker can run there."""

    id: str
    label: str
    hostname: str
    address: str
    here: bool = False
    cores: int = 1
    devices: tuple[DeviceReading, ...] = ()
    problem: str = ""


class ClusterView(msgspec.Struct, frozen=True, kw_only=True, tag="sight"):
    """The nodes that live and answer. awaits: there are others, which have not answered yet."""

    nodes: tuple[NodeView, ...]
    awaits: bool = False


class Started(msgspec.Struct, frozen=True, kw_only=True, tag="started"):
    """The actor listens. path: where the model is, or will be, on the node; pid: of the actor."""

    address: str
    port: int
    path: str
    pid: int


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """It was done."""


class Reply(msgspec.Struct, frozen=True, kw_only=True, tag="reply"):
    """Result of the call of that id."""

    id: int
    result: ClusterView | Started | Done = Done()
    error: ErrorInfo | None = None


class OutputLines(msgspec.Struct, frozen=True, kw_only=True, tag="said"):
    """Native output of a worker."""

    key: str
    lines: tuple[str, ...]


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag="ended"):
    """A worker ended, by itself or with the actor that it ran in."""

    key: str
    exit: WorkerExit


News = Reply | OutputLines | Ended


def frame_of(body: bytes) -> bytes:
    """A message's bytes after their length, as `engine.worker_process.protocol.split_frames` takes them apart."""
    return len(body).to_bytes(4, "big") + body
