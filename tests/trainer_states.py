"""All that the next update of a trainer depends on, to be compared before and after."""

import copy
import random

import numpy as np
import torch

QUICK = {"num_updates": 24, "repeats": 2}


def state_of(trainer):
    """All that an update depends on, as copies."""
    return copy.deepcopy(
        {
            "model": trainer.run.model.state_dict(),
            "training": trainer.run.model.training,
            "optimizer": trainer.run.optimizer.state_dict(),
            "ema": trainer.run.average.state_dict() if trainer.run.average else None,
            "schedule": trainer.run.feedback and trainer.run.feedback.state_dict(),
            "objective": trainer.run.objective.state_dict(),
            "observer": trainer.log.observer.state_dict(),
            "random": [torch.get_rng_state(), torch.tensor(np.random.get_state()[1].astype(np.int64)), random.getstate()[1]],
            "clock": [trainer.run.update, trainer.log.sums, trainer.run.training_seconds],
            "skipped": list(trainer.run.data.skipped),
            "draw": trainer.run.objective.sampler.draw,
        }
    )


def assert_same(found, expected, where="state"):
    """To the bit, in nested containers; NaN equals NaN."""
    if isinstance(expected, (dict, list, tuple)):
        assert len(found) == len(expected), where
        for key in expected if isinstance(expected, dict) else range(len(expected)):
            assert_same(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype, where
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    else:
        assert found == expected or found != found != expected != expected, where  # both are NaN
