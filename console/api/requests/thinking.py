"""Thinking as clients ask for it: whether the model thinks before its answer, how hard, and for how many tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from console.api.requests.prompts import Prompt
from console.api.requests.served_model import ServedModel
from engine.config import SamplingParams
from engine.errors import InvalidRequest
from engine.text.thinking import format_of, template_variables, with_thinking

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

EFFORT_TOKENS: Mapping[str, int] = MappingProxyType({"minimal": 256, "low": 1024, "medium": 4096})
"""Budgets of efforts for models whose chat template has none; of higher ones there is no limit."""

_EFFORT = "reasoning_effort"


@dataclass(frozen=True, slots=True)
class ThinkingOptions:
    """A client's wishes for the thinking. enabled: None leaves it to the model.  effort: "" leaves it to the model.
    budget: most tokens of thinking.  names: the client's names of effort and budget, for errors.
    default_effort: the effort that asks for nothing in this dialect.
    """

    enabled: bool | None = None
    effort: Effort | Literal[""] = ""
    budget: int | None = None
    names: tuple[str, str] = (_EFFORT, "thinking_token_budget")
    default_effort: Effort | Literal[""] = ""

    @property
    def is_off(self) -> bool:
        """True if the answer is to begin at once."""
        return self.enabled is False or self.effort == "none" or (self.enabled is None and self.budget == 0)

    def variables(self, model: ServedModel) -> dict[str, object]:
        """Return the variables of the model's chat template that say so, as models name them."""
        found: dict[str, object] = {}
        if self.is_off:
            found = template_variables(False)
        elif self.enabled or self.effort:
            found = template_variables(True)
        if self.effort and model.tokenizer.template_uses(_EFFORT):
            found[_EFFORT] = self.effort
        return found

    def apply_to(self, params: SamplingParams, model: ServedModel, prompt: Prompt) -> SamplingParams:
        """Return the parameters of an answer whose thinking is kept apart.

        Raises InvalidRequest for an effort or a budget of a model that does not think.
        """
        found = format_of(model.tokenizer, model.thinking)
        if found is None:
            asks_for_effort = self.effort not in ("", self.default_effort) and not self.is_off
            if self.budget or (asks_for_effort and not model.tokenizer.template_uses(_EFFORT)):
                name = self.names[1 if self.budget else 0]
                raise InvalidRequest(f"{name} is not supported: {model.name} does not think", param=name)
            return params
        budget = self.budget
        if self.is_off:
            budget = 0
        elif budget is None and not model.tokenizer.template_uses(_EFFORT):
            budget = EFFORT_TOKENS.get(self.effort)
        return with_thinking(found, params, model.tokenizer, prompt.text, begun=prompt.begun, budget=budget)
