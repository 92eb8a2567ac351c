"""The loops of other trainers around their own schedulers: a run of a tiny model, which other_trainers.py audits.

A trainer's function is taken out of its source file and executed with the imports that it uses; what cannot be imported is
replaced by an empty class. The loops follow the trainers', with accelerate's own wrappers where they use them.
"""

import ast
import contextlib
import json
import os
import sys
import tempfile
import types
from pathlib import Path

import torch


def definitions(path, *names, **given):
    """Functions, classes and methods (`Class.method`) of a source file, executed; `given` replaces imports."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    wanted = [_find(tree, name, path) for name in names]
    used = {node.id for each in wanted for node in ast.walk(each) if isinstance(node, ast.Name)}
    namespace = {"__name__": path.stem, **given}
    for node in tree.body:
        for alias in node.names if isinstance(node, ast.Import | ast.ImportFrom) else []:
            name = (alias.asname or alias.name).partition(".")[0]
            if name in used and name not in namespace:
                _import(node, alias, name, namespace)
    exec(compile(ast.Module(wanted, []), str(path), "exec"), namespace)
    return types.SimpleNamespace(**namespace)


def _find(tree, name, path):
    body = tree.body
    for part in name.split("."):
        found = next((node for node in body if getattr(node, "name", None) == part), None)
        if found is None:
            sys.exit(f"{path} has no {name}: this is not the commit that the loops were written for.")
        body = found.body
    return found


def _import(node, alias, name, namespace):
    single = ast.ImportFrom(node.module, [alias], node.level) if isinstance(node, ast.ImportFrom) else ast.Import([alias])
    try:
        exec(compile(ast.fix_missing_locations(ast.Module([single], [])), "imports", "exec"), namespace)
    except ImportError:
        namespace[name] = type(name, (), {})


def statements(path, first, last, namespace):
    """Executes a file's statements from the assignment to `first` to that to `last`, wherever they are."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        for body in (
            part for part in (getattr(node, "body", None), getattr(node, "orelse", None)) if isinstance(part, list)
        ):
            targets = [ast.unparse(each.targets[0]) if isinstance(each, ast.Assign) else "" for each in body]
            if first in targets and last in targets[targets.index(first) :]:
                start = targets.index(first)
                stop = start + targets[start:].index(last) + 1
                exec(compile(ast.Module(body[start:stop], []), str(path), "exec"), namespace)
                return
    sys.exit(f"{path} does not assign {first} and then {last}: this is not the commit that the loops were written for.")


class Run:
    """A tiny model, and a run's plan: updates, micro-batches per update, processes that accelerate believes in."""

    def __init__(self, row):
        self.updates, self.accumulation, self.processes = row["updates"], row["accumulation"], row["processes"]
        self.lr, self.options = row["lr"], row["options"]
        torch.manual_seed(0)
        self.model = torch.nn.Linear(4, 1, bias=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.lr)

    def loss(self, _batch=None):
        return self.model(0.1 * torch.randn(2, 4)).square().mean()

    def accelerator(self, **options):
        import accelerate.scheduler

        if self.processes > 1:  # the only place where the number matters to a schedule
            accelerate.scheduler.AcceleratorState = lambda: types.SimpleNamespace(num_processes=self.processes)
        return accelerate.Accelerator(cpu=True, **options)

    def accelerated(self, make_scheduler, resume=None, once_synced=None):
        """The usual loop with accelerate; `once_synced(scheduler)` steps the schedule outside of `accumulate`."""
        accelerator = self.accelerator(gradient_accumulation_steps=self.accumulation)
        scheduler = make_scheduler()
        model, optimizer, scheduler = accelerator.prepare(self.model, self.optimizer, scheduler)
        if resume and "from" in resume:
            accelerator.load_state(resume["from"])
        for _ in range((resume or {}).get("updates", self.updates) * self.accumulation):
            with accelerator.accumulate(model):
                accelerator.backward(self.loss())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                if once_synced is None:
                    scheduler.step()
                optimizer.zero_grad()
            if once_synced is not None and accelerator.sync_gradients:
                once_synced(scheduler)
        if resume and "to" in resume:
            accelerator.save_state(resume["to"])

    def resumed(self, row, make_loop):
        """Runs the first `stop_at` updates, then the rest with the options in `then`, from accelerate's checkpoint."""
        if "stop_at" not in row:
            return make_loop(self, None)
        with tempfile.TemporaryDirectory() as folder:
            make_loop(self, {"to": folder, "updates": row["stop_at"]})
            again = Run({**row, **row["then"], "options": {**self.options, **row["then"].get("options", {})}})
            return make_loop(again, {"from": folder, "updates": again.updates - row["stop_at"]})


def _kohya(run, checkout, row, get_scheduler):
    def loop(run, resume):
        given = {"lr_scheduler": "constant", "lr_scheduler_type": "", "lr_warmup_steps": 0, "lr_decay_steps": 0}
        given |= {"lr_scheduler_num_cycles": 1, "lr_scheduler_power": 1.0, "lr_scheduler_timescale": None}
        given |= {"lr_scheduler_min_lr_ratio": None, "lr_scheduler_args": None, "optimizer_type": "AdamW"}
        given |= {"max_train_steps": run.updates, "learning_rate": run.lr, **run.options}
        args = types.SimpleNamespace(**given)
        run.accelerated(lambda: get_scheduler(args, run.optimizer, run.processes), resume)

    run.resumed(row, loop)


def sd_scripts(run, checkout, row):
    names = ("is_schedulefree_optimizer", "get_dummy_scheduler", "get_scheduler_fix")
    library = definitions(checkout / "library" / "train_util.py", *names, logger=_Silent())
    _kohya(run, checkout, row, library.get_scheduler_fix)


def musubi_tuner(run, checkout, row):
    sys.path.insert(0, str(checkout / "src"))
    path = checkout / "src" / "musubi_tuner" / "training" / "trainer_base.py"
    trainer = definitions(path, "NetworkTrainer.get_lr_scheduler", logger=_Silent())
    self = types.SimpleNamespace(is_schedulefree_optimizer=lambda *_: False)
    _kohya(run, checkout, row, lambda *args: trainer.get_lr_scheduler(self, *args))


def simpletuner(run, checkout, row):
    path = checkout / "simpletuner" / "helpers" / "training" / "custom_schedule.py"
    names = ("_enable_get_lr_call", "Cosine", "CosineAnnealingHardRestarts", "Sine")
    names += ("get_polynomial_decay_schedule_with_warmup", "get_lr_scheduler")
    module = "simpletuner"
    for part in ("", ".helpers", ".training", ".custom_schedule"):
        module += part
        sys.modules[module] = types.ModuleType(module)
    made = definitions(path, *names, logger=_Silent())
    vars(sys.modules[module]).update(vars(made))
    given = {"lr_warmup_steps": 0, "lr_end": 4e-7, "lr_num_cycles": 1, "lr_power": 0.8, "max_train_steps": run.updates}
    args = types.SimpleNamespace(**given | run.options)
    about = types.SimpleNamespace(num_processes=run.processes)
    done = iter(range(run.updates))

    def step(scheduler):  # the arguments are the trainer's, which also logs errors and goes on
        restarts = {"epoch": 1, "step": next(done)} if args.lr_scheduler == "cosine_with_restarts" else {}
        with contextlib.suppress(Exception):
            scheduler.step(**restarts)

    run.accelerated(lambda: made.get_lr_scheduler(args, run.optimizer, about, _Silent(), 0), once_synced=step)


def ai_toolkit(run, checkout, row):
    sys.path.insert(0, str(checkout))
    get_lr_scheduler = definitions(checkout / "toolkit" / "scheduler.py", "get_lr_scheduler").get_lr_scheduler
    trainer = checkout / "extensions_built_in" / "sd_trainer" / "SDTrainer.py"
    kept = {"sync_grad_transfers": lambda: None, "CustomAdapter": type(None), "ClipVisionAdapter": type(None)}
    train = definitions(trainer, "SDTrainer.hook_train_loop", DataLoaderBatchDTO=object, **kept).hook_train_loop
    config = {"lr_scheduler": "constant", "lr_scheduler_params": {}, "steps": run.updates, "optimizer": "adamw"}
    config |= {"gradient_accumulation": 1, "gradient_accumulation_steps": 1, "max_grad_norm": 1.0, **run.options}
    self = types.SimpleNamespace(train_config=types.SimpleNamespace(**config), is_grad_accumulation_step=False)
    at = (checkout / "jobs" / "process" / "BaseSDTrainProcess.py", "lr_scheduler_params", "self.lr_scheduler")
    statements(*at, {"self": self, "get_lr_scheduler": get_lr_scheduler, "optimizer": run.optimizer})

    accelerator = run.accelerator()
    self.optimizer, self.lr_scheduler = accelerator.prepare(run.optimizer), accelerator.prepare(self.lr_scheduler)
    self.accelerator, self.params, self.steps_this_boundary = accelerator, [*run.model.parameters()], 0
    self.sd, self.ema, self.adapter, self.embedding = types.SimpleNamespace(is_multistage=False), None, None, None
    self.model_config, self.timer = types.SimpleNamespace(low_vram=False), lambda _: contextlib.nullcontext()
    self.end_of_training_loop = lambda: None

    def train_single_accumulation(_batch):
        loss = run.loss()
        accelerator.backward(loss)
        return loss.detach()

    self.train_single_accumulation = train_single_accumulation
    self.optimizer.zero_grad()
    self.lr_scheduler.step(0)
    waited = 1
    for _ in range(self.train_config.steps):
        self.is_grad_accumulation_step = waited < self.train_config.gradient_accumulation_steps
        waited = waited if self.is_grad_accumulation_step else 0
        with accelerator.accumulate(run.model):
            train(self, [None] * self.train_config.gradient_accumulation)
        waited += 1


def onetrainer(run, checkout, row):
    sys.path.insert(0, str(checkout))
    create = definitions(checkout / "modules" / "util" / "create.py", "create_lr_scheduler", TrainConfig=object)
    names = create.LearningRateScheduler

    def loop(run, done, stop):
        options = {"name": "CONSTANT", "warmup_steps": 0, "num_cycles": 1.0, "min_factor": 0.0, **run.options}
        custom = {
            "custom_learning_rate_scheduler": options.pop("class", None),
            "scheduler_params": options.pop("params", []),
        }
        optimizer = types.SimpleNamespace(optimizer=types.SimpleNamespace(is_schedule_free=False))
        config = types.SimpleNamespace(optimizer=optimizer, learning_rate=run.lr, **custom)
        length = {"num_epochs": run.updates, "approximate_epoch_length": run.accumulation, "batch_size": 1}
        for group in run.optimizer.param_groups if done else []:  # as in its backups
            group["initial_lr"] = run.lr
        scheduler = create.create_lr_scheduler(
            config=config,
            optimizer=run.optimizer,
            learning_rate_scheduler=names[options.pop("name")],
            gradient_accumulation_steps=run.accumulation,
            global_step=done * run.accumulation,
            **options,
            **length,
        )
        for _ in range(done, stop):
            for _ in range(run.accumulation):
                (run.loss() / run.accumulation).backward()
            run.optimizer.step()
            scheduler.step()
            run.optimizer.zero_grad(set_to_none=True)

    if "stop_at" not in row:
        return loop(run, 0, row.get("train", run.updates))
    loop(run, 0, row["stop_at"])
    again = Run({**row, **row["then"]})
    again.optimizer.load_state_dict(run.optimizer.state_dict())
    return loop(again, row["stop_at"], again.updates)


def diffusion_pipe(run, checkout, row):
    engine = types.SimpleNamespace()
    namespace = {"torch": torch, "optimizer": run.optimizer, "model_engine": engine, "steps_per_epoch": run.updates}
    namespace["config"] = {"epochs": 1, "warmup_steps": 0, **run.options}
    statements(checkout / "train.py", "scheduler_type", "model_engine.lr_scheduler", namespace)
    for _ in range(row.get("train", run.updates)):  # as DeepSpeed's engine: once per update
        for _ in range(run.accumulation):
            (run.loss() / run.accumulation).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        engine.lr_scheduler.step()


def diffsynth_studio(run, checkout, row):
    names = ("get_optimizer_class", "save_training_args", "launch_training_task")
    names += ("initialize_deepspeed_gradient_checkpointing",)
    runner = definitions(checkout / "diffsynth" / "diffusion" / "runner.py", *names, tqdm=iter)

    class Model(torch.nn.Linear):
        def trainable_modules(self):
            return self.parameters()

        def forward(self, batch):
            return super().forward(batch).square().mean()

    class Points(torch.utils.data.Dataset):
        load_from_cache = False

        def __len__(self):
            return run.updates * run.accumulation

        def __getitem__(self, _index):
            return torch.randn(2, 4)

    accelerator = run.accelerator(gradient_accumulation_steps=run.accumulation)
    nothing = types.SimpleNamespace(
        **dict.fromkeys(("on_step_end", "on_epoch_end", "on_training_end"), lambda *_, **__: None)
    )
    runner.launch_training_task(accelerator, Points(), Model(4, 1), nothing, learning_rate=run.lr, num_workers=0)


class _Silent:
    info = warning = error = staticmethod(lambda *_: None)


LOOPS = {
    "sd-scripts": sd_scripts,
    "musubi-tuner": musubi_tuner,
    "simpletuner": simpletuner,
    "ai-toolkit": ai_toolkit,
    "onetrainer": onetrainer,
    "diffusion-pipe": diffusion_pipe,
    "diffsynth-studio": diffsynth_studio,
}

if __name__ == "__main__":
    host, checkout, given = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        LOOPS[host](Run(given), checkout, given)
