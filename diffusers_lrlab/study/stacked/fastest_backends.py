"""Which matrix products are fastest on this machine, by a short measurement before a study."""

import copy
import json
import statistics
import time
from typing import Any

import torch

from ...core.files import write_text
from ..runs.context import StudyContext
from .matmul_backends import CANDIDATES, STOCK
from .stacked_mlp import StackedMLP

_MEMBERS = 4  # the order does not change with more
_ROUNDS = 12


def backends_of_study(study: StudyContext, model: Any, batch: int) -> dict[str, str]:
    """
    The fastest matrix products for stacks of a network, measured once for a study and a machine.

    They are saved, since rounding depends on them: a study that goes on, or that gets more runs, computes what it would
    have computed. So they do not depend on how many runs there are.
    """
    file = study.folder.path / "products.json"
    try:
        known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    except ValueError:
        study.progress.log(f"{str(file)!r} is damaged: which products are fastest is measured again.")
        known = {}
    shape = "x".join(str(parameter.numel()) for parameter in model.parameters())
    machine = [study.meta["processor"], str(study.meta["cpu_cores"]), study.meta["versions"]["torch"], study.precision]
    key = ", ".join([f"parameters {shape}", f"batch {batch}", *machine])
    if key not in known:
        known[key] = fastest_backends(model, batch)
        write_text(file, json.dumps(known, indent=1) + "\n")
    return known[key]


def fastest_backends(model: Any, batch: int) -> dict[str, str]:
    """
    The fastest of `CANDIDATES` for stacks of such networks, by forward and backward passes in turn: about a second.

    From kinds of products to names of backends; torch's own wherever there is nothing to choose. The model is not changed.
    """
    on_cpu = model.device.type == "cpu" and model.dtype == torch.float32
    if not (on_cpu and torch.backends.mkldnn.is_available()):
        return STOCK
    networks = [copy.deepcopy(model) for _ in range(_MEMBERS)]
    shape = (len(networks), batch, model.config.dimension)
    points, timesteps = torch.zeros(shape), torch.zeros(shape[:2], dtype=torch.int64)
    stacks = {name: StackedMLP(copy.deepcopy(networks), batch, backends) for name, backends in CANDIDATES.items()}
    times: dict[str, list[float]] = {name: [] for name in stacks}
    for turn in range(_ROUNDS + 2):
        for name, stack in stacks.items():
            started = time.perf_counter()
            stack.backward(stack.forward(points, timesteps).clone())
            if turn >= 2:  # the first ones load code and memory
                times[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(values) for name, values in times.items()}
    return CANDIDATES[min(medians, key=medians.__getitem__)]
