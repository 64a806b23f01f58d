"""Preparation of token files: reads and tokenizes in parallel, and writes in the order of the input.

A preparation that was killed continues from its journal; one that is complete is neither done again nor
replaced unasked.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from megalite.config.samples import best_fit, inputs_of
from megalite.data.chat.template import ChatTemplate
from megalite.data.indexed import DataError
from megalite.data.preparation import earlier, shards
from megalite.data.preparation.chats import Chats
from megalite.data.preparation.contents import without_mark
from megalite.data.preparation.encoded import Encoded
from megalite.data.preparation.first_records import check_first
from megalite.data.preparation.journal import Journal, Note, digest, key_of, locked
from megalite.data.preparation.pool import WorkerLost, default_workers, encoded
from megalite.data.preparation.preferences import PreferenceEncoder
from megalite.data.preparation.shards import Merge, PreparationShard
from megalite.data.preparation.sources import InputSource
from megalite.data.preparation.tasks import SHOWN, BadRecords, Task, decoded, documents, listed
from megalite.data.preparation.texts import Texts
from megalite.data.preparation.writer import IndexedWriter
from megalite.data.tokenizer import tokenizers as tokenizing
from megalite.data.tokenizer.identity import digest_of, fingerprint
from megalite.system.progress import Report, silent

# of input to train a tokenizer on; more changes a vocabulary of thousands little and costs minutes
TRAINING_BYTES = 8_000_000


Encoder = Texts | Chats | PreferenceEncoder


@dataclass
class PreparationSummary:
    """Summary of a preparation.

    Attributes:
        loss_tokens: number of tokens whose loss is counted.
        longest: number of tokens of the longest document.
        packed_rows: number of rows after packing conversations into rows of `row_length`.
        row_length: data.sequence_length that holds a conversation, or a pair, of the maximum length or,
            without one, each of them.
        skipped, skipped_first: number of bad records that were skipped, and the first of them with location
            and reason.
        resumed_bytes: bytes of the input that an interrupted preparation had processed.
        existing: the same preparation was complete already, and nothing was written.
        others: as in `Encoded`.
    """

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
    shortest_too_long: int = 0
    without_loss: int = 0
    forms: list[str] = field(default_factory=list)
    packed_rows: int = 0
    row_length: int = 0
    skipped: int = 0
    skipped_first: list[str] = field(default_factory=list)
    chosen: int = 0
    rejected: int = 0
    equal: int = 0
    resumed_bytes: int = 0
    existing: bool = False

    def add(self, part: Encoded, replaced_before: bool) -> None:
        """Add the counts of a result.

        Args:
            replaced_before: the document that it continues has already been counted for replaced bytes.
        """
        self.documents += len(part.sizes) - part.continues
        self.tokens += len(part.tokens)
        self.empty_documents += part.empty
        self.replaced_documents += 0 if part.continues and replaced_before else part.replaced
        self.input_bytes += part.input_bytes
        self.loss_tokens += len(part.tokens) if part.mask is None else int(np.count_nonzero(part.mask))
        self.too_long += part.too_long
        shortest = [length for length in (self.shortest_too_long, part.shortest_too_long) if length]
        self.shortest_too_long = min(shortest, default=0)
        self.without_loss += part.without_loss
        self.chosen, self.rejected = self.chosen + part.chosen, self.rejected + part.rejected
        self.equal += part.equal
        self.forms = sorted({*self.forms, *part.forms})
        self.skipped += part.bad
        self.skipped_first += [error.reason for error in part.bad_first[: SHOWN - len(self.skipped_first)]]


@dataclass(frozen=True)
class _Job:
    """A preparation.

    Attributes:
        loaded: the current path of the tokenizer.
        named: its final path, which PREFIX.json records.
        key: of the whole preparation.
        own_key: of what is written, the whole or a shard.
        shard: the part of the input that is read; None: all of it.
        merged: shards that are read in place of the input.
    """

    sources: list[InputSource]
    prefix: Path
    loaded: str
    named: str
    encoder: Encoder
    workers: int
    progress: Report
    note: Note
    key: str
    own_key: str
    journal: Journal
    shard: PreparationShard | None = None
    merged: Sequence[PreparationShard] = ()

    @property
    def size(self) -> int:
        size = sum(source.size for source in self.sources)
        return size if self.shard is None else size // self.shard.count

    def tasks(self) -> Iterator[Task]:
        if self.shard is not None:
            return self.shard.tasks(self.sources)
        return (task for source in self.sources for task in source.tasks())

    def parts(self, vocabulary: tokenizing.Tokenizer, done: int) -> Iterator[Encoded]:
        """Yield the tokenized documents, except those of the first `done` parts."""
        if self.merged:
            return islice(shards.merged_parts(self.merged), done, None)
        return encoded(islice(self.tasks(), done, None), vocabulary, self.encoder, self.workers)


def prepare(
    sources: list[InputSource],
    prefix: Path | PreparationShard | Merge,
    tokenizer: str,
    encoder: Encoder = Texts(),  # noqa: B008 — frozen
    *,
    train_tokenizer: int | None = None,
    overwrite: bool = False,
    workers: int | None = 1,
    progress: Report = silent,
    note: Note = lambda line: None,
) -> PreparationSummary:
    """Tokenize the documents of the sources and write a token file.

    Writes PREFIX.bin, .idx and .json, and for conversations PREFIX.loss.bin and .idx.

    Args:
        sources: inputs, in the order of the documents.
        prefix: path prefix of the files; or a shard, to prepare only its part of the input; or the merge of
            all shards, which are then removed.
        tokenizer: byte, a sentencepiece model, or a Hugging Face directory.
        encoder: encoder for texts or conversations, which also reads them.
        train_tokenizer: vocabulary size of a sentencepiece model that is first trained on the sources, which
            must be texts, and written to `tokenizer`.
        overwrite: replace an earlier preparation of PREFIX, and the file of a tokenizer that is trained.
        workers: number of processes; None: the usable cores, or fewer for little input.
        progress: called with the phase, the processed input bytes, and their total.
        note: called with lines for the user.

    Raises:
        DataError: on bad input, if PREFIX contains another preparation, or if another process writes it.
            After an error or an interrupt no files are left.
    """
    check_first(sources, encoder)
    if isinstance(encoder, PreferenceEncoder):
        encoder = encoder.of_kind_in(sources)
    whole = prefix if isinstance(prefix, Path) else prefix.whole
    vocabulary, identity = _loaded(tokenizer, train_tokenizer, encoder, note)
    key = key_of(
        _beside(tokenizer, whole),
        identity,
        repr(encoder),
        [(type(source).__name__, source.identity) for source in sources],
    )
    workers = workers or default_workers(sum(source.size for source in sources))
    shard = prefix if isinstance(prefix, PreparationShard) else None
    if shard is not None and not overwrite and (summary := earlier.summary_of(whole, key)) is not None:
        return PreparationSummary(str(whole), **summary)  # merged already
    merges, place = isinstance(prefix, Merge), whole if shard is None else shard.prefix
    own_key = key if shard is None else shard.key(key)
    journal = Journal(place, key_of(key, "merge") if merges else own_key)
    job = _Job(
        sources, place, tokenizer, tokenizer, encoder, workers, progress, note, key, own_key, journal, shard
    )
    with locked(place):
        if not overwrite and (summary := earlier.summary_of(place, own_key)) is not None:
            shards.remove(shards.remaining_shards(whole, key) if merges else [])
            return PreparationSummary(str(place), **summary)
        if not overwrite and train_tokenizer is not None:
            earlier.check_new(Path(tokenizer))
        merged = shards.complete_shards(whole, key) if merges else []
        with journal:
            return _continued(replace(job, merged=merged), vocabulary, train_tokenizer)


def _continued(
    job: _Job, vocabulary: tokenizing.Tokenizer | None, train_tokenizer: int | None
) -> PreparationSummary:
    """Prepare what an interrupted preparation has not, with its journal."""
    if job.journal.foreign:
        job.note(
            f"{job.prefix}: discarding an interrupted preparation with different inputs or options and "
            "starting over"
        )
    if vocabulary is None:
        assert train_tokenizer is not None
        with _trained(job, train_tokenizer) as model:
            return _encode(replace(job, loaded=str(model)), tokenizing.load(model))
    summary = _encode(job, vocabulary)
    shards.remove(job.merged)
    return summary


def _loaded(
    tokenizer: str, train_tokenizer: int | None, encoder: Encoder, note: Note
) -> tuple[tokenizing.Tokenizer | None, list[Any]]:
    """Return the tokenizer, or None if it is still to be trained, and what identifies it."""
    if train_tokenizer is not None:
        return None, [train_tokenizer, TRAINING_BYTES]
    vocabulary = tokenizing.load(tokenizer)
    if vocabulary.unused_ids:
        note(
            f"{tokenizer}: {vocabulary.unused_ids} of {vocabulary.vocab_size} ids are unused; the "
            "embedding still has rows for them"
        )
    identity: list[Any] = [
        vocabulary.vocab_size,
        vocabulary.eos,
        vocabulary.chat_template,
        *map(digest, vocabulary.files),
    ]
    if not isinstance(encoder, Texts):
        identity.append(vocabulary.ends)
    return vocabulary, identity


def _encode(job: _Job, vocabulary: tokenizing.Tokenizer) -> PreparationSummary:
    """Tokenize and write."""
    encoder, named, prefix = job.encoder, job.named, job.prefix
    summary = PreparationSummary(
        str(prefix), vocab_size=vocabulary.vocab_size, eos=vocabulary.eos, tokenizer=_beside(named, prefix)
    )
    with _writer(job, vocabulary, summary) as writer:
        summary.dtype = writer.dtype.name
        _write_parts(job, vocabulary, writer, summary)
        if not isinstance(encoder, Texts) and job.shard is None:
            _check_left(summary, encoder)
        sizes = np.array(writer.sizes)
        summary.longest = int(sizes.max(initial=0))
        if not isinstance(encoder, Texts):
            together = 2 if isinstance(encoder, PreferenceEncoder) and encoder.kind == "pairs" else 1
            lengths = inputs_of(sizes, together).reshape(-1, together).sum(1)
            limit = inputs_of(np.array([encoder.max_length or 0]), together)[0]
            longest = together * limit if encoder.max_length else lengths.max(initial=0)
            summary.row_length = int(longest)
            summary.packed_rows = int(best_fit(lengths, summary.row_length).max(initial=-1)) + 1
        if not summary.documents and summary.skipped and job.shard is None:
            raise DataError(
                f"{prefix}: all records of the input are bad. Nothing was "
                f"written.{listed(summary.skipped_first)}"
            )
        if job.loaded != named:
            Path(job.loaded).replace(named)
        facts = asdict(summary)
        files = vocabulary.files if job.loaded == named else [Path(named)]
        writer.finish(
            {key: facts[key] for key in earlier.TOP}
            | {"tokenizer_files": [_beside(str(file), prefix) for file in files]}
            | {"tokenizer_fingerprint": fingerprint(vocabulary), "tokenizer_digest": digest_of(named, files)}
            | ({} if isinstance(encoder, Texts) else _chat_facts(encoder, vocabulary, summary, writer))
            | ({} if job.shard is None else shards.entry_of(job.key))
            | {"preparation": earlier.entry(job.own_key, facts)},
            may_be_empty=job.shard is not None,
        )
    return summary


def _writer(job: _Job, vocabulary: tokenizing.Tokenizer, summary: PreparationSummary) -> IndexedWriter:
    """Return the writer, positioned after the data of an interrupted preparation.

    The counts of that preparation are added to the summary.
    """
    masked, state = not isinstance(job.encoder, Texts), job.journal.state
    if state is not None and state.get("position"):
        try:
            writer = IndexedWriter(job.prefix, vocabulary.vocab_size, masked, state["position"])
        except (OSError, EOFError) as error:
            job.note(f"{job.prefix}: could not resume the interrupted preparation ({error}); starting over")
            job.journal.reject()
        else:
            summary.__dict__.update(state["summary"])
            summary.resumed_bytes = summary.input_bytes
            job.note(
                f"{job.prefix}: resuming an interrupted preparation at {summary.input_bytes / 1e6:.1f} of "
                f"{job.size / 1e6:.1f} MB"
            )
            return writer
    return IndexedWriter(job.prefix, vocabulary.vocab_size, masked)


def _write_parts(
    job: _Job, vocabulary: tokenizing.Tokenizer, writer: IndexedWriter, summary: PreparationSummary
) -> None:
    """Append the results of all tasks, and save the journal periodically.

    Raises DataError if there are too many bad records.
    """
    state = job.journal.state or {}
    done, replaced = state.get("tasks", 0), state.get("replaced", False)

    def save() -> None:
        counts = {
            "tasks": done,
            "replaced": replaced,
            "position": writer.position(),
            "summary": asdict(summary),
        }
        job.journal.save(
            {**(job.journal.state or {}), **counts}, [Path(job.loaded)] if job.loaded != job.named else []
        )

    try:
        for part in job.parts(vocabulary, done):
            writer.add(part.tokens, part.sizes, part.mask, part.continues)
            summary.add(part, replaced)
            replaced, done = (
                bool(part.replaced or (replaced and (part.continues or not len(part.sizes)))),
                done + 1,
            )
            if summary.skipped > job.encoder.skip_bad:
                raise DataError(
                    f"{summary.prefix}: the input has more bad records than --skip_bad "
                    f"{job.encoder.skip_bad} allows.{listed(summary.skipped_first)}"
                )
            if job.journal.due():
                save()
            job.progress("tokenizing", summary.input_bytes, job.size, "B")
    except WorkerLost:
        save()
        job.journal.kept = writer.kept = True
        raise


def _check_left(summary: PreparationSummary, encoder: Chats | PreferenceEncoder) -> None:
    """Raise DataError if conversations were read but none has a token with loss."""
    if not summary.documents and summary.too_long + summary.without_loss:
        reasons, way_out = [], ""
        what = "conversation" if isinstance(encoder, Chats) else "preference"
        if summary.too_long:
            reasons.append(f"{summary.too_long:,} {what}s were longer than --max_length {encoder.max_length}")
            cuts = encoder.truncate if isinstance(encoder, Chats) else encoder.too_long != "drop"
            way_out = (
                f" The shortest of them has {summary.shortest_too_long:,} tokens: raise --max_length"
                f"{'' if cuts else ', or pass --too_long truncate'}."
            )
        if isinstance(encoder, Chats):
            reasons.append(f"{summary.without_loss:,} had no trained token with --loss_on {encoder.loss_on}")
        raise DataError(
            f"{summary.prefix}: no {what} can be trained on: {', '.join(reasons)}. Nothing was written."
            f"{way_out}"
        )


def _chat_facts(
    encoder: Chats | PreferenceEncoder,
    tokenizer: tokenizing.Tokenizer,
    summary: PreparationSummary,
    writer: IndexedWriter,
) -> dict[str, Any]:
    """Return the entry `chat` of PREFIX.json, with which further conversations can be rendered in the same
    way, and for preferences their kind.
    """
    template = ChatTemplate(tokenizer, encoder.template)
    facts: dict[str, Any] = {
        "template_hash": template.hash,
        "forms": summary.forms,
        "loss_on": encoder.loss_on if isinstance(encoder, Chats) else "completion",
        "loss_tokens": summary.loss_tokens,
    }
    if writer.loss_dtype.kind == "f":
        facts["loss_dtype"] = writer.loss_dtype.name
    facts |= {"longest": summary.longest, "template": template.source}
    return {"chat": facts} | ({"preference": encoder.kind} if isinstance(encoder, PreferenceEncoder) else {})


@contextmanager
def _trained(job: _Job, vocab_size: int) -> Iterator[Path]:
    """Train a sentencepiece model on TRAINING_BYTES, spread evenly over the input.

    Yields a temporary file in the directory of the tokenizer. The model of an interrupted preparation is
    reused.
    """
    path, total = Path(job.named), job.size
    every = -(-total // TRAINING_BYTES) or 1

    def texts() -> Iterator[str]:
        seen = 0
        for number, task in enumerate(job.tasks()):
            seen += task.size
            job.progress("reading for the tokenizer", seen, total, "B")
            if number % every == 0:
                yield from _training_texts(task, job.encoder)

        job.progress("training the tokenizer")  # once the texts are read

    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.preparing.model"
    state = job.journal.state or {}
    try:
        if "model" not in state or state["model"] != digest(temporary):
            tokenizing.train_sentencepiece(texts(), vocab_size, temporary)
            job.journal.state = {"model": digest(temporary)}  # other tokens than those written before, if any
            job.journal.save(job.journal.state, [temporary])
        yield temporary
    finally:
        if not job.journal.kept:
            temporary.unlink(missing_ok=True)


def _training_texts(task: Task, encoder: Encoder) -> Iterator[str]:
    """Yield the texts of a task. Of a long text, the exact byte range is used."""
    if task.piece is None:
        assert isinstance(encoder, Texts)
        yield from (text for text, _ in documents(task, encoder.text_key, BadRecords(encoder.skip_bad > 0)))
    else:
        with task.piece.path.open("rb") as file:
            file.seek(task.piece.start)
            raw = file.read(task.piece.stop - task.piece.start)
        yield decoded(without_mark(raw) if task.piece.start == 0 else raw)[0]


def _beside(tokenizer: str, prefix: Path) -> str:
    """Return the tokenizer's name in PREFIX.json.

    A tokenizer in PREFIX's directory is recorded by its file name, so the directory can be moved. Others are
    recorded by their absolute path.
    """
    if tokenizer == "byte":
        return tokenizer
    path = Path(tokenizer).resolve()
    return path.name if path.parent == prefix.parent.resolve() else str(path)
