"""Which worker a request goes to: where its prefix is cached, when that saves more than it waits."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engine.dispatch.step_cost import StepPrice


class Slot(msgspec.Struct, kw_only=True):
    """A worker that takes requests: how many it works on and how many it may."""

    worker: str
    active: int
    max_prompts: int

    @property
    def free(self) -> int:
        """Requests it can take now; 0 if it has more than it may."""
        return max(0, self.max_prompts - self.active)


class Offer(msgspec.Struct, frozen=True, gc=False):
    """What a worker can do for a request; made for every worker and request, so cheaply. cached_tokens: of its prompt,
    in the worker's pages; pending_tokens: of other prompts, which the worker computes first; price: what its steps
    cost."""

    slot: Slot
    cached_tokens: int
    pending_tokens: int
    price: StepPrice


def cost_s(offer: Offer, tokens: int, answer_tokens: float) -> float:
    """Seconds that a request of `tokens` tokens, of which an answer of `answer_tokens` is expected, costs there:

        waits     (pending + tokens - cached) * prompt_token_s            until its prompt is computed
        delays    (tokens - cached) * prompt_token_s                      by which others get theirs later
        answers   answer_tokens * (fixed_s + (active + 1) * answer_s)     its share of a crowded batch

    So of two equally fast workers the one that holds s tokens more of the prompt gets it as long as

        2 * s * prompt_token_s > (pending there - pending here) * prompt_token_s
                                 + answer_tokens * (active there - active here) * answer_s
    """
    price = offer.price
    own = tokens - offer.cached_tokens
    waits_and_delays_s = (offer.pending_tokens + 2 * own) * price.prompt_token_s
    return waits_and_delays_s + answer_tokens * (price.fixed_s + (offer.slot.active + 1) * price.answer_s)


def choose(offers: Sequence[Offer], tokens: int, answer_tokens: float) -> Offer:
    """The cheapest of the offers, one at least; of equally cheap ones the least busy, then the first."""
    return min(offers, key=lambda offer: (cost_s(offer, tokens, answer_tokens), offer.slot.active))


def may_wait(offers: Sequence[Offer], chosen: Offer) -> bool:
    """Whether a request had better let another one go before it: a worker without a free place holds so much more of
    its prompt than the `chosen` one that computing it costs more than a step, the least that being overtaken takes."""
    price = chosen.price
    step_s = price.fixed_s + chosen.slot.active * price.answer_s
    held = max(offer.cached_tokens for offer in offers if offer is chosen or not offer.slot.free)
    return 2 * (held - chosen.cached_tokens) * price.prompt_token_s > step_s
