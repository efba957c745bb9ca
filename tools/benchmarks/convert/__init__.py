"""The model in the format of an engine that reads no safetensors; each module runs in that engine's venv."""
