"""Train the demo model: `python -m tools.demo_model.train`. README.md says how long that takes.

Corpus, tokenizer, initial weights and batch order all follow from fixed seeds (the last bits of the weights
also depend on the CPU and the number of threads). On a machine that others use too, set
`OMP_WAIT_POLICY=passive`: spinning threads that wait for each other cost up to four fifths of the speed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch.nn import functional

from engine.demo import MODEL_DIR
from tools.demo_model.corpus import make_corpus
from tools.demo_model.examples import IGNORED, Batch, batches, cut_last_answer, encode
from tools.demo_model.model import DemoModel, Shape
from tools.demo_model.recipe import Recipe, Round, learning_rate
from tools.demo_model.tokenizer import BOS, END, PAD, save_tokenizer, token_id, train_tokenizer

PROGRESS_EVERY = 25
CHECKPOINT_EVERY = 250


@dataclass
class Progress:
    """Counts of a round, printed every `PROGRESS_EVERY` steps."""

    size: int
    started: float = field(default_factory=time.monotonic)
    conversations: int = 0
    tokens: int = 0
    steps: int = 0
    loss_sum: float = 0.0

    @property
    def done(self) -> float:
        """The share of the round that is behind us, 0 to 1."""
        return self.conversations / self.size

    def add(self, batch: Batch, loss: float) -> None:
        """Count one step, and print a line when one is due."""
        self.conversations += batch.ids.shape[0]
        self.tokens += batch.ids.numel()
        self.steps += 1
        self.loss_sum += loss
        if self.steps % PROGRESS_EVERY == 0:
            print(f"{self}  loss {self.loss_sum / PROGRESS_EVERY:.4f}", flush=True)
            self.loss_sum = 0.0

    def __str__(self) -> str:
        elapsed_s = time.monotonic() - self.started
        left_s = elapsed_s / self.done - elapsed_s
        return (
            f"step {self.steps}  {self.conversations}/{self.size} conversations  {self.tokens / 1e6:.2f} M tokens"
            f"  {self.tokens / elapsed_s:.0f} tok/s  {elapsed_s / 60:.1f} min, {left_s / 60:.1f} min left"
        )


def make_tokenizer(recipe: Recipe) -> Tokenizer:
    """Train the tokenizer on the start of the first round's corpus."""
    sample = make_corpus(recipe.tokenizer_sample, recipe.rounds[0].seed)
    return train_tokenizer(text for talk in sample for e in talk.exchanges for text in (e.question, e.answer))


def make_batches(recipe: Recipe, turn: Round, tokenizer: Tokenizer, max_length: int) -> Iterator[Batch]:
    """Encode the corpus of one round and group it into batches."""
    rng = Random(turn.seed + 1)
    whole = (encode(talk, tokenizer, max_length) for talk in make_corpus(turn.size, turn.seed))
    cut = (cut_last_answer(talk, rng) if rng.random() < turn.cut_share else talk for talk in whole)
    return batches(cut, recipe.tokens_per_batch, turn.question_share, token_id(tokenizer, PAD), rng)


def make_optimizer(model: DemoModel, recipe: Recipe) -> torch.optim.Optimizer:
    """AdamW with weight decay on matrices only."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True)


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


def train_round(model: DemoModel, tokenizer: Tokenizer, recipe: Recipe, turn: Round, folder: Path) -> None:
    """Run one round, printing progress; leave the model in `folder`, also every `CHECKPOINT_EVERY` steps."""
    torch.manual_seed(turn.seed)
    optimizer = make_optimizer(model, recipe)
    progress = Progress(turn.size)
    for batch in make_batches(recipe, turn, tokenizer, model.shape.max_positions):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(recipe, turn, progress.steps, progress.done)
        loss = loss_of(model, batch)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        progress.add(batch, loss.item())
        if progress.steps % CHECKPOINT_EVERY == 0:
            export(model, tokenizer, folder)
    export(model, tokenizer, folder)
    print(f"{progress}  -> {folder}", flush=True)


def fresh(recipe: Recipe) -> tuple[DemoModel, Tokenizer]:
    """A new tokenizer and a model with random weights."""
    tokenizer = make_tokenizer(recipe)
    torch.manual_seed(recipe.rounds[0].seed)
    return DemoModel(Shape(vocab_size=tokenizer.get_vocab_size())), tokenizer


def trained(folder: Path) -> tuple[DemoModel, Tokenizer]:
    """The model and tokenizer that `export` left in `folder`."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = DemoModel(Shape(vocab_size=tokenizer.get_vocab_size()))
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model, tokenizer


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser("python -m tools.demo_model.train", description="Train the built-in demo model.")
    parser.add_argument("--out", type=Path, default=MODEL_DIR, help="folder to write the model to")
    parser.add_argument("--start", type=Path, help="model folder to go on from, with the last round only")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    recipe = Recipe()
    model, tokenizer = trained(arguments.start) if arguments.start else fresh(recipe)
    print(f"{sum(parameter.numel() for parameter in model.parameters()) / 1e6:.2f} M parameters", flush=True)
    for turn in recipe.rounds[-1:] if arguments.start else recipe.rounds:
        train_round(model, tokenizer, recipe, turn, arguments.out)


if __name__ == "__main__":
    main()
