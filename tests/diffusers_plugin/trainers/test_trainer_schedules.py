"""The schedules that trainers make by their own functions, from the checkouts that environment variables name.

Each is stepped as its trainer steps it, with accumulation, on two processes where accelerate steps it, and after a resume.
diffusion-pipe has a closed list, and is served by the launcher's `--lr_scheduler`.
"""

import copy
import warnings
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from own_code import checkout, names_of
from schedule_rows import BASE, close

from diffusers_lrlab import lr_curve

N, WARMUP, ACCUMULATION, DONE = 24, 4, 4, 10
SPECS = ["rex:d=0.9", "wsd:decay_type=1-sqrt", "mdlrc", "step:gamma=0.5", "cosine_with_min_lr:min_lr_rate=0.1"]


def kohya_arguments(spec, **changed):
    name = spec.partition(":")[0] if spec.startswith("cosine") else spec  # a name of transformers' own
    none = ("lr_scheduler_timescale", "lr_scheduler_args", "lr_scheduler_type", "optimizer_schedulefree_wrapper")
    options = {"lr_scheduler": name, "max_train_steps": N, "lr_warmup_steps": WARMUP / N, "lr_decay_steps": 0}
    options |= {"lr_scheduler_num_cycles": 1, "lr_scheduler_power": 1.0, "lr_scheduler_min_lr_ratio": 0.1}
    options |= {"optimizer_type": "AdamW", "learning_rate": BASE}
    return SimpleNamespace(**options, **dict.fromkeys(none), **changed)


def by_sd_scripts(spec, optimizer, processes, done):
    code = names_of(checkout("sd-scripts") / "library" / "train_util.py")
    return code["get_scheduler_fix"](kohya_arguments(spec), optimizer, processes)


def by_musubi_tuner(spec, optimizer, processes, done):
    code = names_of(checkout("musubi-tuner") / "src" / "musubi_tuner" / "training" / "trainer_base.py")
    return code["NetworkTrainer"]().get_lr_scheduler(kohya_arguments(spec), optimizer, processes)


def by_simpletuner(spec, optimizer, processes, done):
    code = names_of(checkout("SimpleTuner") / "simpletuner" / "helpers" / "training" / "custom_schedule.py")
    options = {"lr_scheduler": spec, "lr_warmup_steps": WARMUP, "max_train_steps": N, "lr_num_cycles": 1, "lr_power": 1.0}
    accelerator = SimpleNamespace(num_processes=processes)
    return code["get_lr_scheduler"](SimpleNamespace(**options), optimizer, accelerator, mock.MagicMock(), done)


def by_ai_toolkit(spec, optimizer, processes, done):
    code = names_of(checkout("ai-toolkit") / "toolkit" / "scheduler.py")
    return code["get_lr_scheduler"](spec, optimizer, total_iters=N, num_warmup_steps=WARMUP)


def by_onetrainer(spec, optimizer, processes, done):
    code = names_of(checkout("OneTrainer") / "modules" / "util" / "create.py")
    kinds = code["LearningRateScheduler"]
    name, _, parameters = spec.partition(":")
    given = [part.partition("=")[::2] for part in parameters.split(",") if part]
    given = [(key, value if value[0].isdigit() and "-" not in value else repr(value)) for key, value in given]
    given += [("num_training_steps", "%TOTAL_STEPS%"), ("num_warmup_steps", str(WARMUP))]
    config = mock.MagicMock()
    config.optimizer.optimizer.is_schedule_free = False
    config.custom_learning_rate_scheduler = f"diffusers_lrlab.get_{name}_schedule"
    config.scheduler_params = [{"key": key, "value": value} for key, value in given]
    return code["create_lr_scheduler"](
        config, optimizer, kinds.CUSTOM, 0, 1.0, 0.0, N, 1, ACCUMULATION, ACCUMULATION, done * ACCUMULATION
    )


# The function, its processes, and whether accelerate steps the schedule. ai-toolkit makes it too short on two processes.
TRAINERS = {
    "sd-scripts": (by_sd_scripts, 2, True),
    "musubi-tuner": (by_musubi_tuner, 2, True),
    "SimpleTuner": (by_simpletuner, 2, True),
    "ai-toolkit": (by_ai_toolkit, 1, False),
    "OneTrainer": (by_onetrainer, 1, False),
}


@pytest.fixture
def accelerate_states():
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Run:
    """Updates of micro-batches, with the schedule wrapped by accelerate or stepped once per update."""

    def __init__(self, make, spec, processes, is_wrapped, done=0, onetrainer=False):
        model = torch.nn.Linear(1, 1)
        group = {"params": list(model.parameters()), "lr": BASE} | ({"initial_lr": BASE} if onetrainer else {})
        self.optimizer = torch.optim.AdamW([group])
        self.schedule = make(spec, self.optimizer, processes, done)
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATION)
        self.model, self.is_wrapped = model, is_wrapped
        if is_wrapped:
            self.model, self.optimizer, self.schedule = self.accelerator.prepare(model, self.optimizer, self.schedule)
            PartialState().num_processes = processes

    def train(self, updates):
        rates = []
        for micro_batch in range(updates * ACCUMULATION):
            with self.accelerator.accumulate(self.model):
                ends = micro_batch % ACCUMULATION == ACCUMULATION - 1
                rates += [self.optimizer.param_groups[0]["lr"]] * ends
                self.accelerator.backward(self.model(torch.ones(1)).sum())
                if self.is_wrapped or ends:
                    self.optimizer.step()
                    self.schedule.step()
                    self.optimizer.zero_grad()
        return rates


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_trainers_own_function_makes_the_curve(trainer, spec, accelerate_states):
    make, processes, is_wrapped = TRAINERS[trainer]
    curve = lr_curve(spec, BASE, WARMUP, N)
    run = Run(make, spec, processes, is_wrapped)
    close(run.train(DONE), curve[:DONE])
    state, of_optimizer = (copy.deepcopy(each.state_dict()) for each in (run.schedule, run.optimizer))
    close(run.train(N - DONE), curve[DONE:])

    resumed = Run(make, spec, processes, is_wrapped, DONE * (trainer == "OneTrainer"), trainer == "OneTrainer")
    if trainer == "ai-toolkit":  # it saves no state of the schedule
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            resumed.schedule.step(DONE)
    elif trainer != "OneTrainer":  # which makes it anew
        resumed.optimizer.load_state_dict(of_optimizer)
        resumed.schedule.load_state_dict(state)
    close(resumed.train(N - DONE), curve[DONE:])
