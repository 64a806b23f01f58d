"""What an indexer exchanges under context parallelism, see `parallel.context.selected`."""

from __future__ import annotations

from megalite.config.sections.model import ModelConfig
from megalite.model.cost.records import ContextExchange, Share


def with_indexer(
    exchanges: tuple[ContextExchange, ...], model: ModelConfig, share: Share, selects: bool, trained: bool
) -> tuple[ContextExchange, ...]:
    """Return the exchanges of latent attention with those of an indexer.

    Its keys are gathered, and their gradients summed. For Ulysses selections are gathered, and the
    probabilities of the heads of other ranks summed.

    Args:
        selects: whether rows are longer than a selection.
        trained: whether there is a loss.
    """
    if not exchanges:
        return ()
    (exchange,) = exchanges
    keys = share.own_tokens * share.cp * model.index_head_dim
    states = 0
    if share.context == "ulysses" and selects:
        states = share.tokens * share.cp * (model.index_topk or 0) * (2 if trained else 1)
    return (
        exchange._replace(
            forward=exchange.forward + keys, summed=exchange.summed + keys * trained, states=states
        ),
    )
