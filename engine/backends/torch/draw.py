"""Drawing one token per row from [R, V] logits: filters, and noise that is a function of (seed, position) alone.

top_k, top_p and min_p each keep a prefix of the tokens sorted best first, so a row that uses one of them rarely
needs the whole vocabulary sorted: the best few hundred are looked at, and all of them only where those do not do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.config import SamplingParams

FIRST_LOOK = 256
"""How many of the best tokens are looked at before the whole vocabulary is sorted."""

_MASK64 = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_OFF = 2.0  # a probability mass that no sum of probabilities reaches


def uniform(seed: int, position: int) -> float:
    """A number in (0, 1), never its ends, that is a function of (seed, position) alone: the position-th output of
    SplitMix64 (Steele, Lea, Flood 2014), started from the mixed seed so that close seeds are unrelated."""
    bits = _mix((_mix(seed & _MASK64) + position * _GOLDEN) & _MASK64)
    return ((bits >> 12) + 0.5) * 2.0**-52


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


@dataclass(frozen=True, slots=True)
class Knobs:
    """Sampling knobs of R rows, each [R, 1] float64, top_k int64; what is off has a value that keeps everything.

    largest_k: the largest top_k of all.      width: how many of the best tokens of each row to look at.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    typical_p: Tensor
    noise: Tensor
    any_typical: bool
    largest_k: int
    width: int

    @classmethod
    def of(cls, params: Sequence[SamplingParams], noise: Sequence[float], vocab: int, device: torch.device) -> Knobs:
        """The knobs of rows with these parameters and one uniform number each."""

        def column(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float64).to(device).unsqueeze(1)

        top_k = [min(p.top_k, vocab) or vocab for p in params]
        bounded = [min(FIRST_LOOK, vocab) if p.top_p < 1 or p.min_p > 0 else vocab for p in params]
        return cls(
            temperature=column([p.temperature for p in params]),
            top_k=torch.tensor(top_k).to(device).unsqueeze(1),
            top_p=column([p.top_p if p.top_p < 1 else _OFF for p in params]),
            min_p=column([p.min_p for p in params]),
            typical_p=column([p.typical_p if p.typical_p < 1 else _OFF for p in params]),
            noise=column(noise),
            any_typical=any(p.typical_p < 1 for p in params),
            largest_k=max(top_k),
            width=max(map(min, top_k, bounded)),
        )

    def wider(self, rows: Tensor, vocab: int) -> Knobs:
        """The knobs of those rows, for which `width` was not enough."""
        return replace(
            self,
            temperature=self.temperature[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            min_p=self.min_p[rows],
            typical_p=self.typical_p[rows],
            noise=self.noise[rows],
            width=min(self.width * 16, vocab),
        )


def rank(logits: Tensor, width: int) -> Tensor:
    """Ids of the `width` best tokens of each row of [R, V] float32 logits, best first, the lowest id first among
    equals: [R, width]. Sorting by (logit, id) as one integer makes the order exact whatever else is in the batch."""
    vocab = logits.shape[1]
    bits = (logits + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0
    bits ^= (bits >> 31) & 0x7FFFFFFF
    keys = bits.to(torch.int64)
    keys <<= 32
    keys |= torch.arange(vocab - 1, -1, -1, device=logits.device)
    best = keys.topk(width, dim=-1).values
    return vocab - 1 - (best & 0xFFFFFFFF)


def draw_plain(logits: Tensor, temperature: Tensor, noise: Tensor) -> Tensor:
    """A token of each row by temperature alone: [R, V] logits, [R, 1] temperature and noise -> [R] ids."""
    scaled = _scaled(logits, logits.amax(dim=-1, keepdim=True), temperature)
    return _invert(scaled.exp_(), noise).squeeze(1)


def draw_filtered(logits: Tensor, knobs: Knobs) -> Tensor:
    """A token of each row: [R, V] float32 logits -> [R] ids.

    In this order, each on what the one before left, renormalised, each keeping at least one token: temperature;
    top_k most likely; top_p, the fewest most likely with that mass together (nucleus, Holtzman et al. 2020); min_p,
    those with that share of the best one's probability (Nguyen et al. 2024); typical_p, the fewest with that mass
    whose surprise is closest to the entropy (locally typical, Meister et al. 2023).
    """
    tokens, done = _draw_among(logits, knobs, knobs.width)
    if not bool(done.all()):
        rest = (~done).nonzero().squeeze(1)
        tokens[rest] = draw_filtered(logits[rest], knobs.wider(rest, logits.shape[1]))
    return tokens


def _draw_among(logits: Tensor, knobs: Knobs, width: int) -> tuple[Tensor, Tensor]:
    """Draw among the `width` best tokens: [R] ids, and [R] whether no token outside could have been kept."""
    ids = rank(logits, width)
    top = logits.gather(1, ids)
    peak = top[:, :1]
    top = _scaled(top, peak, knobs.temperature)
    keep = torch.arange(width, device=logits.device) < knobs.top_k
    log_mass = top.masked_fill(~keep, -torch.inf).logsumexp(dim=-1, keepdim=True)
    beyond = knobs.top_k > width
    if width < knobs.largest_k:
        everything = _scaled(logits, peak, knobs.temperature).exp_().sum(dim=-1, keepdim=True).log()
        log_mass = torch.where(beyond, everything, log_mass)
    probs = (top - log_mass).exp()
    keep &= probs.cumsum(dim=-1) - probs < knobs.top_p
    keep &= probs >= knobs.min_p * probs[:, :1]
    done = ~beyond.squeeze(1) | ~keep[:, -1]
    probs = probs * keep
    if knobs.any_typical:
        probs = _typical(probs, knobs.typical_p)
    return ids.gather(1, _invert(probs, knobs.noise)).squeeze(1), done


def _scaled(logits: Tensor, peak: Tensor, temperature: Tensor) -> Tensor:
    """(logits - peak) / temperature in float64: never NaN, however small the temperature, and 0 at the peak."""
    return logits.double().sub_(peak).div_(temperature)


def _typical(probs: Tensor, typical_p: Tensor) -> Tensor:
    """`probs` [R, W], not normalised, with all but the locally typical ones set to 0."""
    probs = probs / probs.sum(dim=-1, keepdim=True)
    surprise = -probs.log()
    entropy = -torch.xlogy(probs, probs).sum(dim=-1, keepdim=True)
    order = (surprise - entropy).abs().argsort(dim=-1, stable=True)
    ordered = probs.gather(1, order)
    kept = ordered * (ordered.cumsum(dim=-1) - ordered < typical_p)
    return torch.zeros_like(probs).scatter(1, order, kept)


def _invert(weights: Tensor, noise: Tensor) -> Tensor:
    """The index at which the running sum of [R, W] weights passes the share `noise` of it: [R, 1]."""
    mass = weights.cumsum(dim=-1)
    index = torch.searchsorted(mass, noise * mass[:, -1:], right=True)
    return index.clamp(max=weights.shape[1] - 1)
