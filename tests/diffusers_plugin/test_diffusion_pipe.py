"""`--lr_scheduler` of the launcher in a program of diffusion-pipe's shape, whose list of schedules is closed.

The statements that make its scheduler are copied here. The engine steps the optimizer and the scheduler once per update and
keeps their states, as DeepSpeed's does, which a slow test uses where it can be imported.
"""

import importlib.util
import json
import subprocess
import sys

import pytest
from launched_here import launch_here
from runs import environment
from schedule_rows import close

from diffusers_lrlab import lr_curve

LR, N, WARMUP, DONE = 1e-3, 24, 4, 10
SPECS = ["rex:d=0.9", "wsd:decay_type=1-sqrt", "mdlrc"]
MAKES = """
scheduler_type = config.get('lr_scheduler', 'constant')
if scheduler_type == 'constant':
    lr_scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
elif scheduler_type == 'cosine':
    T_max = config['epochs'] * steps_per_epoch
    lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=T_max, eta_min=1e-6)
else:
    raise NotImplementedError(f'Unknown lr_scheduler: {scheduler_type}')
if config['warmup_steps'] > 0:
    warmup_steps = config['warmup_steps']
    warmup_scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1/warmup_steps, total_iters=warmup_steps)
    schedulers = [warmup_scheduler, lr_scheduler]
    lr_scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, schedulers=schedulers, milestones=[warmup_steps])
model_engine.lr_scheduler = lr_scheduler
"""
PROGRAM = """
import argparse, json, os
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--config")
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--deepspeed", action="store_true")
parser.add_argument("--resume_from_checkpoint", action="store_true")
parser.add_argument("--stop_at", type=int)
parser.add_argument("--real", action="store_true")
args = parser.parse_args()
with open(args.config) as file:
    config = json.load(file)


class Engine:
    def __init__(self, model, optimizer, accumulation):
        self.module, self.optimizer, self.accumulation, self.lr_scheduler = model, optimizer, accumulation, None
        self.global_steps = 0

    def train_batch(self):
        for _ in range(self.accumulation):
            (self.module(torch.randn(2, 4)).square().mean() / self.accumulation).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.lr_scheduler.step()
        self.global_steps += 1

    def save_checkpoint(self, path):
        states = {name: getattr(self, name).state_dict() for name in ("module", "optimizer", "lr_scheduler")}
        torch.save({**states, "global_steps": self.global_steps}, path)

    def load_checkpoint(self, path):
        states = torch.load(path, weights_only=False)
        for name in ("module", "optimizer", "lr_scheduler"):
            getattr(self, name).load_state_dict(states[name])
        self.global_steps = states["global_steps"]


def deepspeed_engine(model, optimizer, accumulation):
    import deepspeed

    class Engine(deepspeed.DeepSpeedEngine):
        def train_batch(self):
            for _ in range(self.gradient_accumulation_steps()):
                self.backward(self(torch.randn(2, 4)).square().mean())
                self.step()

    deepspeed.DeepSpeedEngine = Engine
    deepspeed.init_distributed(dist_backend="gloo")
    given = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": accumulation}
    return deepspeed.initialize(model=model, optimizer=optimizer, config=given)[0]


rates = []
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
optimizer.register_step_pre_hook(lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"]))
model_engine = (deepspeed_engine if args.real else Engine)(model, optimizer, config["gradient_accumulation_steps"])
steps_per_epoch = 12
{makes}
if args.resume_from_checkpoint:
    model_engine.load_checkpoint("checkpoint")
while model_engine.global_steps < args.stop_at:
    model_engine.train_batch()
model_engine.save_checkpoint("checkpoint")
with open(f"rates{os.environ.get('RANK', '')}.json", "w") as file:
    json.dump(rates, file)
"""


@pytest.fixture
def train(tmp_path, monkeypatch, capfd):
    """Runs the program under the launcher in this process; returns the rates that its steps saw, and its messages."""

    def run(*options, arguments=(), **config):
        (tmp_path / "train.py").write_text(PROGRAM.replace("{makes}", MAKES))
        given = {"lr": LR, "epochs": 2, "warmup_steps": WARMUP, "gradient_accumulation_steps": 4, "lr_scheduler": "cosine"}
        (tmp_path / "job.json").write_text(json.dumps(given | config))
        monkeypatch.chdir(tmp_path)
        options = ["--local_rank=0", "--strict_lr_audit", *options]
        status = launch_here("train.py", "--deepspeed", "--config=job.json", *arguments, options=options)
        stderr = capfd.readouterr().err
        return json.loads((tmp_path / "rates.json").read_text()) if not status else status, stderr

    return run


@pytest.mark.parametrize("spec", SPECS)
def test_the_curve_takes_the_place_of_its_schedule_and_goes_on_after_a_resume(train, spec):
    options = [f"--lr_scheduler={spec}", f"--num_updates={N}", f"--num_warmup_steps={WARMUP}"]
    curve = lr_curve(spec, LR, WARMUP, N)
    rates, stderr = train(*options, arguments=[f"--stop_at={DONE}"])
    close(rates, curve[:DONE])
    assert "replaces SequentialLR (LinearLR, CosineAnnealingLR) of AdamW: 24 updates (--num_updates), 4 of them" in stderr
    rates, stderr = train(*options, arguments=["--resume_from_checkpoint", f"--stop_at={N}"])
    close(rates, curve[DONE:])
    assert "It goes on at update 10." in stderr


def test_the_list_of_the_program_itself_is_closed(train):
    status, stderr = train(arguments=["--stop_at=2"], lr_scheduler="rex:d=0.9")
    assert status == 1
    assert "NotImplementedError: Unknown lr_scheduler: rex:d=0.9" in stderr


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("deepspeed"), reason="DeepSpeed is not installed")
def test_deepspeeds_engine_on_two_processes_runs_the_curve(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM.replace("{makes}", MAKES))
    given = {"lr": LR, "epochs": 2, "warmup_steps": WARMUP, "gradient_accumulation_steps": 4, "lr_scheduler": "cosine"}
    (tmp_path / "job.json").write_text(json.dumps(given))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += ["-m", "diffusers_lrlab.launch", "--strict_lr_audit", "--lr_scheduler=rex:d=0.9", f"--num_updates={N}"]
    command += [f"--num_warmup_steps={WARMUP}", "train.py", "--deepspeed", "--config=job.json", "--real"]
    curve = lr_curve("rex:d=0.9", LR, WARMUP, N)
    for arguments, expected in (([f"--stop_at={DONE}"], curve[:DONE]), (["--resume", f"--stop_at={N}"], curve[DONE:])):
        env = {**environment(), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        done = subprocess.run([*command, *arguments], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        for rank in range(2):
            close(json.loads((tmp_path / f"rates{rank}.json").read_text()), expected)
