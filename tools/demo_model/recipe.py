"""How the demo model is trained: every number that decides the outcome."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Round:
    """One pass over a corpus of its own, under one cosine of the learning rate.

    `question_share` of the question tokens and all answer tokens are learned; `cut_share` of the
    conversations end after the first tokens of their last answer.
    """

    size: int
    seed: int
    peak_lr: float
    warmup_steps: int
    question_share: float
    cut_share: float


@dataclass(frozen=True)
class Recipe:
    """The rounds in order (a warm restart between them, Loshchilov & Hutter 2017) and what they share."""

    rounds: tuple[Round, ...] = (
        Round(80_000, seed=20, peak_lr=1.5e-3, warmup_steps=100, question_share=0.15, cut_share=0.7),
        Round(30_000, seed=21, peak_lr=1e-3, warmup_steps=30, question_share=0.05, cut_share=0.85),
        Round(28_000, seed=22, peak_lr=8e-4, warmup_steps=30, question_share=0.05, cut_share=0.85),
        Round(26_000, seed=23, peak_lr=8e-4, warmup_steps=30, question_share=0.05, cut_share=0.85),
        Round(30_000, seed=24, peak_lr=1e-3, warmup_steps=30, question_share=0.05, cut_share=0.85),
    )
    tokens_per_batch: int = 3072
    final_lr: float = 5e-5
    weight_decay: float = 0.05
    clip_norm: float = 1.0
    tokenizer_sample: int = 40_000


def learning_rate(recipe: Recipe, turn: Round, step: int, done: float) -> float:
    """Linear warm-up over steps, then a cosine over the share of the round that is `done` (0 to 1)."""
    warm = min(1.0, (step + 1) / turn.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return warm * (recipe.final_lr + (turn.peak_lr - recipe.final_lr) * cosine)
