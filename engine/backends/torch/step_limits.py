"""How much of a worker's requests one step takes on: as asked for, and less where there was not the memory for it."""

from __future__ import annotations


class StepLimits:
    """max_prompts: sequences that may run at once.  step_tokens: what a step computes at most, prompts and decodes
    together.  prompts_limit: how many sequences memory has been found to allow; 0 where nothing is known.

    What memory did not allow holds until `set_max_prompts`, step_tokens also until `set_step_tokens`.
    """

    def __init__(self, max_prompts: int, step_tokens: int, page_tokens: int) -> None:
        self.max_prompts = max_prompts
        self.prompts_limit = 0
        self.step_tokens = self._full_step_tokens = step_tokens
        self._page_tokens = page_tokens

    @property
    def places(self) -> int:
        """Sequences that may run at once."""
        return min(self.max_prompts, self.prompts_limit or self.max_prompts)

    def prompt_tokens(self, decodes: int) -> int:
        """What a step with so many decodes has left for prompts."""
        return max(self.step_tokens - decodes, self._least_tokens)

    def set_max_prompts(self, max_prompts: int) -> None:
        """Admit up to this many from the next step on, and try again what memory did not allow before."""
        self.max_prompts = max_prompts
        self.prompts_limit = 0
        self.step_tokens = self._full_step_tokens

    def set_step_tokens(self, step_tokens: int) -> None:
        """The budget from the next step on; where there is not the memory for it, it is made smaller again."""
        self.step_tokens = self._full_step_tokens = step_tokens

    def halve_tokens(self) -> bool:
        """Give up half of the budget; False where none is left to give up."""
        if self.step_tokens <= self._least_tokens:
            return False
        self.step_tokens = max(self.step_tokens // 2, self._least_tokens)
        return True

    def allow(self, prompts: int) -> None:
        """No more than so many at once from now on, with the whole budget again, as it was not to blame."""
        self.prompts_limit = prompts
        self.step_tokens = self._full_step_tokens

    @property
    def _least_tokens(self) -> int:
        """Prompt tokens that a step takes on even where decodes alone use up step_tokens: prompts never starve."""
        return min(self._full_step_tokens, self._page_tokens)
