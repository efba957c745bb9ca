"""Conversations: trees of turns in one SQLite file, worked on without a screen."""

from console.chats.conversation import Branch, OpenChat
from console.chats.records import ChatSettings, Conversation, Preset, SecondBranch, Tree, Turn, TurnNote
from console.chats.store import ChatStore, ChatStoreError

__all__ = [
    "Branch",
    "ChatSettings",
    "ChatStore",
    "ChatStoreError",
    "Conversation",
    "OpenChat",
    "Preset",
    "SecondBranch",
    "Tree",
    "Turn",
    "TurnNote",
]
