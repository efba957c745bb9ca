"""Drawing one token per row from [R, V] logits: filters, and noise that is a function of (seed, position) alone.

top_k, top_p, top_a, min_p and tfs each keep a prefix of the tokens sorted best first, so a row that uses one of them
rarely needs the whole vocabulary sorted: the best few hundred are looked at, and all only where those do not do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.backends.torch.sampling.sampling_tensors import OFF, SamplingTensors

# Filters that need all that is left of a distribution: [R, W] probabilities, best first, 0 where left out.
#
# They need not add up to 1, neither before nor after.

_TINY = 1e-300  # a temperature at which the best token alone is left, yet nothing is divided by 0


def tail_free(probs: Tensor, tfs: Tensor) -> Tensor:
    """Tail free sampling (Bricken 2019): the tokens up to where the absolute second differences of the sorted
    probabilities have the share `tfs` of their sum; `tfs` more than 1 is off.

    Two tokens and equal probabilities have no tail, and stay.
    """
    left = (probs > 0).sum(dim=-1, keepdim=True)
    if probs.shape[1] < 3:
        return probs
    bends = probs.diff(n=2, dim=-1).abs()
    bends = bends * (torch.arange(bends.shape[1], device=probs.device) < left - 2)
    total = bends.sum(dim=-1, keepdim=True)
    within = (bends.cumsum(dim=-1) <= tfs * total).sum(dim=-1, keepdim=True)
    kept = torch.where((left < 3) | (total == 0) | (tfs > 1), left, 1 + within)
    return probs * (torch.arange(probs.shape[1], device=probs.device) < kept)


def typical(probs: Tensor, typical_p: Tensor) -> Tensor:
    """The fewest tokens with the mass typical_p whose surprise is closest to the entropy (locally typical, Meister
    et al. 2023)."""
    probs = probs / probs.sum(dim=-1, keepdim=True)
    surprise = -probs.log()
    entropy = -torch.xlogy(probs, probs).sum(dim=-1, keepdim=True)
    order = (surprise - entropy).abs().argsort(dim=-1, stable=True)
    ordered = probs.gather(1, order)
    kept = ordered * (ordered.cumsum(dim=-1) - ordered < typical_p)
    return torch.zeros_like(probs).scatter(1, order, kept)


def entropy_tempered(probs: Tensor, low: Tensor, high: Tensor, exponent: Tensor) -> Tensor:
    """Dynamic temperature (kalomaze 2023, "entropy sampling"): between `low` where one token has all the probability
    and `high` where the tokens left are equally likely, [R, 1]; the share of the greatest entropy, to the power of
    `exponent`, says where between."""
    probs = probs / probs.sum(dim=-1, keepdim=True)
    entropy = -torch.xlogy(probs, probs).sum(dim=-1, keepdim=True)
    greatest = (probs > 0).sum(dim=-1, keepdim=True).double().log()
    share = torch.where(greatest > 0, entropy / greatest, 0.0).clamp(0.0, 1.0)
    return (low + (high - low) * share**exponent).clamp(min=_TINY)


def without_top_choices(probs: Tensor, ids: Tensor, threshold: Tensor, ends: Tensor) -> Tensor:
    """XTC, "exclude top choices" (p-e-w, text-generation-webui, pull request 6335, 2024), for rows whose coin fell so:
    of the tokens with at least the probability `threshold`, all but the least likely are left out.

    ids: the tokens [R, W].  ends: [R, E] ids that take no part, so that an answer can end.
    """
    probs = probs / probs.sum(dim=-1, keepdim=True)
    above = (probs > 0) & (probs >= threshold)
    for end in ends.unbind(dim=1):
        above &= ids != end.unsqueeze(1)
    last = above.sum(dim=-1, keepdim=True)
    return probs.masked_fill(above & (above.cumsum(dim=-1) < last), 0.0)


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


def draw_filtered(logits: Tensor, knobs: SamplingTensors) -> Tensor:
    """A token of each row: [R, V] float32 logits -> [R] ids.

    In this order, ExLlamaV2's, each on what the one before left, renormalised, the filters each keeping at least one
    token: smoothing, which takes the square of a logit's distance from the best one times smoothing_factor for that
    distance (kalomaze 2023, "quadratic sampling"); temperature; top_k most likely; top_p, the fewest most likely with
    that mass together (nucleus, Holtzman et al. 2020); top_a, those with at least top_a times the square of the best
    one's probability (BlinkDL 2022, RWKV); min_p, those with that share of the best one's probability (Nguyen et al.
    2024); tfs and typical_p; dynamic temperature or, with temperature_last, the temperature; XTC (see `filters`).
    """
    tokens, done = _draw_among(logits, knobs, knobs.width)
    if knobs.width < knobs.largest_k and not bool(done.all()):  # waits for the device
        rest = (~done).nonzero().squeeze(1)
        tokens[rest] = draw_filtered(logits[rest], knobs.wider(rest, logits.shape[1]))
    return tokens


def _draw_among(logits: Tensor, knobs: SamplingTensors, width: int) -> tuple[Tensor, Tensor]:
    """Draw among the `width` best tokens: [R] ids, and [R] whether no token outside could have been kept."""
    ids = rank(logits, width)
    top = logits.gather(1, ids)
    peak = top[:, :1]
    top = _shaped(top, peak, knobs)
    keep = torch.arange(width, device=logits.device) < knobs.top_k
    log_mass = top.masked_fill(~keep, -torch.inf).logsumexp(dim=-1, keepdim=True)
    beyond = knobs.top_k > width
    if width < knobs.largest_k:
        everything = _shaped(logits, peak, knobs).exp_().sum(dim=-1, keepdim=True).log()
        log_mass = torch.where(beyond, everything, log_mass)
    probs = (top - log_mass).exp()
    keep, done = _prefix(probs, keep, ~beyond, knobs)
    probs = _reshaped(probs * keep, knobs)
    if knobs.xtc_threshold is not None and knobs.ends is not None:
        probs = without_top_choices(probs, ids, knobs.xtc_threshold, knobs.ends)
    return ids.gather(1, _invert(probs, knobs.noise)).squeeze(1), done.squeeze(1)


def _prefix(probs: Tensor, keep: Tensor, whole: Tensor, knobs: SamplingTensors) -> tuple[Tensor, Tensor]:
    """What top_p, top_a and min_p leave of `keep` [R, W], and whether that is all that they leave, [R, 1].

    probs: sorted, normalised over all that top_k left, of which these are all where `whole`.
    """
    keep = keep & (probs.cumsum(dim=-1) - probs < knobs.top_p)
    known = torch.ones_like(whole)
    if knobs.top_a is not None:
        cut = knobs.top_p < OFF
        mass = torch.where(cut, (probs * keep).sum(dim=-1, keepdim=True), 1.0)
        known = whole | ~cut | (knobs.top_a == 0) | ~keep[:, -1:]  # whether that is all the mass that top_p left
        keep = keep & (probs * mass >= knobs.top_a * probs[:, :1] ** 2)
    keep = keep & (probs >= knobs.min_p * probs[:, :1])
    return keep, known & (whole | ~keep[:, -1:])


def _reshaped(probs: Tensor, knobs: SamplingTensors) -> Tensor:
    """`probs` [R, W], not normalised, 0 where left out, after the filters that look at all that is left."""
    if knobs.tfs is not None:
        probs = tail_free(probs, knobs.tfs)
    if knobs.typical_p is not None:
        probs = typical(probs, knobs.typical_p)
    if knobs.last_temperature is None:
        return probs
    temperature = knobs.last_temperature
    if knobs.max_temp is not None and knobs.min_temp is not None and knobs.temp_exponent is not None:
        tempered = entropy_tempered(probs, knobs.min_temp, knobs.max_temp, knobs.temp_exponent)
        temperature = torch.where(knobs.max_temp > 0, tempered, temperature)
    best = probs.amax(dim=-1, keepdim=True)
    return ((probs / best).log() / temperature).exp()


def _shaped(logits: Tensor, peak: Tensor, knobs: SamplingTensors) -> Tensor:
    """`_scaled`, after smoothing where a row asks for it."""
    if knobs.smoothing is None:
        return _scaled(logits, peak, knobs.temperature)
    below = logits.double().sub_(peak)
    below = torch.where(knobs.smoothing > 0, -knobs.smoothing * below.square(), below)
    return below.div_(knobs.temperature)


def _scaled(logits: Tensor, peak: Tensor, temperature: Tensor) -> Tensor:
    """(logits - peak) / temperature in float64: never NaN, however small the temperature, and 0 at the peak."""
    return logits.double().sub_(peak).div_(temperature)


def _invert(weights: Tensor, noise: Tensor) -> Tensor:
    """The index at which the running sum of [R, W] weights passes the share `noise` of it: [R, 1]."""
    mass = weights.cumsum(dim=-1)
    index = torch.searchsorted(mass, noise * mass[:, -1:], right=True)
    return index.clamp(max=weights.shape[1] - 1)
