"""Gradients of several passes of a rank before one optimizer step.

Megatron's schedule ends every pass by reducing the gradients over the ranks. A second pass would
then add its own share to what is a sum over all ranks already. So the passes of an accumulated step
leave their gradients on the ranks, and the reduction is made once, before the step: no memory more
than that of the gradients, and no communication more than an ordinary update's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron.core.distributed import finalize_model_grads

from miniverl_dist.backends.megatron.setup import MegatronModel


@contextmanager
def unreduced_gradients(model: MegatronModel) -> Iterator[None]:
    """Passes in this block add their gradients to those of this rank, and reduce nothing."""
    reduce = model.config.finalize_model_grads_func
    model.config.finalize_model_grads_func = None
    try:
        yield
    finally:
        model.config.finalize_model_grads_func = reduce


def reduce_gradients(model: MegatronModel, divisor: float) -> None:
    """The step's gradient out of all ranks' sums; every rank calls it at the same time.

    Args:
        model: Whose gradients the passes have left unreduced.
        divisor: Tokens or sequences of the step.
    """
    model.ddp.scale_gradients(1 / divisor)
    finalize_model_grads([model.ddp])
