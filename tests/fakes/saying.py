"""A reply for FakeBackend that says, word for word, what a test wants said to a question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tests.fakes.model import EOS_ID


class Script:
    """Answers by the last question of the fake model's chat template; whoever asks something else hears it again.

    answers: what is said to each question, one after the other where there are several, the last for ever.
    """

    def __init__(self, answers: Mapping[str, str | Sequence[str]]) -> None:
        self.prompts: list[str] = []
        self._answers = {ask: [said] if isinstance(said, str) else list(said) for ask, said in answers.items()}
        self._under_way: dict[int, bytes] = {}

    def __call__(self, prompt_ids: Sequence[int], index: int) -> int:
        if index == 0 or id(prompt_ids) not in self._under_way:
            prompt = bytes(prompt_ids).decode()
            self.prompts.append(prompt)
            self._under_way[id(prompt_ids)] = self._next(prompt).encode()
        said = self._under_way[id(prompt_ids)]
        return said[index] if index < len(said) else EOS_ID

    def _next(self, prompt: str) -> str:
        question = prompt.rpartition("user: ")[2].removesuffix("\nassistant: ")
        left = self._answers.get(question, [question])
        return left.pop(0) if len(left) > 1 else left[0]
