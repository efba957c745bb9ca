"""What steps take, entered into the accounts of the devices before they are computed."""

from __future__ import annotations

from dataclasses import replace

from engine.backends.torch.kv_format import HeadFormat
from engine.backends.torch.layout import Layout
from engine.backends.torch.model_config import ModelConfig
from engine.backends.torch.step_memory import step_bytes, told_at_once
from engine.backends.torch.step_plan import StepPlan


class StepAccount:
    """The steps of a model of `config`, laid out as `layout` says, over pages of `page_tokens` that keep `heads`."""

    def __init__(self, config: ModelConfig, heads: HeadFormat, layout: Layout, page_tokens: int) -> None:
        self._config, self._heads, self._layout, self._page_tokens = config, heads, layout, page_tokens
        self._most_sampled = 0

    def enter(self, plan: StepPlan, *, fused: bool, kept_bytes: int) -> int:
        """Note what a step needs; how many of its states can be told of at once. fused: whether its blocks are.
        kept_bytes: what is kept on each device besides.

        Raises StepOutOfMemory where a device is known to have too little left for it.
        """
        self._most_sampled = max(self._most_sampled, len(plan.sampled_rows))
        most_told = told_at_once(self._most_sampled)
        sizes = plan.sizes(self._page_tokens, copies_runs=self._heads.coded, most_told=most_told)
        sizes = replace(sizes, fused=fused and not plan.adapted)
        for span in self._layout.spans:
            layers, head = bool(span.layers), span.memory is self._layout.last
            needed_bytes = step_bytes(self._config, sizes, self._heads, layers=layers, head=head)
            span.memory.begin_step(needed_bytes + kept_bytes)
        return most_told
