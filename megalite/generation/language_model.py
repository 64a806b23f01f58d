"""Text generation: the weights of any source over tensor-, pipeline- and context-parallel ranks, next-token
logits, generation.

Every rank runs the same calls in the same order (SPMD). Tokens and lengths are known on all ranks, so shapes
are not communicated. Forward passes only; they communicate

    in each pass   activations from stage to stage, through the mesh's forward channel, and the tp reductions
                   within a stage
    at its end     the parts of the vocabulary's logits, all-gathered over tp on the last stage
    with cp        of whole rows, keys and values in each layer and the last stage's activations, all-gathered
                   over cp; in a layer with a state, states and ends of segments
    at each draw   the last stage's first rank draws the tokens and broadcasts them: rounding cannot make two
                   ranks disagree

A cp rank computes its part of whole rows: of prompts, and of texts that are scored. A token that continues a
row is a single position: all cp ranks compute it, each from its own copy of the cache.

Prompts may be read in chunks of positions, one after another, which bounds the memory of their activations.
Stages then compute different chunks at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, groupby
from pathlib import Path

import torch
from torch import Tensor

from megalite.assembly import parts as build
from megalite.checkpoint import CheckpointError
from megalite.checkpoint.agreement import raise_on_all_ranks
from megalite.config.dims import equal_part
from megalite.generation.sampling import Sampling, draw, uniform
from megalite.generation.sources import ModelSource, check_layout, for_inference, open_source
from megalite.mesh.mesh import Mesh
from megalite.model.forward_state import ForwardState
from megalite.model.kinds import KINDS, outdated_after
from megalite.model.layer import PlacedBlock
from megalite.model.row_cache import CachedBlock, CachedState, RowCache, padded
from megalite.model.stage import Stage
from megalite.parallel.collectives import Work, all_gather, all_reduce, message
from megalite.parallel.context.gathered import whole
from megalite.parallel.context.parts import PositionSegment, zigzag
from megalite.parallel.context.rows import Cut
from megalite.parallel.microbatch import Microbatch
from megalite.parallel.spec import Rectangle
from megalite.system.progress import Report, silent

__all__ = ["LanguageModel", "Sampling"]

READ = 1 << 30  # bytes of weights that are read between two reports of progress
CHUNK = 512  # tokens whose logits exist at a time when tokens are scored

Rows = Sequence[Sequence[int]]


def in_parts(rectangles: Sequence[Rectangle]) -> Iterator[list[Rectangle]]:
    """Group rectangles into about READ bytes each.

    Each chunk of a file is checked once for each group that it overlaps.
    """
    sizes = accumulate(rectangle.tensor.nbytes for rectangle in rectangles)
    for _, group in groupby(zip(rectangles, sizes, strict=True), key=lambda pair: (pair[1] - 1) // READ):
        yield [rectangle for rectangle, _ in group]


class LanguageModel:
    """This rank's part of a model, for forward passes only: no gradients, no optimizer state. Calls are
    collective over the mesh.

    Args:
        name: a checkpoint written by any topology, a run's directory (its newest checkpoint), or hf:DIR; or
            what `open_source` returns.
        tp, pp, cp: the layout; tp · pp · cp must be the number of ranks.
        precision: fp32, bf16 or fp64, of the weights and of the computation.
        average: load the moving average of the weights (`train.ema_decay`) in their place.
        mesh: an existing mesh of that layout (`build.make_mesh`).
        progress: is told how many of this rank's bytes are read.

    Attributes:
        prefill_chunk_size: number of positions of prompts that a pass reads; None: all. May be set.

    Raises:
        CheckpointError: the source cannot be read; on every rank, if reading weights fails.
        ConfigError: the source has no supported model, or one that does not fit the layout.
    """

    def __init__(
        self,
        name: Path | str | ModelSource,
        device: torch.device | str = "cpu",
        *,
        tp: int = 1,
        pp: int = 1,
        cp: int = 1,
        precision: str = "fp32",
        average: bool = False,
        mesh: Mesh | None = None,
        progress: Report = silent,
    ):
        self.source = name if isinstance(name, ModelSource) else open_source(name, average)
        self.step = self.source.step
        self.prefill_chunk_size: int | None = None
        self.config = for_inference(self.source.config, tp=tp, pp=pp, cp=cp, precision=precision)
        check_layout(self.config)
        self.mesh, self.device = mesh or build.make_mesh(self.config), torch.device(device)
        parts = build.build_parts(self.config, self.mesh, self.device, training=False)
        with raise_on_all_ranks(self.mesh, CheckpointError):
            rectangles, done = parts.to_load(), 0
            total = sum(rectangle.tensor.nbytes for rectangle in rectangles)
            for part in in_parts(rectangles):
                progress("reading weights", done, total, "B")
                self.source.read(part)
                done += sum(rectangle.tensor.nbytes for rectangle in part)
            self.source.read_base(parts)
        parts.store.publish()
        self._stage: Stage = parts.stages[self.mesh.pp.rank]
        self._outdated_after = outdated_after(self.config.model)
        self._cached: list[CachedBlock] = []  # the blocks that keep something of a row
        for module in list(self._stage.modules()):
            if isinstance(module, PlacedBlock):
                module.block = KINDS[module.spec.kind].cached(module.block)
                if isinstance(module.block, CachedBlock):
                    self._cached.append(module.block)
        self._speaker = self.mesh.dims.rank({"pp": pp - 1, "dp": 0, "cp": 0, "tp": 0})  # the rank that draws

    @property
    def longest(self) -> int:
        """Maximum number of tokens in the context of the model."""
        return self.config.model.max_position_embeddings

    # ---- generation

    def continuations(
        self, prompts: Rows, count: int, sampling: Sampling, *, vocab_size: int | None = None
    ) -> Iterator[list[int]]:
        """Yield the next token of every row, `count` times or until the caller stops, after the same token on
        all ranks.

        A row that exceeds `longest` positions continues with the later half of its context, read again from
        position 0.

        Args:
            prompts: each has at least one token.
            vocab_size: only tokens below it are drawn, for a tokenizer with fewer tokens than the model.
        """
        rows = [list(prompt) for prompt in prompts]
        starts = [max(len(row) - self.longest, 0) for row in rows]  # where the context of each row starts
        cache = self.new_cache(len(rows), min(self.longest, max(map(len, rows)) + count))
        logits = self.read(cache, [row[start:] for row, start in zip(rows, starts, strict=True)])
        for step in range(count):
            tokens = self._drawn(logits, sampling, [len(row) for row in rows], vocab_size)
            yield tokens
            for row, token in zip(rows, tokens, strict=True):
                row.append(token)
            if step < count - 1:
                logits = self._next(cache, rows, starts)

    def continuation(
        self, prompt: Sequence[int], count: int, sampling: Sampling, *, vocab_size: int | None = None
    ) -> Iterator[int]:
        """Yield `continuations` of one row."""
        return (token for (token,) in self.continuations([prompt], count, sampling, vocab_size=vocab_size))

    def _next(self, cache: RowCache, rows: Rows, starts: list[int]) -> Tensor | None:
        """Logits of the token after each row, whose last token has not been read yet; moves the starts of
        rows that are too long now."""
        lengths = [len(row) - start for row, start in zip(rows, starts, strict=True)]
        limit = self._outdated_after
        outdated = limit is not None and limit + 1 in lengths
        if max(lengths) <= self.longest and not outdated:
            return self.extend(cache, [row[-1] for row in rows], [length - 1 for length in lengths])
        for number, length in enumerate(lengths):
            if length > self.longest:
                starts[number] = len(rows[number]) - max(self.longest // 2, 1)
        return self.read(cache, [row[start:] for row, start in zip(rows, starts, strict=True)])

    def new_cache(self, rows: int, capacity: int) -> RowCache:
        return RowCache(self._cached, rows, capacity, self._stage.dtype, self.device, self.mesh.cp)

    @torch.no_grad()
    def read(self, cache: RowCache, rows: Rows) -> Tensor | None:
        """Read rows from their beginning into the cache, in chunks of `prefill_chunk_size` positions. Returns
        logits of the next tokens, [rows, vocabulary], on the last stage."""
        tokens, lengths = self._columns(rows), [len(row) for row in rows]
        size = self.prefill_chunk_size or len(tokens)
        each, ends = (torch.tensor(x, device=self.device) for x in (range(len(rows)), lengths))
        last: Tensor | None = None  # [rows, hidden], of the last token of each row
        for start in range(0, max(lengths), size):
            chunk = tokens[start : start + size]
            microbatch = self._part(chunk, start)
            reads = [min(length, start + size) for length in lengths]
            cache.begin_prompts(reads, len(microbatch.tokens) * self.mesh.cp.size, start)
            state = self._state(microbatch, lengths)
            x = self._activations(microbatch.tokens, CachedState(**vars(state), cache=cache))
            if x is not None:
                current = x[(ends - 1 - start).clamp(0, len(chunk) - 1), each]
                last = current if last is None else torch.where((ends <= start).unsqueeze(1), last, current)
        return None if last is None else self._logits(last.unsqueeze(0))[0]

    @torch.no_grad()
    def extend(self, cache: RowCache, tokens: Sequence[int], positions: Sequence[int]) -> Tensor | None:
        """Read the next token of each row, at these positions. Returns logits like `read`."""
        read, where = torch.tensor([[tokens], [positions]], device=self.device)  # [1, rows] each
        microbatch = Microbatch(read, read, where, self._samples(len(tokens)))
        cache.begin_tokens(list(positions))
        state = self._state(microbatch, [position + 1 for position in positions])
        x = self._activations(microbatch.tokens, CachedState(**vars(state), cache=cache))
        return None if x is None else self._logits(x)[0]

    def _drawn(
        self, logits: Tensor | None, sampling: Sampling, positions: list[int], vocab_size: int | None
    ) -> list[int]:
        """Draw the next token of every row, the same on every rank."""
        tokens = torch.empty(len(positions), dtype=torch.int64, device=self.device)
        if self.mesh.rank == self._speaker:
            assert logits is not None
            # independent of the batch
            numbers = [uniform(sampling.seed, row, position) for row, position in enumerate(positions)]
            tokens = draw(logits[:, :vocab_size], sampling, numbers)
        return self._from_speaker(tokens, "drawn tokens").tolist()

    # ---- without a cache

    @torch.no_grad()
    def logits(self, rows: Rows) -> Tensor | None:
        """Logits after each token, [longest row, rows, vocabulary], undefined after a row's end; None except
        on the last stage.

        All logits exist at once; if only some are needed, `log_probabilities` takes less memory.
        """
        tokens, state = self._padded(rows)
        x = self._activations(tokens, state)
        return None if x is None else self._logits(x[: max(map(len, rows))])

    @torch.no_grad()
    def log_probabilities(
        self, rows: Rows, places: Sequence[tuple[int, int]], targets: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """For each target, its log-probability after rows[row][: position + 1], and whether it is the most
        likely token there.

        Only the logits at `places` are computed.

        Args:
            places: (position, row) of each target.

        Returns:
            two tensors [targets] on every rank, the first in at least fp32.
        """
        tokens, state = self._padded(rows)
        x = self._activations(tokens, state)
        logs = torch.zeros(
            2, len(targets), dtype=torch.promote_types(self._stage.dtype, torch.float32), device=self.device
        )
        if x is not None:
            where = torch.tensor(places, device=self.device).reshape(-1, 2)
            wanted = torch.tensor(targets, dtype=torch.int64, device=self.device)
            # each cp rank computes the logits of some places
            own = slice(self.mesh.cp.rank, None, self.mesh.cp.size)
            chosen = x[where[own, 0], where[own, 1]].unsqueeze(1)  # [targets/cp, 1, hidden]
            for part, its, out in zip(
                chosen.split(CHUNK), wanted[own].split(CHUNK), logs[:, own].split(CHUNK, dim=1), strict=True
            ):
                logits = self._logits(part)[:, 0].to(logs.dtype)
                out[0] = logits.log_softmax(-1).gather(1, its.unsqueeze(1)).squeeze(1)
                out[1] = logits.argmax(-1) == its
            logs = all_reduce(logs, self.mesh.cp).wait()
        values, greedy = self._from_speaker(logs, "log-probabilities")
        return values, greedy.bool()

    # ---- passes

    def _padded(self, rows: Rows) -> tuple[Tensor, ForwardState]:
        """Return rows as columns [seq/cp, rows], padded at the end, which causal attention never reads."""
        microbatch = self._part(self._columns(rows))
        return microbatch.tokens, self._state(microbatch, [len(row) for row in rows])

    def _columns(self, rows: Rows) -> Tensor:
        """Return rows as columns [seq, rows], padded at the end."""
        longest = max(map(len, rows))
        if longest > self.longest or not all(rows):
            raise ValueError(
                f"rows must have 1 to {self.longest} tokens, got {min(map(len, rows))} to {longest}"
            )
        length = min(padded(longest), self.longest)
        padding = [[*row, *[0] * (length - len(row))] for row in rows]
        return torch.tensor(padding, device=self.device).t().contiguous()

    def _part(self, tokens: Tensor, start: int = 0) -> Microbatch:
        """Return this cp rank's part of the positions from `start` on, tokens [seq, rows]; all without cp."""
        cp, samples = self.mesh.cp, self._samples(tokens.shape[1])
        microbatch = Microbatch.of(tokens, tokens, samples)
        if cp.size > 1:
            parts = zigzag(equal_part(len(tokens), cp.size, "gather") * cp.size, cp.size)
            microbatch = Cut(parts, cp.rank)(tokens, tokens, samples)
        segments = tuple(PositionSegment(start + at, length) for at, length in microbatch.segments)
        return replace(microbatch, positions=microbatch.positions + start, segments=segments)

    def _state(self, microbatch: Microbatch, lengths: list[int]) -> ForwardState:
        """What a forward pass needs. Under LongRoPE each row has the factors of its own length, as if it were
        alone."""
        return self._stage.forward_state(microbatch, step=0, training=False, lengths=lengths)

    def _samples(self, rows: int) -> Tensor:
        """Return placeholders for the sample indices. Inference has no dropout."""
        return torch.zeros(rows, dtype=torch.int64, device=self.device)

    def _activations(self, tokens: Tensor, state: ForwardState) -> Tensor | None:
        """The last stage's activations of whole rows [seq, rows, hidden], before the head; None on the other
        stages.

        Communicates between stages and over cp.
        """
        stage, pipeline = self._stage, self.mesh.pp
        x = tokens
        if stage.embedding is None:
            x = torch.empty(
                *tokens.shape, self.config.model.hidden_size, dtype=stage.dtype, device=self.device
            )
            self._pass("irecv", x, pipeline.ranks[pipeline.rank - 1])
        x = stage.trunk(x, state)
        if stage.head is not None:
            return x if state.part is None else whole(x, self.mesh.cp, state.part)
        self._pass("isend", x.contiguous(), pipeline.ranks[pipeline.rank + 1])
        return None

    def _pass(self, operation: str, x: Tensor, peer: int) -> None:
        import torch.distributed as dist

        channel = self.mesh.channels["forward_up"]
        message(
            getattr(dist, operation), x, peer, channel, "activations of a forward pass", self.mesh.activity
        ).wait()

    def _logits(self, x: Tensor) -> Tensor:
        """Logits [seq, rows, vocabulary] of the last stage's activations, without padded columns. All-gather
        over tp."""
        assert self._stage.head is not None
        # [tp, seq, rows, vocabulary/tp]
        parts = all_gather(self._stage.head.logits(x).unsqueeze(0), self.mesh.tp).wait()
        return parts.movedim(0, -2).flatten(-2)[..., : self.config.model.vocabulary]

    def _from_speaker(self, x: Tensor, what: str) -> Tensor:
        """Broadcast the speaker's `x` to every rank."""
        import torch.distributed as dist

        world = self.mesh.world
        if world.size > 1:
            Work(
                lambda: dist.broadcast(x, self._speaker, group=world.group, async_op=True),
                what,
                world.activity,
            ).wait()
        return x
