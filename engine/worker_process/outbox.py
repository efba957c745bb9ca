"""Outputs of steps that were not sent to the engine yet."""

from __future__ import annotations

from dataclasses import dataclass

from engine.worker_process.protocol import RequestOutput

MAX_INTERVAL_S = 1 / 40
"""The most time whose steps are sent together: a stream still flows. Longer steps are sent one by one."""
MESSAGES_PER_S = 640
"""Outputs sent in a second, as long as that takes intervals of no more than MAX_INTERVAL_S."""
MIN_BATCHED_REQUESTS = 8
_RECENT_SHARE = 0.1


@dataclass(slots=True)
class StepResult:
    """Work since the last batch: steps, their seconds, and tokens that continued an answer."""

    steps: int = 0
    seconds: float = 0.0
    answers: int = 0


class Outbox:
    """Outputs by request id until they are sent.

    Every message costs the engine a wake-up for each reader in it, on the very cores that a CPU worker computes on. So
    while many answers continue at once in short steps, outputs of several steps go together: of the more time the more
    answers there are, and of no more than MAX_INTERVAL_S, where the next one takes as long as the last one or, if that
    is longer, as recent ones on average. The first token of an answer and the last one go at once, before the others.

    The time between two tokens is that between the ends of their steps, however late they are sent; several tokens of
    one step share the time since those before.
    done: work since the last batch.  has_delayed: True if outputs of earlier steps wait for more.
    """

    def __init__(self) -> None:
        self.done = StepResult()
        self._outputs: dict[str, RequestOutput] = {}
        self._num_timed: dict[str, int] = {}  # tokens of each output whose step is over
        self._last_token_s: dict[str, float] = {}
        self._since_s = 0.0
        self._usual_step_s = 0.0
        self.has_delayed = False

    def output_of(self, request_id: str) -> RequestOutput:
        """Return the output of a request so far, to be added to."""
        output = self._outputs.get(request_id)
        if output is None:
            output = self._outputs[request_id] = RequestOutput(request_id=request_id)
        return output

    def drop(self, request_id: str) -> None:
        """Send nothing more for a request."""
        self._outputs.pop(request_id, None)
        self._num_timed.pop(request_id, None)
        self._last_token_s.pop(request_id, None)

    def stepped(self, began_s: float, ended_s: float, answers: int, steps: int = 1) -> bool:
        """Count a step from `began_s` to `ended_s`, on the worker's clock, that continued `answers` answers; return
        whether something is to be sent now. steps: as many alike, of which `answers` is the sum."""
        if not self.has_delayed:
            self._since_s = began_s
        step_s = (ended_s - began_s) / steps
        counted_s = min(step_s, MAX_INTERVAL_S)
        usual_s = self._usual_step_s or counted_s
        self._usual_step_s = usual_s + _RECENT_SHARE * (counted_s - usual_s)
        self.done.steps += steps
        self.done.seconds += ended_s - began_s
        self.done.answers += answers
        for request_id, output in self._outputs.items():
            if new := len(output.token_ids) - self._num_timed.get(request_id, 0):
                last_s = self._last_token_s.get(request_id)
                if last_s is not None:
                    output.gaps += [(ended_s - last_s) / new] * new
                self._last_token_s[request_id] = ended_s
                self._num_timed[request_id] = len(output.token_ids)
        waiting = len(self._outputs)
        until_s = self._since_s + min(MAX_INTERVAL_S, waiting / MESSAGES_PER_S)
        next_s = max(step_s, self._usual_step_s)
        self.has_delayed = waiting >= MIN_BATCHED_REQUESTS and ended_s + next_s <= until_s
        return not self.has_delayed or any(output.is_urgent for output in self._outputs.values())

    def take(self, *, everything: bool = True) -> list[RequestOutput]:
        """Take out the outputs to send, only the urgent ones of those that are delayed unless `everything`; start
        counting work again."""
        self.done = StepResult()
        outputs = self._outputs
        if self.has_delayed and not everything:
            outputs = {request_id: output for request_id, output in outputs.items() if output.is_urgent}
            for request_id in outputs:
                del self._outputs[request_id]
                self._num_timed.pop(request_id, None)
        else:
            self._outputs, self._num_timed, self.has_delayed = {}, {}, False
        for request_id, output in outputs.items():
            if output.finish is not None:
                self._last_token_s.pop(request_id, None)
        return [output for output in outputs.values() if not output.is_empty]
