"""The Chat screen: conversations, transcript, input and settings."""
