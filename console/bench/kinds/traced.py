"""Plans whose prompts and lengths may be those of a trace: what people asked, and how long the answers were."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta

from console.bench.kinds.base import Lab, Plan
from console.bench.workload import Mix
from engine.errors import InvalidRequest
from engine.simulation.lengths import TRACE, Length, fixed


class Traced(Plan, frozen=True, kw_only=True):
    """A trace is read once, before anything is measured."""

    prompt_tokens: Annotated[Length, Meta(description="tokens of a prompt; 'trace' takes the trace's")] = fixed(128)
    output_tokens: Annotated[Length, Meta(description="tokens of an answer; 'trace' takes the trace's")] = fixed(128)
    trace: Annotated[str, Meta(description="file of conversations in ShareGPT's format")] = ""

    @classmethod
    def implied(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Plan: a trace is there to be taken."""
        return {"prompt_tokens": TRACE, "output_tokens": TRACE} if given.get("trace") else {}

    async def prepare(self, lab: Lab) -> None:
        """Plan: the trace, where there is one."""
        if self.trace:
            await lab.read(self.trace)

    def mix(self, lab: Lab) -> Mix:
        """Plan."""
        return Mix(prompt=self.prompt_tokens, output=self.output_tokens, trace=lab.trace(self.trace))

    def check(self) -> None:
        """Plan: a trace and lengths of it come together."""
        takes = "trace" in (self.prompt_tokens.kind, self.output_tokens.kind)
        if takes != bool(self.trace):
            if takes:
                raise InvalidRequest("lengths of a trace need a trace: a file of conversations", param="trace")
            raise InvalidRequest("a trace is given for lengths, and none is 'trace'", param="trace")
