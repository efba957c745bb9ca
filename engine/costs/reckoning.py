"""From what a folder says of a model to what it takes of a device."""

from __future__ import annotations

from collections.abc import Callable

from engine.config import ModelSpec
from engine.costs.chosen import chosen_dtype
from engine.costs.exllama_costs import exllama_costs
from engine.costs.torch_costs import torch_costs
from engine.costs.values import Correction, DeviceKind, ModelCosts, Workload, corrected
from engine.facts import ModelFacts


def costs_of(
    facts: ModelFacts,
    spec: ModelSpec,
    kind: DeviceKind,
    workload: Workload,
    *,
    bfloat16: bool,
    correct: Callable[[str], Correction] = lambda identity: Correction(),
) -> ModelCosts:
    """What `facts` cost on devices of `kind`. bfloat16: whether a CPU computes in it if nothing else is asked for.

    correct: what earlier loads of that identity teach.
    """
    dtype = chosen_dtype(facts, spec, kind, bfloat16)
    held = (str(facts.path), facts.stamp, facts.backend, dtype, spec.weights, str(spec.cache_bits), kind)
    draft = () if facts.draft is None else (str(facts.draft.path), facts.draft.stamp)
    identity = "|".join((*held, *draft))
    bill = exllama_costs if facts.backend == "exllamav2" else torch_costs
    return corrected(bill(facts, spec, kind, workload, dtype, identity), correct(identity))
