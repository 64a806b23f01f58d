"""An adapter of a model for lm-evaluation-harness (https://github.com/EleutherAI/lm-evaluation-harness, Gao
et al.), to run its tasks.

The harness converts a task to requests: the log-likelihood of a continuation, that of a text, or a generated
continuation. Its base class tokenizes a context and its continuation; this module computes the answers, by
the rules of the harness's adapter for transformers (HFLM), so that both give the same numbers. `lm_eval` is
imported only by the functions that need it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from megalite.config.errors import ConfigError
from megalite.data.tokenizer.tokenizers import Tokenizer
from megalite.evaluation.perplexity import windows
from megalite.evaluation.scoring import Progress, ScoredTokens, score
from megalite.generation.language_model import LanguageModel, Sampling
from megalite.generation.sources import ModelSource, end_tokens, opening

MAX_TOKENS = 256  # tokens to generate, if the task does not set it
# the option names that set it
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
OPTIONS = {"until", "do_sample", "temperature", "top_k", "top_p", *LENGTHS}


class Answers:
    """The harness's interface of a language model. `as_harness_model` combines it with the harness's base
    class."""

    def __init__(
        self, model: LanguageModel, tokenizer: Tokenizer, batch_size: int, progress: Progress | None = None
    ):
        super().__init__()  # the harness's base class
        self._answering, self._tokenizer, self._batch_size, self._progress = (
            model,
            tokenizer,
            batch_size,
            progress,
        )
        self._opening = opening(model.source, tokenizer)
        self.max_length = model.longest

    @property
    def prefix_token_id(self) -> int:
        return document_start(self._answering.source, self._tokenizer)

    @property
    def eot_token_id(self) -> int:
        return self._tokenizer.eos

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Tokens of a string; special tokens spelled out in it are encoded as text."""
        return [*([] if add_special_tokens is False else self._opening), *self._tokenizer.encode(string)]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """The log-probability of each continuation, and whether greedy decoding gives it. A request: strings,
        context and continuation."""
        rows = []
        for _, context, continuation in requests:
            if len(continuation) > self.max_length:
                raise ConfigError(
                    f"a task asks for a continuation of {len(continuation)} tokens; the model sees at most "
                    f"{self.max_length}."
                )
            rows.append(ScoredTokens((context + continuation)[-(self.max_length + 1) :], len(continuation)))
        return [
            (scored.log_probability, scored.greedy)
            for scored in score(self._answering, rows, self._batch_size, self._progress)
        ]

    def loglikelihood_rolling(self, requests: Sequence[Any], **_: Any) -> list[float]:
        """The log-probability of each whole text, in windows of the model's maximum length without overlap
        (except the last)."""
        texts = [
            list(
                windows(
                    [self.prefix_token_id, *self.tok_encode(request.args[0])],
                    self.max_length,
                    self.max_length,
                )
            )
            for request in requests
        ]
        scores = iter(
            score(self._answering, [row for rows in texts for row in rows], self._batch_size, self._progress)
        )
        return [sum(next(scores).log_probability for _ in rows) for rows in texts]

    def generate_until(self, requests: Sequence[Any], **_: Any) -> list[str]:
        """The continuation of each text, up to the first of its stop texts. Requests with equal options are
        batched."""
        alike: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            alike.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(number)
        answers: dict[int, str] = {}
        for options, numbers in alike.items():
            for start in range(0, len(numbers), self._batch_size):
                batch = numbers[start : start + self._batch_size]
                texts = self._continue(
                    [requests[number].args[0] for number in batch], json.loads(options), seed=batch[0]
                )
                answers |= dict(zip(batch, texts, strict=True))
                if self._progress is not None:
                    self._progress(len(answers), len(requests))
        return [answers[number] for number in range(len(requests))]

    def _continue(self, contexts: Sequence[str], options: dict[str, Any], seed: int) -> list[str]:
        count = next((int(options[name]) for name in LENGTHS if options.get(name) is not None), MAX_TOKENS)
        if not 0 < count < self.max_length:
            raise ConfigError(
                f"a task generates {count} tokens, and the model has positions for {self.max_length}, its "
                "question included. "
                "Set max_gen_toks in a copy of its YAML."
            )
        prompts = [
            self.tok_encode(context)[-(self.max_length - count) :] or [self.prefix_token_id]
            for context in contexts
        ]
        until, ends = options.get("until") or [], end_tokens(self._answering.source, self._tokenizer)
        replies = [
            _Reply(
                self._tokenizer,
                [stop for stop in ([until] if isinstance(until, str) else until) if stop],
                ends,
            )
            for _ in prompts
        ]
        for tokens in self._answering.continuations(
            prompts, count, sampling_of(options, seed), vocab_size=self._tokenizer.vocab_size
        ):
            for reply, token in zip(replies, tokens, strict=True):
                reply.add(token)
            if all(reply.done for reply in replies):
                break
        return [reply.text for reply in replies]


class _Reply:
    """The text of an answer while it is generated. As in the harness, its tokens are decoded without those of
    the context."""

    def __init__(self, tokenizer: Tokenizer, stops: list[str], ends: Collection[int]):
        self._tokenizer, self._stops, self._ends = tokenizer, stops, ends
        self._tokens: list[int] = []
        self.text, self.done = "", False

    def add(self, token: int) -> None:
        self.done = self.done or token in self._ends
        if self.done:
            return
        self._tokens.append(token)
        text = self._tokenizer.decode(self._tokens)
        stops = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        self.text, self.done = text[: min(stops, default=len(text))], bool(stops)


def document_start(source: ModelSource, tokenizer: Tokenizer) -> int:
    """The token before a text without context: BOS if there is one and the model's training documents had it,
    else EOS."""
    return tokenizer.eos if tokenizer.bos is None or source.trained_here else tokenizer.bos


def sampling_of(options: dict[str, Any], seed: int) -> Sampling:
    """The sampling that a task's options ask for. Raises ConfigError for an option that is not supported."""
    unknown = sorted(options.keys() - OPTIONS)
    if unknown:
        raise ConfigError(
            f"a task generates with {unknown[0]} = {options[unknown[0]]!r}, which is not handled here. It "
            f"may set {sorted(OPTIONS)}."
        )
    temperature = float(options.get("temperature") or 0.0)
    sampled = options.get("do_sample")
    greedy = sampled is False or (sampled is None and temperature == 0.0)
    return Sampling(
        0.0 if greedy else temperature or 1.0,
        int(options.get("top_k") or 0),
        float(options.get("top_p") or 1.0),
        seed,
    )


def as_harness_model() -> type[Any]:
    """`Answers` as a subclass of lm_eval.api.model.LM. Raises ConfigError if the harness is not installed."""
    try:
        from lm_eval.api.model import TemplateLM
    except ImportError as error:
        raise ConfigError(
            f"tasks need lm-evaluation-harness ({error}). Install it with: pip install 'megalite[eval]'"
        ) from None
    return type("Megalite", (Answers, TemplateLM), {})


def run(
    model: Answers,
    tasks: Sequence[str],
    *,
    include_path: Path | None,
    num_fewshot: int | None,
    limit: int | None,
) -> dict[str, Any]:
    """The harness's results on the tasks. Its output is redirected to stderr. Raises ConfigError if a task is
    unknown."""
    from lm_eval import simple_evaluate

    with redirect_stdout(sys.stderr):
        manager = _manager(tasks, include_path)
        unknown = [name for name in tasks if name not in manager.all_tasks]
        if unknown:
            place = "" if include_path is None else f" nor of {include_path}"
            raise ConfigError(
                f"--tasks {unknown[0]} is no task, group or tag of lm-evaluation-harness{place}. `lm-eval ls "
                "tasks` lists its own."
            )
        options: dict[str, Any] = {
            "num_fewshot": num_fewshot,
            "limit": limit,
            "task_manager": manager,
            "log_samples": False,
        }
        results: dict[str, Any] | None = simple_evaluate(model=model, tasks=list(tasks), **options)
    return results or {"results": {}}  # only the first rank of each machine gets results


def _manager(tasks: Sequence[str], include_path: Path | None) -> Any:
    """The harness's task manager. Indexing the harness's own thousands of tasks costs many seconds: skipped
    if `include_path` has all."""
    from lm_eval.tasks import TaskManager

    if include_path is not None:
        manager = TaskManager(include_path=str(include_path), include_defaults=False)
        if set(tasks) <= set(manager.all_tasks):
            return manager
    return TaskManager(include_path=None if include_path is None else str(include_path))
