"""What a model takes of each device that it is put on, as its backend will hold it. Pure: integers in and out."""

from engine.costs.reckoning import costs_of
from engine.costs.torch_costs import MAX_HEAD_COPY_BYTES, RUNTIME_BYTES
from engine.costs.values import Correction, DeviceKind, ModelCosts, Workload, corrected, device_kind

__all__ = [
    "MAX_HEAD_COPY_BYTES",
    "RUNTIME_BYTES",
    "Correction",
    "DeviceKind",
    "ModelCosts",
    "Workload",
    "corrected",
    "costs_of",
    "device_kind",
]
