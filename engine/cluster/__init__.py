"""Workers on many machines, through Ray. Imported only when a cluster is asked for.

The engine's process never imports Ray: a child process does (`driver`), for Ray ends the process that holds it when its
head goes away, and writes to its standard error. Ray places, reserves and watches; what a step brings comes over a
socket straight from the worker (`wire`). On a node, an actor starts the very process that a local worker is (`node`).
"""

from engine.cluster.cluster import Cluster

__all__ = ["Cluster"]
