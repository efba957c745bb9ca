"""OpenAI's dialect: chat, completions, embeddings, models."""
