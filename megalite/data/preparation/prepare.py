"""Text or conversations to a token file: read, tokenize in parallel, and write in the order of the input for any number of workers.

Workers receive tasks and return tokens. At most TASKS_AHEAD tasks per worker are in flight, so memory is bounded for any input size.
"""

import functools
import multiprocessing
import os
import signal
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.data import tokenizers as tokenizing
from megalite.data.chat_template import ChatTemplate
from megalite.data.indexed import DataError
from megalite.data.preparation.chats import Chats
from megalite.data.preparation.encoded import Encoded
from megalite.data.preparation.sources import Source, Task, documents
from megalite.data.preparation.writer import IndexedWriter
from megalite.processes import blocked, watch_parent

TRAINING_BYTES = 8_000_000  # of input to train a tokenizer on; more changes a vocabulary of thousands little and costs minutes
TASKS_AHEAD = 4

Progress = Callable[[str, int, int], None]
"""Called with the name of the phase, the input bytes done, and their total."""


@dataclass(frozen=True)
class Texts:
    """Encodes texts as documents that end in EOS. text_key: the key of a record's text."""

    text_key: str = "text"

    def encode(self, task: Task, tokenizer: tokenizing.Tokenizer) -> Encoded:
        tokens, sizes = array("i"), array("i")
        done = Encoded(input_bytes=task.size)
        for text, invalid in documents(task, self.text_key):
            done.replaced += invalid
            if text:
                ids = tokenizer.encode(text)
                tokens.extend(ids)
                tokens.append(tokenizer.eos)
                sizes.append(len(ids) + 1)
            else:
                done.empty += 1
        done.tokens, done.sizes = np.frombuffer(tokens, np.int32), np.frombuffer(sizes, np.int32)
        return done


@dataclass
class Summary:
    """What was written. `loss_tokens`: number of tokens whose loss is counted; `longest`: number of tokens of the longest document;
    `packed_rows`: number of rows into which conversations can be packed, each as long as the maximum length or, without one, as the longest
    conversation; the others as in `Encoded`."""

    prefix: str
    documents: int = 0
    tokens: int = 0
    vocab_size: int = 0
    eos: int = 0
    dtype: str = ""
    tokenizer: str = ""
    empty_documents: int = 0
    replaced_documents: int = 0
    input_bytes: int = 0
    loss_tokens: int = 0
    longest: int = 0
    too_long: int = 0
    without_loss: int = 0
    forms: list[str] = field(default_factory=list)
    packed_rows: int = 0

    def add(self, part: Encoded) -> None:
        self.documents += len(part.sizes)
        self.tokens += len(part.tokens)
        self.empty_documents += part.empty
        self.replaced_documents += part.replaced
        self.input_bytes += part.input_bytes
        self.loss_tokens += len(part.tokens) if part.mask is None else int(part.mask.sum())
        self.longest = max(self.longest, int(part.sizes.max(initial=0)))
        self.too_long += part.too_long
        self.without_loss += part.without_loss
        self.forms = sorted({*self.forms, *part.forms})


def prepare(
    sources: list[Source],
    prefix: Path,
    tokenizer: str,
    *,
    train_tokenizer: int | None = None,
    text_key: str = "text",
    chat: Chats | None = None,
    workers: int = 1,
    progress: Progress = lambda what, done, total: None,
) -> Summary:
    """Tokenize every document of the sources and write PREFIX.bin, .idx and .json, and for conversations PREFIX.loss.bin and .idx.

    tokenizer: byte, a sentencepiece model, or a Hugging Face directory. With `train_tokenizer`, a vocabulary size, a sentencepiece model is
    first trained on the sources and written to that name. `chat`: the sources hold conversations, not texts. Raises DataError on bad input.
    After an error or an interrupt no files are left.
    """
    encoder = chat or Texts(text_key)
    if train_tokenizer is None:
        return _encode(sources, prefix, tokenizer, tokenizer, encoder, workers, progress)
    with _trained(sources, train_tokenizer, Path(tokenizer), text_key, progress) as model:
        return _encode(sources, prefix, str(model), tokenizer, encoder, workers, progress)


def _encode(
    sources: list[Source], prefix: Path, loaded: str, named: str, encoder: Texts | Chats, workers: int, progress: Progress
) -> Summary:
    """Tokenize and write. loaded: the tokenizer's current path; named: its final path, which PREFIX.json names."""
    vocabulary = tokenizing.load(loaded)
    summary = Summary(str(prefix), vocab_size=vocabulary.vocab_size, eos=vocabulary.eos, tokenizer=_beside(named, prefix))
    total = sum(source.size for source in sources)
    with IndexedWriter(prefix, vocabulary.vocab_size, masked=isinstance(encoder, Chats)) as writer:
        summary.dtype = writer.dtype.name
        for part in _encoded(_tasks(sources), loaded, encoder, workers):
            writer.add(part.tokens, part.sizes, part.mask)
            summary.add(part)
            progress("tokenizing", summary.input_bytes, total)
        if loaded != named:
            Path(loaded).replace(named)
        if isinstance(encoder, Chats):
            _check_left(summary, encoder)
            summary.packed_rows = _packed_rows(np.array(writer.sizes), encoder.max_length or summary.longest)
        facts = asdict(summary)
        files = vocabulary.files if loaded == named else [Path(named)]
        writer.finish(
            {key: facts[key] for key in ("vocab_size", "eos", "tokenizer", "documents", "tokens")}
            | {"tokenizer_files": [_beside(str(file), prefix) for file in files]}
            | (_chat_facts(encoder, vocabulary, summary) if isinstance(encoder, Chats) else {})
        )
    return summary


def _check_left(summary: Summary, chat: Chats) -> None:
    """Raise DataError if conversations were read but none of them can be learned from."""
    if not summary.documents and summary.too_long + summary.without_loss:
        long = f"{summary.too_long:,} conversations were longer than --max_length {chat.max_length}, " if summary.too_long else ""
        raise DataError(
            f"{summary.prefix}: the input has nothing to train on: {long}{summary.without_loss:,} had no token to learn under --loss_on "
            f"{chat.loss_on}. Nothing was written."
        )


def _packed_rows(sizes: NDArray[np.int32], longest: int) -> int:
    """Number of rows into which conversations of these sizes are packed, each as long as the longest one."""
    from megalite.data.dataset import best_fit  # imports torch, which preparing texts does not need

    return int(best_fit(sizes - 1, longest - 1).max(initial=-1)) + 1


def _chat_facts(chat: Chats, tokenizer: tokenizing.Tokenizer, summary: Summary) -> dict[str, Any]:
    """The entry `chat` of PREFIX.json: enough to render further conversations in the same way."""
    template = ChatTemplate(tokenizer, chat.template)
    facts = {"template_hash": template.hash, "forms": summary.forms, "loss_on": chat.loss_on, "loss_tokens": summary.loss_tokens}
    return {"chat": facts | {"longest": summary.longest, "template": template.source}}


@contextmanager
def _trained(sources: list[Source], vocab_size: int, path: Path, text_key: str, progress: Progress) -> Iterator[Path]:
    """A sentencepiece model trained on TRAINING_BYTES spread evenly over the input; a temporary file in the directory of `path`."""
    total = sum(source.size for source in sources)
    every = -(-total // TRAINING_BYTES) or 1

    def texts() -> Iterator[str]:
        seen = 0
        for number, task in enumerate(_tasks(sources)):
            seen += task.size
            progress("reading for the tokenizer", seen, total)
            if number % every == 0:
                yield from (text for text, _ in documents(task, text_key))

    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.{os.getpid()}.model"
    try:
        tokenizing.train_sentencepiece(texts(), vocab_size, temporary)
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def _tasks(sources: list[Source]) -> Iterator[Task]:
    return (task for source in sources for task in source.tasks())


def _encoded(tasks: Iterator[Task], tokenizer: str, encoder: Texts | Chats, workers: int) -> Iterator[Encoded]:
    """The results of the tasks, in their order."""
    if workers == 1:
        yield from (_encode_task(task, tokenizer, encoder) for task in tasks)
        return
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=watch_parent)
    ahead: deque[Future[Encoded]] = deque()
    try:
        for task in tasks:
            with blocked([signal.SIGINT]):  # the first task starts the workers, which leave Ctrl-C to this process
                ahead.append(pool.submit(_encode_task, task, tokenizer, encoder))
            if len(ahead) > TASKS_AHEAD * workers:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    except BrokenProcessPool:
        raise DataError(f"--workers {workers}: a worker was killed, most likely because memory ran out. Use fewer workers.") from None
    finally:
        pool.shutdown(cancel_futures=True)


_vocabulary = functools.cache(tokenizing.load)  # a worker loads its tokenizer once


def _encode_task(task: Task, tokenizer: str, encoder: Texts | Chats) -> Encoded:
    return encoder.encode(task, _vocabulary(tokenizer))


def _beside(tokenizer: str, prefix: Path) -> str:
    """The tokenizer's name in PREFIX.json: its file name if it is in PREFIX's directory, which may then move; else its absolute path."""
    if tokenizer == "byte":
        return tokenizer
    path = Path(tokenizer).resolve()
    return path.name if path.parent == prefix.parent.resolve() else str(path)
