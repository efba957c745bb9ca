"""The screens, a folder for each feature."""
