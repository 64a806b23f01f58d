"""Text from a trained model: weights of any checkpoint in one process, next-token logits, sampling.

First form: every token runs the whole window through the model again, since there is no key-value cache yet, and the model lies in one
process; tensor- and pipeline-parallel generation comes with the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from megalite import checkpoint
from megalite.batch import Microbatch
from megalite.config.load import from_dict
from megalite.config.schema import Config, ParallelConfig
from megalite.model.stage import Stage
from megalite.training import build

ROUND_UP = 64  # lengths are padded to multiples of this: few shapes occur, so rotary tables and product kernels are used again


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn.

    Attributes:
        temperature: divides the logits; 0 takes the most likely token.
        top_k: draw among this many most likely tokens; 0 draws among all.
        seed: of the draws.
    """

    temperature: float = 0.8
    top_k: int = 50
    seed: int = 0


class LanguageModel:
    """The whole model of a checkpoint in this process, for forward passes alone: no gradients, no optimizer state."""

    def __init__(self, directory: Path, device: torch.device | str = "cpu"):
        """Load a checkpoint that any topology wrote. Raises CheckpointError or ConfigError where it can not be used."""
        manifest = checkpoint.manifest_of(directory)
        state = manifest.state
        if "config" not in state:
            raise checkpoint.CheckpointError(f"{directory} holds no configuration. Give one that pretrain.py wrote.")
        self.step: int = state.get("step", 0)
        self.config, self.device = in_one_process(from_dict(state["config"])), torch.device(device)
        parts = build.build_parts(self.config, build.make_mesh(self.config), self.device, training=False)
        checkpoint.load(manifest, parts.store.to_load(), convert=True)
        parts.store.publish()
        self._stage: Stage = parts.stages[0]

    @torch.no_grad()
    def next_logits(self, tokens: Sequence[int]) -> Tensor:
        """Logits of the token that follows `tokens`, [vocabulary] in fp32 or fp64. Only the last `max_position_embeddings` are seen."""
        assert self._stage.head is not None
        longest = self.config.model.max_position_embeddings
        window = torch.tensor(tokens[-longest:], dtype=torch.int64, device=self.device).unsqueeze(1)
        count = len(window)
        length = min(-(-count // ROUND_UP) * ROUND_UP, longest)
        padded = torch.nn.functional.pad(window, (0, 0, 0, length - count))  # after the last token: causal attention never looks there
        microbatch = Microbatch(padded, padded, torch.zeros(1, dtype=torch.int64, device=self.device))
        context = self._stage.context(microbatch, step=0, training=False)
        last = self._stage.trunk(padded, context)[count - 1 : count]
        return self._stage.head.logits(last)[0, 0, : self.config.model.vocabulary]

    def generate(self, prompt: Sequence[int], count: int, sampling: Sampling, *, eos: int | None = None, vocab_size: int = 0) -> list[int]:
        """Up to `count` tokens that follow a non-empty prompt, ending with `eos` where it is drawn.

        vocab_size: draw only tokens below it, where the tokenizer knows fewer than the model (0: all of the model's).
        """
        draws = torch.Generator().manual_seed(sampling.seed)
        tokens = list(prompt)
        while len(tokens) < len(prompt) + count:
            logits = self.next_logits(tokens)[: vocab_size or None]
            tokens.append(draw(logits.cpu(), sampling, draws))
            if tokens[-1] == eos:
                break
        return tokens[len(prompt) :]


def draw(logits: Tensor, sampling: Sampling, draws: torch.Generator) -> int:
    """One token from logits [vocabulary]."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    values, indices = logits.topk(min(sampling.top_k or len(logits), len(logits)))
    scores = (values - values[0]) / sampling.temperature  # the largest is 0, which no tiny temperature overflows
    return int(indices[torch.multinomial(torch.softmax(scores, 0), 1, generator=draws)])


def in_one_process(config: Config) -> Config:
    """The same model without parallelism, one row at a time. Computes in the precision that the checkpoint stores."""
    train = replace(config.train, global_batch_size=1, micro_batch_size=1, recompute="none", compile=False)
    if train.precision in ("bf16", "fp16"):
        train.precision = "fp32"
    return replace(config, parallel=ParallelConfig(dp=1, zero=0), train=train)


def tokenizer_prefix(config: Config) -> str | None:
    """The token file PREFIX of the training data, of which the tokenizer is known; the first where there are several."""
    train = config.data.train
    return train if train is None or isinstance(train, str) else next(iter(train), None)
