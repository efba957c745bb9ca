"""Drawing one token per row from [R, V] logits: filters, and noise that is a function of (seed, position) alone.

top_k, top_p, top_a and min_p each keep a prefix of the tokens sorted best first, so a row that uses one of them rarely
needs the whole vocabulary sorted: the best few hundred are looked at, and all only where those do not do. That is why
these four are here, in one piece with the draw; any other sampler is a file of engine/samplers/, or needs the draw's
random numbers (XTC) or its temperature.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.backends.sampling.sampling_tensors import OFF, SamplingTensors
from engine.samplers import Stage

# Filters of all that remains of a distribution: [R, W] probabilities, best first, 0 where excluded, which need not add
# up to 1, neither before nor after.

UNDECIDED = -2
"""In place of a token for which more of the best tokens have to be looked at."""

_TINY = 1e-300  # a temperature at which the best token alone is left, yet nothing is divided by 0


def entropy_temperature(probs: Tensor, low: Tensor, high: Tensor, exponent: Tensor) -> Tensor:
    """Dynamic temperature (kalomaze 2023, "entropy sampling"): between `low` where one token has all the probability
    and `high` where the tokens left are equally likely, [R, 1]; the share of the greatest entropy, to the power of
    `exponent`, says where between."""
    probs = probs / probs.sum(dim=-1, keepdim=True)
    entropy = -torch.xlogy(probs, probs).sum(dim=-1, keepdim=True)
    greatest = (probs > 0).sum(dim=-1, keepdim=True).double().log()
    share = torch.where(greatest > 0, entropy / greatest, 0.0).clamp(0.0, 1.0)
    return (low + (high - low) * share**exponent).clamp(min=_TINY)


def exclude_top_choices(probs: Tensor, ids: Tensor, threshold: Tensor, ends: Tensor) -> Tensor:
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
    distances = logits.double().sub_(logits.amax(dim=-1, keepdim=True))
    return _invert(distances.div_(temperature).exp_(), noise).squeeze(1)


def draw_filtered(logits: Tensor, batch: SamplingTensors, *, wait: bool = True) -> Tensor:
    """A token of each row: [R, V] float32 logits -> [R] ids. Without `wait`, where that would wait for the device, a
    row of which `batch.width` tokens do not suffice is UNDECIDED.

    In this order, ExLlamaV2's, each on what the one before left, renormalised, the filters each keeping at least one
    token: engine/samplers/ on logits and on distances; temperature; top_k most likely; top_p, the fewest most likely
    with that mass together (nucleus, Holtzman et al. 2020); top_a, those with at least top_a times the square of the
    best one's probability (BlinkDL 2022, RWKV); min_p, those with that share of the best one's probability (Nguyen et
    al. 2024); engine/samplers/ on probabilities; dynamic temperature or, with temperature_last, the temperature; XTC.
    """
    return _draw_filtered(_apply_samplers("logits", logits, batch), batch, wait=wait)


def _draw_filtered(logits: Tensor, batch: SamplingTensors, *, wait: bool = True) -> Tensor:
    """Draw among as few of the best tokens as will do."""
    tokens, done = _draw_among(logits, batch, batch.width)
    if not batch.suffices and not wait:
        return tokens.where(done, UNDECIDED)
    if not batch.suffices and not bool(done.all()):  # waits for the device
        rest = (~done).nonzero().squeeze(1)
        tokens[rest] = _draw_filtered(logits[rest], batch.wider(rest, logits.shape[1]))
    return tokens


def _draw_among(logits: Tensor, batch: SamplingTensors, width: int) -> tuple[Tensor, Tensor]:
    """Draw among the `width` best tokens: [R] ids, and [R] whether no token outside could have been drawn."""
    ids = rank(logits, width)
    top = logits.gather(1, ids)
    peak = top[:, :1]
    top = _shape(top, peak, batch)
    keep = torch.arange(width, device=logits.device) < batch.top_k
    log_mass = top.masked_fill(~keep, -torch.inf).logsumexp(dim=-1, keepdim=True)
    beyond = batch.top_k > width
    if width < batch.largest_k:
        everything = _shape(logits, peak, batch).exp_().sum(dim=-1, keepdim=True).log()
        log_mass = torch.where(beyond, everything, log_mass)
    probs = (top - log_mass).exp()
    keep, done = _prefix(probs, keep, ~beyond, batch)
    probs = _reshape(probs * keep, batch)
    if batch.xtc_threshold is not None and batch.ends is not None:
        probs = exclude_top_choices(probs, ids, batch.xtc_threshold, batch.ends)
    return ids.gather(1, _invert(probs, batch.noise)).squeeze(1), done.squeeze(1)


def _prefix(probs: Tensor, keep: Tensor, whole: Tensor, batch: SamplingTensors) -> tuple[Tensor, Tensor]:
    """Return the tokens of `keep` [R, W] that top_p, top_a and min_p leave, and whether they leave no others, [R, 1].

    probs: sorted, normalised over all that top_k left, of which these are all where `whole`.
    """
    keep = keep & (probs.cumsum(dim=-1) - probs < batch.top_p)
    complete = torch.ones_like(whole)
    if batch.top_a is not None:
        cut = batch.top_p < OFF
        mass = torch.where(cut, (probs * keep).sum(dim=-1, keepdim=True), 1.0)
        complete = whole | ~cut | (batch.top_a == 0) | ~keep[:, -1:]  # whether that is all the mass that top_p left
        keep = keep & (probs * mass >= batch.top_a * probs[:, :1] ** 2)
    keep = keep & (probs >= batch.min_p * probs[:, :1])
    return keep, complete & (whole | ~keep[:, -1:])


def _reshape(probs: Tensor, batch: SamplingTensors) -> Tensor:
    """Return `probs` [R, W], not normalised, 0 where excluded, after all that looks at the whole distribution."""
    probs = _apply_samplers("probabilities", probs, batch)
    if batch.max_temp is not None and batch.min_temp is not None and batch.temp_exponent is not None:
        temperature = entropy_temperature(probs, batch.min_temp, batch.max_temp, batch.temp_exponent)
        fixed = 1.0 if batch.last_temperature is None else batch.last_temperature
        temperature = torch.where(batch.max_temp > 0, temperature, fixed)
    elif batch.last_temperature is not None:
        temperature = batch.last_temperature
    else:
        return probs
    best = probs.amax(dim=-1, keepdim=True)
    return ((probs / best).log() / temperature).exp()


def _shape(logits: Tensor, peak: Tensor, batch: SamplingTensors) -> Tensor:
    """Return distances from the peak, after the samplers that work on them, over the temperature.

    In float64: never NaN, however small the temperature, and 0 at the peak.
    """
    return _apply_samplers("distances", logits.double().sub_(peak), batch).div_(batch.temperature)


def _apply_samplers(on: Stage, values: Tensor, batch: SamplingTensors) -> Tensor:
    """Return the values after the samplers that work on those."""
    for each in batch.samplers:
        if each.sampler.on == on:
            values = each.apply(values)
    return values


def _invert(weights: Tensor, noise: Tensor) -> Tensor:
    """The index at which the running sum of [R, W] weights passes the share `noise` of it: [R, 1]."""
    mass = weights.cumsum(dim=-1)
    index = torch.searchsorted(mass, noise * mass[:, -1:], right=True)
    return index.clamp(max=weights.shape[1] - 1)
