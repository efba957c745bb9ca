"""Conversations: trees of turns in one SQLite file, worked on without a screen."""

from console.chats.conversation import Branch, OpenChat
from console.chats.records import Beside, ChatSettings, Conversation, Preset, Tree, Turn, TurnNote
from console.chats.store import ChatStore, ChatStoreError

__all__ = [
    "Beside",
    "Branch",
    "ChatSettings",
    "ChatStore",
    "ChatStoreError",
    "Conversation",
    "OpenChat",
    "Preset",
    "Tree",
    "Turn",
    "TurnNote",
]
