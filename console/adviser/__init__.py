"""The adviser: says when something is wrong or wasteful, and which knob to turn. Pure: snapshots in, sentences out."""

from console.adviser.advice import Action, Advice, Code, Look, Open, Turn
from console.adviser.adviser import Adviser

__all__ = ["Action", "Advice", "Adviser", "Code", "Look", "Open", "Turn"]
