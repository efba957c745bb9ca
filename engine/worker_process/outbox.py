"""Outputs of steps that were not sent to the engine yet."""

from __future__ import annotations

from dataclasses import dataclass

from engine.worker_process.protocol import RequestOutput

MAX_DELAY_S = 1 / 20
"""An eye sees no text grow faster."""
MESSAGES_PER_S = 640
"""Outputs sent in a second as long as none of them is delayed for longer than MAX_DELAY_S."""
MIN_BATCHED_REQUESTS = 8
MAX_BATCHED_STEP_S = 1 / 50
"""Steps that take longer are sent one by one: bunches of their tokens would show."""
_RECENT_SHARE = 0.1
_MAX_OUTLIER = 2.0


@dataclass(slots=True)
class StepResult:
    """Work since the last batch: steps, their seconds, and tokens that continued an answer."""

    steps: int = 0
    seconds: float = 0.0
    answers: int = 0


class Outbox:
    """Outputs by request id until they are sent.

    Every message costs the engine a wake-up for each reader in it, on the very cores that a CPU worker computes on. So
    while many answers continue at once in steps of up to MAX_BATCHED_STEP_S, outputs of several steps go together: the
    more answers, the longer, and none for longer than MAX_DELAY_S, as far as the last step predicts how long the next
    one takes. The first token of an answer and the last one go at once, before the others. Where recent steps took
    longer on average, a shorter one among them is sent by itself too.

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
        self._usual_step_s = MAX_BATCHED_STEP_S
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
            self._since_s = ended_s
        step_s = (ended_s - began_s) / steps
        counted_s = min(step_s, _MAX_OUTLIER * self._usual_step_s)
        self._usual_step_s += _RECENT_SHARE * (counted_s - self._usual_step_s)
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
        until_s = self._since_s + min(MAX_DELAY_S, waiting / MESSAGES_PER_S)
        is_batched = waiting >= MIN_BATCHED_REQUESTS and max(step_s, self._usual_step_s) <= MAX_BATCHED_STEP_S
        self.has_delayed = is_batched and ended_s + step_s <= until_s
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
