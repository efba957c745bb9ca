"""Conversations: trees of turns in one SQLite file, worked on without a screen."""

from console.chats.kept import Beside, ChatSettings, Conversation, Preset, Turn, TurnNote
from console.chats.open_chat import Branch, OpenChat
from console.chats.store import ChatStore, ChatStoreError
from console.chats.tree import Tree

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
