"""Lion with cautious weight decay, apart from other optimizers since its package is optional."""

import inspect

from lion_pytorch import Lion

from .cautious import CautiousDecay


class CautiousLion(CautiousDecay, Lion):
    """`lion_pytorch.Lion` with cautious weight decay."""

    plain_step = inspect.unwrap(Lion.step)
