"""Train the demo model: `python -m engine.demo.train`. Well under an hour on 2 CPU cores, the same each time.

Corpus, tokenizer, initial weights and batch order all follow from one seed (the last bits of the weights
also depend on the CPU and the number of threads).
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch.nn import functional

from engine.demo import MODEL_DIR
from engine.demo.corpus import DEFAULT_SEED, DEFAULT_SIZE, make_corpus
from engine.demo.examples import IGNORED, Batch, batches, encode
from engine.demo.model import DemoModel, Shape
from engine.demo.tokenizer import BOS, END, PAD, save_tokenizer, token_id, train_tokenizer

TOKENIZER_SAMPLE = 40_000
PROGRESS_EVERY = 25


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the outcome of a training run."""

    size: int = DEFAULT_SIZE
    seed: int = DEFAULT_SEED
    tokens_per_batch: int = 6144
    peak_lr: float = 2e-3
    final_lr: float = 5e-5
    warmup_steps: int = 100
    weight_decay: float = 0.05
    question_share: float = 0.15
    clip_norm: float = 1.0


def learning_rate(recipe: Recipe, step: int, done: float) -> float:
    """Linear warm-up over steps, then a cosine over the share of the corpus that is `done` (0 to 1)."""
    warm = min(1.0, (step + 1) / recipe.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return warm * (recipe.final_lr + (recipe.peak_lr - recipe.final_lr) * cosine)


def make_tokenizer(recipe: Recipe) -> Tokenizer:
    """Train the tokenizer on the start of the corpus."""
    sample = make_corpus(min(recipe.size, TOKENIZER_SAMPLE), recipe.seed)
    return train_tokenizer(text for talk in sample for e in talk.exchanges for text in (e.question, e.answer))


def make_batches(recipe: Recipe, tokenizer: Tokenizer, max_length: int) -> Iterator[Batch]:
    """Encode the corpus and group it into batches."""
    examples = (encode(talk, tokenizer, max_length) for talk in make_corpus(recipe.size, recipe.seed))
    rng = Random(recipe.seed + 1)
    return batches(examples, recipe.tokens_per_batch, recipe.question_share, token_id(tokenizer, PAD), rng)


def make_optimizer(model: DemoModel, recipe: Recipe) -> torch.optim.Optimizer:
    """AdamW with weight decay on matrices only."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.peak_lr, betas=(0.9, 0.95), fused=True)


def loss_of(model: DemoModel, batch: Batch) -> torch.Tensor:
    """Mean cross-entropy over the learned positions of `batch`, matmuls in bfloat16."""
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.hidden(batch.ids, torch.bfloat16)
        learned = batch.targets != IGNORED
        logits = model.logits(hidden[learned])
    return functional.cross_entropy(logits.float(), batch.targets[learned])


def export(model: DemoModel, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a Hugging Face folder: configuration, tokenizer and bfloat16 safetensors."""
    save_tokenizer(tokenizer, folder, model.shape.max_positions)
    bos, end, pad = (token_id(tokenizer, token) for token in (BOS, END, PAD))
    config = model.shape.to_config(bos, end, pad)
    generation = {
        "bos_token_id": bos,
        "eos_token_id": [end],
        "pad_token_id": pad,
        "do_sample": True,
        "temperature": 0.3,
        "top_p": 0.9,
    }
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    weights = {name: tensor.detach().to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def train(recipe: Recipe, folder: Path, checkpoint_every: int) -> None:
    """Run the recipe, printing progress; leave the model in `folder`, also every `checkpoint_every` steps."""
    torch.manual_seed(recipe.seed)
    started = time.monotonic()
    tokenizer = make_tokenizer(recipe)
    model = DemoModel(Shape(vocab_size=tokenizer.get_vocab_size()))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{parameters / 1e6:.2f} M parameters, vocabulary {tokenizer.get_vocab_size()}", flush=True)
    optimizer = make_optimizer(model, recipe)
    rows = tokens = step = 0
    recent = 0.0
    for step, batch in enumerate(make_batches(recipe, tokenizer, model.shape.max_positions)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(recipe, step, rows / recipe.size)
        loss = loss_of(model, batch)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        rows, tokens = rows + batch.ids.shape[0], tokens + batch.ids.numel()
        recent += loss.item()
        if (step + 1) % PROGRESS_EVERY == 0:
            elapsed_s = time.monotonic() - started
            left_s = elapsed_s * (recipe.size / rows - 1)
            print(
                f"step {step + 1}  loss {recent / PROGRESS_EVERY:.4f}  {rows}/{recipe.size} conversations"
                f"  {tokens / elapsed_s:.0f} tok/s  {elapsed_s / 60:.1f} min, {left_s / 60:.1f} min left",
                flush=True,
            )
            recent = 0.0
        if (step + 1) % checkpoint_every == 0:
            export(model, tokenizer, folder)
    export(model, tokenizer, folder)
    minutes = (time.monotonic() - started) / 60
    print(f"done: {step + 1} steps, {tokens / 1e6:.2f} M tokens, {minutes:.1f} min -> {folder}", flush=True)


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser("python -m engine.demo.train", description="Train the built-in demo model.")
    parser.add_argument("--out", type=Path, default=MODEL_DIR, help="folder to write the model to")
    parser.add_argument("--size", type=int, default=DEFAULT_SIZE, help="conversations to train on")
    parser.add_argument("--seed", type=int, default=DEFAULT_SEED)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--checkpoint-every", type=int, default=250, help="steps between checkpoints")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    train(Recipe(size=arguments.size, seed=arguments.seed), arguments.out, arguments.checkpoint_every)


if __name__ == "__main__":
    main()
