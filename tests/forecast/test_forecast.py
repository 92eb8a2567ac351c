"""What a run is going to take: memory against torch's own count, time, and how it is told."""

import dataclasses
import math

import pytest
import runs
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from helpers import load_data_once, peak_of

from diffusers_lrlab import TrainingConfig
from diffusers_lrlab.cli.main import main
from diffusers_lrlab.core.errors import Diverged
from diffusers_lrlab.evaluation import metrics, point_metrics
from diffusers_lrlab.forecast import describe, memory, probes, timing
from diffusers_lrlab.forecast.describe import describe_forecast
from diffusers_lrlab.forecast.evaluation import forecast_evaluation
from diffusers_lrlab.forecast.memory import batch_that_fits, container_room, forecast_memory, optimizer_bytes
from diffusers_lrlab.forecast.probes import Budget, grow, line_through, power_of
from diffusers_lrlab.forecast.timing import TimeForecast, forecast_time
from diffusers_lrlab.optimizers.build import optimizer_state_bytes
from diffusers_lrlab.optimizers.entries import OPTIMIZERS
from diffusers_lrlab.training import trainer as loop
from diffusers_lrlab.training.plan import make_plan
from diffusers_lrlab.training.plan_text import slow_precision
from diffusers_lrlab.training.resolve import resolve_config
from diffusers_lrlab.training.run_folder import RunFolder
from diffusers_lrlab.training.trainer import Trainer

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # optional optimizers' own
MLP = {"dimension": 2, "hidden_size": 64, "num_layers": 2, "embedding_size": 32}
UNET = {key: value for key, value in runs.TINY_UNET.items() if key != "_class_name"}


@pytest.fixture(scope="module", autouse=True)
def passes_over_fake_tensors_done_once():
    """Of the same model, batch and precision: several tests ask for some of them, and each takes a second."""
    track, known = memory._track, {}

    def track_once(plan, device):
        config = plan.config
        about = (config.gradient_checkpointing, config.mixed_precision, repr(config.objective_kwargs))
        key = (repr(plan.model_config), plan.item_shape, repr(plan.layout), *about, device)
        if key not in known:
            known[key] = track(plan, device)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "_track", track_once)
        yield


def make_trainer(folder, **options):
    config = resolve_config(TrainingConfig(**{"max_train_steps": 100, "output_dir": "run", **options}))
    data = load_data_once(config)
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=config.gradient_accumulation_steps)
    plan = make_plan(config, data, UNET if config.point_column is None else MLP)
    return Trainer(plan, data, accelerator, RunFolder(folder))


def measured_peak(trainer):
    """What torch's allocator hands out at most during an update, beside what is there before it: bytes."""
    from diffusers_lrlab.data.batches import iterate_batches

    trainer.stepper.model.train()
    trainer.log.observer = None
    batches = iterate_batches(trainer.run.data, trainer.run.plan.layout, 0, range(2))
    trainer.do_update(next(batches))
    images = next(batches)
    return peak_of(lambda: trainer.do_update(images), trainer.folder.path)


CASES = {
    "adamw": {},
    "sgd": {"optimizer": "sgd"},
    "adafactor": {"optimizer": "adafactor"},
    "accumulation": {"gradient_accumulation_steps": 2, "train_batch_size": 32},
    "checkpointing": {"gradient_checkpointing": True, "train_batch_size": 128},
    "points": {"dataset_name": "moons", "train_batch_size": 2000},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name in ("accumulation", "checkpointing") else []) for name in CASES],
)
def test_the_peak_is_what_torch_hands_out(tmp_path, name):
    trainer = make_trainer(tmp_path / "run", **{"train_batch_size": 128, **CASES[name]})
    forecast = forecast_memory(trainer.run.plan)
    # Of what is computed again, the tracker misses a part.
    tolerance = 0.15 if name == "checkpointing" else 0.1
    assert forecast.gradients + forecast.activations == pytest.approx(measured_peak(trainer), rel=tolerance)
    assert forecast.parameters == 4 * trainer.run.plan.num_parameters == forecast.ema
    assert forecast.optimizer == pytest.approx(optimizer_state_bytes(trainer.run.optimizer), rel=0.05, abs=4096)
    assert forecast.total == sum(forecast)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_has_a_forecast(tmp_path, name):
    """Also those that cannot be traced."""
    facts = OPTIMIZERS[name].facts
    if facts.get("package"):
        pytest.importorskip(facts["package"].replace("-", "_"))
    own = {"use_ema": False, "lr_scheduler": "constant"} if "averages" in OPTIMIZERS[name].traits else {}
    plan = make_trainer(tmp_path, optimizer=name, dataset_name="moons", **own).run.plan
    assert forecast_memory(plan).optimizer == pytest.approx(optimizer_bytes(plan, name), rel=0.1, abs=4096)
    if name == "muon":  # for its matrices; AdamW's state for the rest
        assert facts["state_bytes"] <= optimizer_bytes(plan, name) / plan.num_parameters <= 8
    elif name != "adafactor":  # whose state depends on shapes
        assert optimizer_bytes(plan, name) == pytest.approx(facts["state_bytes"] * plan.num_parameters, rel=0.35, abs=4096)


@pytest.mark.slow
def test_what_changes_the_memory(tmp_path):
    plan = make_trainer(tmp_path, train_batch_size=128).run.plan
    usual = forecast_memory(plan)
    twice = forecast_memory(plan, micro_batch=256)
    assert twice.activations == pytest.approx(2 * usual.activations, rel=0.1)
    assert twice.copies == 2 * usual.copies > 0
    assert twice._replace(activations=0, copies=0) == usual._replace(activations=0, copies=0)
    assert forecast_memory(plan, gradient_checkpointing=True).activations < 0.9 * usual.activations
    assert forecast_memory(plan, mixed_precision="bf16").activations < 0.8 * usual.activations
    last = forecast_memory(plan, channels_last=True)  # where operations copy between the formats, it takes more
    assert last.copies == usual.copies
    assert usual.activations <= last.activations < 1.3 * usual.activations
    without = dataclasses.replace(plan, config=dataclasses.replace(plan.config, use_ema=False))
    assert forecast_memory(without) == usual._replace(ema=0)


def test_several_processes_share_a_model_or_exchange_gradients(tmp_path, monkeypatch):
    plan = make_trainer(tmp_path, dataset_name="moons").run.plan
    alone, layout = forecast_memory(plan), dataclasses.replace(plan.layout, num_processes=4)
    together = dataclasses.replace(plan, layout=layout)
    assert forecast_memory(together) == alone._replace(gradients=max(alone.gradients, alone.parameters))
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    sharded = forecast_memory(together)
    assert (sharded.optimizer, sharded.ema) == (alone.optimizer // 4, alone.ema // 4)
    assert sharded.parameters == alone.parameters + alone.parameters // 4  # the shard, and the whole while it works


@pytest.mark.parametrize(
    ("data", "mebibytes", "batch"),
    [pytest.param("digits", 64, 1, marks=pytest.mark.slow), ("moons", 64, 2), ("moons", 8, 32)],
)
def test_batches_that_fit(tmp_path, data, mebibytes, batch):
    """Whatever the batch of the run itself; in small ones gradients are most of what is there."""
    plan = make_trainer(tmp_path, dataset_name=data, train_batch_size=batch).run.plan
    available = mebibytes * 2**20
    most = batch_that_fits(plan, available)
    assert most & (most - 1) == 0
    assert forecast_memory(plan, micro_batch=most).total <= available < forecast_memory(plan, micro_batch=2 * most).total


def test_a_batch_that_fits_a_model_whose_gradients_are_most(tmp_path):
    """A wide MLP: 64 points take less than its gradients, and say nothing about more of them."""
    plan = make_trainer(tmp_path, dataset_name="moons").run.plan
    plan = dataclasses.replace(plan, model_config=plan.model_config | {"hidden_size": 1024})
    usual = forecast_memory(plan, micro_batch=64)
    assert usual.activations < usual.gradients
    available = forecast_memory(plan, micro_batch=8192).total
    assert batch_that_fits(plan, available) == 8192


def test_where_nothing_fits(tmp_path):
    assert batch_that_fits(make_trainer(tmp_path, dataset_name="moons").run.plan, 1000) is None


CGROUPS = {
    "version 2": ({"memory.max": "3000", "memory.current": "1000", "memory.stat": "anon 5\ninactive_file 400\n"}, 2400),
    "version 1": (
        {
            **{"memory/memory.limit_in_bytes": "3000", "memory/memory.usage_in_bytes": "1000"},
            "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 2\n",
        },
        2001,
    ),
    "no limit": ({"memory.max": "max", "memory.current": "1000", "memory.stat": ""}, math.inf),
    "no container": ({}, math.inf),
}


@pytest.mark.parametrize("name", CGROUPS)
def test_what_a_container_may_have(tmp_path, name):
    files, room = CGROUPS[name]
    for file, text in files.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text + "\n")
    assert container_room(tmp_path) == room


def refuse(*_):
    raise AssertionError


def test_memory_is_told_before_anything_is_tried(tmp_path, monkeypatch):
    """A model that does not fit can be forecast, and not be timed."""
    trainer = make_trainer(tmp_path, dataset_name="moons")

    def too_large(*_):
        raise MemoryError

    monkeypatch.setattr("diffusers_lrlab.training.trainer.Trainer", too_large)
    texts = describe_forecast(trainer.run.plan, trainer.run.data, trainer.accelerator)
    assert next(texts).startswith("       memory  ")
    with pytest.raises(MemoryError):
        next(texts)


@pytest.mark.parametrize("data", [pytest.param("digits", marks=pytest.mark.slow), "moons"])
def test_time(tmp_path, data, monkeypatch):
    monkeypatch.setattr(loop, "draw_samples", refuse)  # no picture among the updates
    few = {"num_validation_images": 100, ("frechet_samples" if data == "digits" else "distance_samples"): 50}
    seconds = forecast_time(make_trainer(tmp_path, dataset_name=data, **few))
    assert 0 < seconds.low <= seconds.training <= seconds.high
    assert seconds.training == pytest.approx(100 * seconds.update)
    assert seconds.total > seconds.training
    assert min(seconds.validation, seconds.sampling, seconds.evaluation) > 0


@pytest.mark.slow
def test_compiling_is_no_update(tmp_path, monkeypatch):
    """It takes longer than all that there is time for, and the updates after it are measured."""
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    trainer = make_trainer(tmp_path, dataset_name="moons", num_validation_images=100, distance_samples=50, compile=True)
    take_step = trainer.do_update

    def do_update(*given, **named):
        now[0] += 1000.0 if trainer.run.update == 0 else 2.0
        return take_step(*given, **named)

    monkeypatch.setattr(trainer, "do_update", do_update)
    seconds = forecast_time(trainer, Budget(5))
    assert (seconds.update, seconds.compiling, seconds.training) == (2.0, 998.0, 200.0)
    assert seconds.total >= 1198.0
    assert "of it 16.6 min to compile the model" in "\n".join(describe._time_lines(trainer.run.plan, seconds, "cpu"))


def test_a_slow_update_is_told_in_seconds(tmp_path):
    plan = make_trainer(tmp_path, dataset_name="moons", train_batch_size=16).run.plan
    slow = "\n".join(describe._time_lines(plan, MADE_UP._replace(update=39.7), "cpu"))
    assert "39.7 s per update, 0.4 points per second" in slow
    assert "time  6.1 s (6.05 s to 6.2 s): training" in slow
    single = "\n".join(describe._time_lines(plan, MADE_UP._replace(low=0.1, high=0.1), "cpu"))
    assert "time  6.1 s: training" in single
    fast = "\n".join(describe._time_lines(plan, MADE_UP._replace(update=0.0128), "cpu"))
    assert "12.8 ms per update, 1,250 points per second" in fast


def test_updates_that_diverge_leave_the_rest_of_the_forecast(tmp_path, monkeypatch):
    def diverge(*_):
        raise Diverged("The loss is not finite.")

    monkeypatch.setattr(describe, "forecast_time", diverge)
    trainer = make_trainer(tmp_path, dataset_name="moons")
    shown = "\n".join(describe_forecast(trainer.run.plan, trainer.run.data, trainer.accelerator))
    assert "No forecast of the time, as the measured updates diverged: The loss is not finite." in shown
    assert "memory with" in shown


def test_a_late_probe_has_what_is_left(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(probes.time, "perf_counter", lambda: now[0])
    budget = Budget(10)
    assert budget.share(0.5) == 5
    now[0] = 8.0
    assert (budget.share(0.5), budget.spent) == (1, 8)
    now[0] = 12.0
    assert budget.share(0.5) == 0


@pytest.mark.parametrize(("seconds", "sizes"), [(0.0, [2]), (30.0, [2, 4, 8]), (1e9, [2, 4, 8, 16, 20])])
def test_parts_grow_while_there_is_time(monkeypatch, seconds, sizes):
    """A second for each item and one for the start; the first call does not count."""
    now, calls = [0.0], []
    monkeypatch.setattr(probes.time, "perf_counter", lambda: now[0])

    def work(size):
        calls.append(size)
        now[0] += 1 + size

    readings = grow(work, 2, 20, seconds)
    assert readings == [(size, 1 + size) for size in sizes]
    assert calls == [2, *sizes]
    assert line_through(readings) == pytest.approx((1, 1) if len(sizes) > 1 else (0, 1.5))


@pytest.mark.parametrize("power", [0, 1, 2.5, 3])
def test_the_whole_of_a_power_law(power):
    assert power_of([(size, 0.1 * size**power) for size in (10, 20, 40)], 320) == pytest.approx(0.1 * 320**power)


def test_the_evaluation_is_told_by_small_parts(tmp_path, monkeypatch):
    """The exact divergence in two of its steps; what is measured after long runs takes no time."""
    steps = []
    monkeypatch.setattr(point_metrics, "log_likelihood", lambda *given, num_steps: steps.append(num_steps))
    trainer = make_trainer(tmp_path, dataset_name="eight_gaussians", num_validation_images=500, distance_samples=500)
    seconds = forecast_evaluation(trainer.run, 50, Budget(1))
    assert {"exact_kl", "kl", "sliced_wasserstein"} <= seconds.keys()
    assert all(took >= 0 for took in seconds.values())
    assert set(steps) == {2}
    assert "training_set_loss" not in seconds


def test_a_metric_that_says_nothing_of_its_time_is_named(tmp_path, monkeypatch):
    slow = metrics.METRICS["exact_kl"]
    known = dataclasses.replace(slow, name="own", part=None, function=refuse, fewest_samples=0)
    monkeypatch.setitem(metrics.METRICS, "own", known)
    trainer = make_trainer(tmp_path, dataset_name="moons", num_validation_images=100)
    seconds = forecast_evaluation(trainer.run, 50, Budget(0.5))
    assert seconds["own"] is None


def test_without_time_the_updates_tell(tmp_path, monkeypatch):
    """The first update is measured in any case."""
    trainer = make_trainer(tmp_path, num_validation_images=64, frechet_samples=50)
    monkeypatch.setattr(trainer.run, "validation_losses", refuse)
    monkeypatch.setattr(trainer.run.kind, "sample", refuse)
    seconds = forecast_time(trainer, Budget(0))
    assert trainer.run.update == 1
    assert seconds.guessed == ("validation", "sampling")
    assert seconds.unknown == ("frechet_distance",)
    assert min(seconds.validation, seconds.sampling) > 0 == seconds.evaluation


def test_memory_with_other_settings_is_left_out_without_time(tmp_path):
    plan = make_trainer(tmp_path, dataset_name="moons").run.plan
    slow = slow_precision("bf16")  # on a CPU without instructions for it
    lines = describe._alternatives(plan, forecast_memory(plan), "cpu", Budget(0))
    assert lines[2].startswith("No time left for --no_use_ema, --optimizer sgd")
    assert lines[3:] == ([slow] if slow else [])


@pytest.mark.parametrize("epochs", [None, 1, 2, 100])
def test_pictures_are_counted_as_they_are_drawn(tmp_path, epochs):
    plan = make_trainer(tmp_path, save_images_epochs=epochs, max_train_steps=200, train_batch_size=70).run.plan
    assert plan.num_pictures == sum(plan.due(epochs, update, plan.num_previews) for update in range(1, 201))


MADE_UP = TimeForecast(0.002, 0.1, 0.05, 0.2, 1.0, 2.0, 3.0)


@pytest.mark.parametrize("measures", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_command_tells_it(tmp_path, monkeypatch, capsys, measures):
    monkeypatch.chdir(tmp_path)
    if not measures:  # the tests of the time do
        monkeypatch.setattr(describe, "forecast_time", lambda trainer, budget: MADE_UP)
    AcceleratorState._reset_state(reset_partial_state=True)
    few = ["--num_validation_images", "100", "--distance_samples", "50"]
    assert main(["plan", "--dataset_name", "moons", "--max_train_steps", "50", "--learning_rate", "auto", *few]) == 0
    shown = capsys.readouterr().out
    parts = [
        *(" memory  ", " on the cpu: parameters 1.1 MiB", " free; --train_batch_size up to", "time  "),
        *(
            "ms per update",
            "to find the learning rate, in about 600 updates",
            "disk  5.7 MiB: pipeline 1.1 MiB, 1 checkpoint of 4.5 MiB",
            "memory with",
            "--optimizer adafactor",
            " s in all, with imports and the data",
        ),
    ]
    if not measures:
        parts += ["time  6.1 s (6.05 s to 6.2 s): training 0.1 s, validation 1 s, sampling 2 s, evaluation 3 s"]
        parts += ["2 ms per update", "and before it 1.2 s to find the learning rate", "measured in 0 s"]
    for part in parts:
        assert part in shown
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "part"),
    [(["--dataset_nam", "moons"], "Unknown argument '--dataset_nam'"), (["--optimizer", "adamax"], "'adamax'")],
    ids=str,
)
def test_the_command_refuses(arguments, part, capsys):
    assert main(["plan", *arguments]) == 2
    assert part in capsys.readouterr().err


@pytest.mark.slow
def test_checkpointing_changes_no_bit(tmp_path):
    weights = []
    for flags in ([], ["--gradient_checkpointing"]):
        arguments = [*runs.tiny_arguments(tmp_path, 0.2), "--max_train_steps=3", "--train_batch_size=8", *flags]
        runs.run(*arguments, f"--output_dir={tmp_path / str(len(flags))}")
        weights.append((tmp_path / str(len(flags)) / "unet/diffusion_pytorch_model.safetensors").read_bytes())
    assert weights[0] == weights[1]
