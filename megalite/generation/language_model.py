"""Text from a trained model: the weights of any source spread over tensor- and pipeline-parallel ranks, next-token logits, generation.

Every rank runs the same calls in the same order (SPMD). Tokens and lengths are known to all, so that nobody asks for a shape; what travels:

    each pass     activations up the pipeline, stage by stage, through the mesh's forward channel, and what tp sums within a stage
    its end       the parts of the vocabulary, gathered over tp on the last stage
    each draw     the last stage's first rank draws, and tells the token to all: no rounding can make two ranks disagree
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from megalite.batch import Microbatch
from megalite.build import parts as build
from megalite.checkpoint import CheckpointError
from megalite.checkpoint.agreement import raise_on_all_ranks
from megalite.generation.cache import CachedAttention, CachedState, KeyValueCache, padded
from megalite.generation.sampling import Sampling, draw, uniform
from megalite.generation.sources import check_layout, for_inference, open_source
from megalite.mesh import Mesh
from megalite.model.attention import Attention
from megalite.model.forward_state import ForwardState
from megalite.model.stage import Stage
from megalite.parallel.collectives import Work, all_gather, message

__all__ = ["LanguageModel", "Sampling"]

CHUNK = 512  # tokens whose logits are in memory at once where tokens are scored

Rows = Sequence[Sequence[int]]


class LanguageModel:
    """This rank's part of a model, for forward passes alone: no gradients, no optimizer state. Calls are collective over the mesh.

    Args:
        name: a checkpoint that any topology wrote, a run's directory for its newest one, or hf:DIR.
        tp, pp: the layout, which must fill the ranks that were started.
        precision: fp32, bf16 or fp64, in which the weights are kept, too.
        mesh: of that layout, where there is one already (`build.make_mesh`).

    Raises:
        CheckpointError: it can not be read; while weights are read, on every rank.
        ConfigError: it has no model of ours, or one that does not fit on the layout.
    """

    def __init__(
        self,
        name: Path | str,
        device: torch.device | str = "cpu",
        *,
        tp: int = 1,
        pp: int = 1,
        precision: str = "fp32",
        mesh: Mesh | None = None,
    ):
        self.source = open_source(name)
        self.step = self.source.step
        self.config = for_inference(self.source.config, tp=tp, pp=pp, precision=precision)
        check_layout(self.config)
        self.mesh, self.device = mesh or build.make_mesh(self.config), torch.device(device)
        parts = build.build_parts(self.config, self.mesh, self.device, training=False)
        with raise_on_all_ranks(self.mesh, CheckpointError):
            self.source.read(parts.store.to_load())
        parts.store.publish()
        self._stage: Stage = parts.stages[self.mesh.pp.rank]
        for layer in self._stage.layers.values():
            layer.attention = CachedAttention(cast(Attention, layer.attention))
        self._speaker = self.mesh.dims.rank({"pp": pp - 1, "dp": 0, "cp": 0, "tp": 0})  # the rank that draws

    @property
    def longest(self) -> int:
        """Tokens that the model sees at most."""
        return self.config.model.max_position_embeddings

    # ---- generation

    def continuations(self, prompts: Rows, count: int, sampling: Sampling, *, vocab_size: int | None = None) -> Iterator[list[int]]:
        """The next token of every row, `count` times or as long as they are asked for, by all ranks alike. Prompts are not empty.

        A row that does not fit into `longest` positions any more goes on with the later half of what was seen, read from position 0 on.
        vocab_size: only tokens below it are drawn, where the tokenizer knows fewer than the model.
        """
        rows = [list(prompt) for prompt in prompts]
        starts = [max(len(row) - self.longest, 0) for row in rows]  # of what is seen of each
        cache = self.new_cache(len(rows), min(self.longest, max(map(len, rows)) + count))
        logits = self.read(cache, [row[start:] for row, start in zip(rows, starts, strict=True)])
        for step in range(count):
            tokens = self._drawn(logits, sampling, [len(row) for row in rows], vocab_size)
            yield tokens
            for row, token in zip(rows, tokens, strict=True):
                row.append(token)
            if step < count - 1:
                logits = self._next(cache, rows, starts)

    def continuation(self, prompt: Sequence[int], count: int, sampling: Sampling, *, vocab_size: int | None = None) -> Iterator[int]:
        """`continuations` of one row."""
        return (token for (token,) in self.continuations([prompt], count, sampling, vocab_size=vocab_size))

    def _next(self, cache: KeyValueCache, rows: Rows, starts: list[int]) -> Tensor | None:
        """Logits of what follows rows whose last token has not been read yet; moves the starts of those that have become too long."""
        lengths = [len(row) - start for row, start in zip(rows, starts, strict=True)]
        if max(lengths) <= self.longest:
            return self.extend(cache, [row[-1] for row in rows], [length - 1 for length in lengths])
        for number, length in enumerate(lengths):
            if length > self.longest:
                starts[number] = len(rows[number]) - max(self.longest // 2, 1)
        return self.read(cache, [row[start:] for row, start in zip(rows, starts, strict=True)])

    def new_cache(self, rows: int, capacity: int) -> KeyValueCache:
        return KeyValueCache(self._stage, rows, capacity, self.device)

    @torch.no_grad()
    def read(self, cache: KeyValueCache, rows: Rows) -> Tensor | None:
        """Read rows from their beginning into the cache. Logits of the token after each, [rows, vocabulary]; None off the last stage."""
        lengths = [len(row) for row in rows]
        tokens, state = self._padded(rows)
        cache.begin_prompts(lengths, len(tokens))
        x = self._activations(tokens, CachedState(**vars(state), cache=cache))
        if x is None:
            return None
        last = torch.tensor(lengths, device=self.device) - 1
        return self._logits(x[last, torch.arange(len(rows), device=self.device)].unsqueeze(0))[0]

    @torch.no_grad()
    def extend(self, cache: KeyValueCache, tokens: Sequence[int], positions: Sequence[int]) -> Tensor | None:
        """Read one more token of each row, at these positions. Logits of the token after each as from `read`."""
        read, where = torch.tensor([[tokens], [positions]], device=self.device)  # [1, rows] each
        microbatch = Microbatch(read, read, where, self._samples(len(tokens)))
        cache.begin_tokens(list(positions))
        state = self._stage.forward_state(microbatch, step=0, training=False)
        x = self._activations(microbatch.tokens, CachedState(**vars(state), cache=cache))
        return None if x is None else self._logits(x)[0]

    def _drawn(self, logits: Tensor | None, sampling: Sampling, positions: list[int], vocab_size: int | None) -> list[int]:
        """The next token of every row, the same on every rank."""
        tokens = torch.empty(len(positions), dtype=torch.int64, device=self.device)
        if self.mesh.rank == self._speaker:
            assert logits is not None
            numbers = [uniform(sampling.seed, row, position) for row, position in enumerate(positions)]
            tokens = draw(logits[:, :vocab_size], sampling, numbers)
        return self._told(tokens, "drawn tokens").tolist()

    # ---- without a cache

    @torch.no_grad()
    def logits(self, rows: Rows) -> Tensor | None:
        """Logits after each token of each row, [longest row, rows, vocabulary], of no meaning behind a row's end; None off the last stage.

        The whole logits exist at once; where only some are wanted, `log_probabilities` takes less memory.
        """
        tokens, state = self._padded(rows)
        x = self._activations(tokens, state)
        return None if x is None else self._logits(x[: max(map(len, rows))])

    @torch.no_grad()
    def log_probabilities(self, rows: Rows, places: Sequence[tuple[int, int]], targets: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Of each target: its log-probability after rows[row][: position + 1], and whether no other token is more likely there.

        places: (position, row) of each target. Returns two tensors [targets] on every rank, the first in at least fp32. Of the logits only
        those at the places are computed.
        """
        tokens, state = self._padded(rows)
        x = self._activations(tokens, state)
        found = torch.zeros(2, len(targets), dtype=torch.promote_types(self._stage.dtype, torch.float32), device=self.device)
        if x is not None:
            where = torch.tensor(places, device=self.device).reshape(-1, 2)
            wanted = torch.tensor(targets, dtype=torch.int64, device=self.device)
            chosen = x[where[:, 0], where[:, 1]].unsqueeze(1)  # [targets, 1, hidden]
            for part, its, out in zip(chosen.split(CHUNK), wanted.split(CHUNK), found.split(CHUNK, dim=1), strict=True):
                logits = self._logits(part)[:, 0].to(found.dtype)
                out[0] = logits.log_softmax(-1).gather(1, its.unsqueeze(1)).squeeze(1)
                out[1] = logits.argmax(-1) == its
        values, greedy = self._told(found, "log-probabilities")
        return values, greedy.bool()

    # ---- passes

    def _padded(self, rows: Rows) -> tuple[Tensor, ForwardState]:
        """Rows side by side, [seq, rows], padded behind their ends, where causal attention never looks."""
        longest = max(map(len, rows))
        if longest > self.longest or not all(rows):
            raise ValueError(f"rows of {min(map(len, rows))} to {longest} tokens: the model takes 1 to {self.longest}")
        length = min(padded(longest), self.longest)
        tokens = torch.tensor([[*row, *[0] * (length - len(row))] for row in rows], device=self.device).t().contiguous()
        microbatch = Microbatch.of(tokens, tokens, self._samples(len(rows)))
        return tokens, self._stage.forward_state(microbatch, step=0, training=False)

    def _samples(self, rows: int) -> Tensor:
        """Keys of dropout, of which there is none."""
        return torch.zeros(rows, dtype=torch.int64, device=self.device)

    def _activations(self, tokens: Tensor, state: ForwardState) -> Tensor | None:
        """The last stage's activations [seq, rows, hidden], before the head; None on the others."""
        stage, pipeline = self._stage, self.mesh.pp
        x = tokens
        if stage.embedding is None:
            x = torch.empty(*tokens.shape, self.config.model.hidden_size, dtype=stage.dtype, device=self.device)
            self._pass("irecv", x, pipeline.ranks[pipeline.rank - 1])
        x = stage.trunk(x, state)
        if stage.head is not None:
            return x
        self._pass("isend", x.contiguous(), pipeline.ranks[pipeline.rank + 1])
        return None

    def _pass(self, operation: str, x: Tensor, peer: int) -> None:
        import torch.distributed as dist

        channel = self.mesh.channels["forward_up"]
        message(getattr(dist, operation), x, peer, channel, "activations of a pass", self.mesh.activity).wait()

    def _logits(self, x: Tensor) -> Tensor:
        """[seq, rows, vocabulary] of the last stage's activations, without padded columns."""
        assert self._stage.head is not None
        parts = all_gather(self._stage.head.logits(x).unsqueeze(0), self.mesh.tp).wait()  # [tp, seq, rows, vocabulary/tp]
        return parts.movedim(0, -2).flatten(-2)[..., : self.config.model.vocabulary]

    def _told(self, x: Tensor, what: str) -> Tensor:
        """What the speaker says, on every rank."""
        import torch.distributed as dist

        world = self.mesh.world
        if world.size > 1:
            Work(lambda: dist.broadcast(x, self._speaker, group=world.group, async_op=True), what, world.activity).wait()
        return x
