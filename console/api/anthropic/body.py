"""What /v1/messages takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from console.api.body_schema import MESSAGES
from console.api.parameters import ANTHROPIC_INERT, ANTHROPIC_REFUSED
from console.api.sampling import SamplingFields


class ConversationBody(SamplingFields):
    """A conversation to answer, or to count the tokens of.

    system: a string or text blocks.  stop_sequences: `stop` by its name here.  n: each request has one answer.
    include_stop_str_in_output: a stop sequence is told apart from the answer.
    """

    refused = ANTHROPIC_REFUSED
    inert = ANTHROPIC_INERT
    aliases: ClassVar[Mapping[str, str]] = {**SamplingFields.aliases, "stop_sequences": "stop"}

    messages: Annotated[list[Any], MESSAGES]
    system: object = None
    n: Literal[1] = 1
    include_stop_str_in_output: Literal[False] = False


class MessagesBody(ConversationBody):
    """A conversation to answer."""

    max_tokens: Annotated[int, Field(ge=1)]
