"""The sampler's definitions in plain Python, one token at a time, and the shortest way to run the real one."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import torch
from scipy import stats

from engine.backends.sampling.sampler import SampledToken, SampleRow, sample
from engine.config import SamplingParams

DRAWS = 4000


def row(
    params: SamplingParams,
    *,
    prompt: list[int] | None = None,
    generated: tuple[int, ...] = (),
    ends: tuple[int, ...] = (),
    banned: tuple[int, ...] = (),
) -> SampleRow:
    """A row that has its prompt (token 0 unless told) and what was generated."""
    return SampleRow(params, prompt_ids=prompt or [0], generated=generated, end_token_ids=ends, banned_next=banned)


def one(logits: list[float] | torch.Tensor, params: SamplingParams, **more: Any) -> SampledToken:
    """The token of a batch of one."""
    found = sample(torch.as_tensor(logits, dtype=torch.float32)[None], [row(params, **more)])[0]
    assert found is not None
    return found


def histogram(logits: list[float], draws: int = DRAWS, ends: tuple[int, ...] = (), **knobs: Any) -> list[int]:
    """How often each token comes out over `draws` seeds."""
    rows = [row(SamplingParams(seed=seed, **knobs), ends=ends) for seed in range(draws)]
    counts = Counter(token.token_id for token in sample(torch.tensor([logits]).repeat(draws, 1), rows) if token)
    return [counts[token_id] for token_id in range(len(logits))]


def expected(logits: list[float], ends: tuple[int, ...] = (), **knobs: Any) -> np.ndarray:
    """The distribution after every knob, by the definitions."""
    temperature = knobs.get("temperature", 1.0)
    last = knobs.get("temperature_last", False)
    values = smoothed(np.array(logits, dtype=np.float64), knobs.get("smoothing_factor", 0.0))
    probs = softmax(values / (1.0 if last else temperature))
    kept = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[: int(knobs.get("top_k", 0)) or None]
    kept = [i for i in kept if probs[i] > 0]
    kept = smallest_set(kept, probs, knobs.get("top_p", 1.0))
    mass = sum(probs[i] for i in kept)
    best = probs[kept[0]] / mass
    kept = [i for i in kept if probs[i] / mass >= knobs.get("top_a", 0.0) * best**2]
    kept = [i for i in kept if probs[i] >= knobs.get("min_p", 0.0) * probs[kept[0]]]
    kept = without_tail(kept, probs, knobs.get("tfs", 1.0))
    mass = sum(probs[i] for i in kept)
    entropy = -sum(probs[i] / mass * math.log(probs[i] / mass) for i in kept)
    typical_first = sorted(kept, key=lambda i: abs(-math.log(probs[i] / mass) - entropy))
    kept = smallest_set(typical_first, probs, knobs.get("typical_p", 1.0))
    result = np.zeros(len(logits))
    result[kept] = probs[kept] / probs[kept].sum()
    low, high = knobs.get("min_temp", 0.0), knobs.get("max_temp", 0.0)
    if high > low:
        result = tempered(result, dynamic_temperature(result, low, high, knobs.get("temp_exponent", 1.0)))
    elif last:
        result = tempered(result, temperature)
    chance = knobs.get("xtc_probability", 0.0)
    return chance * without_top(result, knobs.get("xtc_threshold", 0.1), ends) + (1 - chance) * result


def smoothed(logits: np.ndarray, factor: float) -> np.ndarray:
    """Quadratic smoothing: the distance d from the best logit becomes factor * d * d."""
    return logits if factor == 0 else logits.max() - factor * (logits - logits.max()) ** 2


def smallest_set(ordered: list[int], probs: np.ndarray, share: float) -> list[int]:
    """The fewest of `ordered`, from the first on, that have `share` of their mass together."""
    mass, kept, so_far = sum(probs[i] for i in ordered), [], 0.0
    for i in ordered:
        if kept and so_far >= share * mass:
            break
        kept.append(i)
        so_far += probs[i]
    return kept if share < 1 else ordered


def without_tail(ordered: list[int], probs: np.ndarray, share: float) -> list[int]:
    """Tail free sampling of tokens that are sorted best first."""
    if share >= 1 or len(ordered) < 3:
        return ordered
    p = [probs[i] for i in ordered]
    bends = [abs((p[i] - p[i + 1]) - (p[i + 1] - p[i + 2])) for i in range(len(p) - 2)]
    if sum(bends) == 0:
        return ordered
    kept, so_far = 1, 0.0
    for bend in bends:
        so_far += bend / sum(bends)
        if so_far > share:
            break
        kept += 1
    return ordered[:kept]


def dynamic_temperature(probs: np.ndarray, low: float, high: float, exponent: float) -> float:
    """The temperature for a distribution, by its share of the entropy that its tokens could have."""
    left = [p for p in probs if p > 0]
    share = -sum(p * math.log(p) for p in left) / math.log(len(left)) if len(left) > 1 else 0.0
    return low + (high - low) * max(share, 0.0) ** exponent


def tempered(probs: np.ndarray, temperature: float) -> np.ndarray:
    """A distribution at another temperature."""
    if temperature <= 0:
        return np.asarray((probs == probs.max()) / (probs == probs.max()).sum())
    powers = np.where(probs > 0, (probs / probs.max()) ** (1 / temperature), 0.0)
    return np.asarray(powers / powers.sum())


def without_top(probs: np.ndarray, threshold: float, ends: tuple[int, ...] = ()) -> np.ndarray:
    """XTC where it strikes: of the tokens at or above the threshold, the least likely alone stays."""
    above = [i for i in range(len(probs)) if probs[i] >= threshold and probs[i] > 0 and i not in ends]
    result = probs.copy()
    for i in sorted(above, key=lambda i: (-probs[i], i))[:-1]:
        result[i] = 0.0
    return np.asarray(result / result.sum())


def softmax(values: np.ndarray) -> np.ndarray:
    """exp, normalised."""
    exps = np.exp(values - values.max())
    return np.asarray(exps / exps.sum())


def assert_distributed(counts: list[int], probs: np.ndarray) -> None:
    """Chi-square at one in a million, and nothing at all outside the support."""
    possible = probs > 0
    assert sum(np.array(counts)[~possible]) == 0
    if possible.sum() > 1:
        result = stats.chisquare(np.array(counts)[possible], probs[possible] * sum(counts))
        assert result.pvalue > 1e-6
