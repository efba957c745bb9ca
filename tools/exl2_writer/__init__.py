"""A writer of EXL2 models that rounds to nearest: `python -m tools.exl2_writer --help`"""
