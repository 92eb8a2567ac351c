"""Averages of what scripts that are not ours train: against diffusers' EMAModel, stepped by the script itself."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from safetensors.torch import load_file
from tables import cases
from test_launch import launch

from diffusers_lrlab import LabError
from diffusers_lrlab.diffusers_plugin.ema_hook import EMAHook, recognise
from diffusers_lrlab.diffusers_plugin.hooks import Hooks
from diffusers_lrlab.diffusers_plugin.host_run import HostRun
from diffusers_lrlab.diffusers_plugin.host_script import HostScript, NotRecognised

SCRIPT = Path(__file__).parents[1] / "scripts" / "ema_script.py"
WEIGHTS = "diffusion_pytorch_model.safetensors"


def run(folder, *arguments, options=(), **how):
    """What a script said about it, and what it wrote beside: raw weights, its own average, and a random number."""
    stderr = launch(SCRIPT, f"--output_dir={folder}", *arguments, options=options, **how)
    return stderr, load_file(folder / "beside.safetensors")


def trained(folder):
    """The trained weights of a saved model, in the order of the script."""
    saved = load_file(folder / WEIGHTS)
    return [saved["trained.weight"], saved["trained.bias"]]


def of(beside, kind):
    return [beside[f"{kind}.0"], beside[f"{kind}.1"]]


def same(one, other):
    return all(map(torch.equal, one, other))


@pytest.fixture(scope="session")
def bare(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bare")
    return folder, run(folder)[1]


def test_the_average_is_diffusers_own_and_the_script_stays_as_it_was(tmp_path, bare):
    stderr, beside = run(tmp_path, options=["--ema=warmup_power", "--strict"])
    assert beside.keys() == bare[1].keys()
    assert all(beside[name].equal(value) for name, value in bare[1].items())
    assert same(trained(tmp_path / "saved"), of(beside, "raw"))
    assert same(trained(tmp_path / "lrlab" / "ema" / "model"), of(beside, "ema"))
    frozen = load_file(tmp_path / "lrlab" / "ema" / "model" / WEIGHTS)["frozen.weight"]
    assert frozen.equal(load_file(tmp_path / "saved" / WEIGHTS)["frozen.weight"])
    assert same(trained(tmp_path / "checkpoint-5" / "model"), trained(bare[0] / "checkpoint-5" / "model"))
    assert not same(trained(tmp_path / "checkpoint-5" / "lrlab" / "ema" / "model"), of(beside, "ema"))
    assert f"--ema warmup_power: the average of 8 updates is in {tmp_path / 'lrlab' / 'ema'}." in stderr


def test_it_resumes_and_takes_the_place_of_the_weights_where_asked(tmp_path, bare):
    """From a checkpoint; what the script validates and saves is the average, and the training goes on from the weights."""
    options = ["--ema=warmup_power", "--ema_swap=both", "--strict"]
    run(tmp_path, "--max_train_steps=5", options=options[:1])
    stderr, beside = run(
        tmp_path, f"--resume_from_checkpoint={tmp_path / 'checkpoint-5'}", "--checkpointing_steps=7", options=options
    )
    # The script reads its data from the beginning again: another run than one that was never stopped.
    assert not same(of(beside, "raw"), of(bare[1], "raw"))
    average = trained(tmp_path / "lrlab" / "ema" / "model")
    assert same(trained(tmp_path / "saved"), average)
    expected = trained(tmp_path / "checkpoint-7" / "lrlab" / "ema" / "model")
    assert json.loads((tmp_path / "seen.json").read_text()) == [expected[0].tolist()]
    decay = 1 - 8**-0.75
    for value, earlier, raw in zip(average, expected, of(beside, "raw"), strict=True):
        torch.testing.assert_close(value, decay * earlier + (1 - decay) * raw)
    assert "the average of 8 updates" in stderr
    assert "and in what the script saved at its end." in stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "arguments", "processes"),
    [
        ("constant:decay=0.7", ["--decay=0.7", "--gradient_accumulation_steps=4"], 1),
        ("warmup_power", ["--gradient_accumulation_steps=2"], 2),
        ("warmup_power", ["--without_hook"], 1),
    ],
)
def test_accumulation_processes_and_models_without_a_hook(tmp_path, spec, arguments, processes):
    stderr, beside = run(tmp_path, *arguments, options=[f"--ema={spec}", "--strict"], processes=processes)
    folder = tmp_path / "lrlab" / "ema"
    assert same(trained(folder if "--without_hook" in arguments else folder / "model"), of(beside, "ema"))
    assert "the average of 8 updates is in" in stderr


@pytest.mark.slow
def test_it_begins_anew_where_a_checkpoint_has_none(tmp_path, bare):
    (tmp_path / "checkpoint-5").symlink_to(bare[0] / "checkpoint-5")
    stderr, _ = run(tmp_path, f"--resume_from_checkpoint={tmp_path / 'checkpoint-5'}", options=["--ema=constant"])
    assert "the checkpoint has no average" in stderr
    assert "the average of 3 updates is in" in stderr
    # And a script that has an average goes on without ours.
    assert "average" not in run(tmp_path / "2", f"--resume_from_checkpoint={tmp_path / 'checkpoint-5'}")[0]


@pytest.mark.slow
def test_weights_of_few_bits_are_averaged_in_float32(tmp_path):
    run(tmp_path, "--bfloat16", options=["--ema=constant:decay=0.99"])
    state = load_file(tmp_path / "checkpoint-5" / "lrlab" / "ema.safetensors")
    assert {value.dtype for value in state.values()} == {torch.float32}
    assert any(not value.bfloat16().float().equal(value) for value in state.values())
    assert trained(tmp_path / "lrlab" / "ema" / "model")[0].dtype == torch.bfloat16


# --- without a process ---------------------------------------------------------------------------------------------------


class Saves(torch.nn.Linear):
    def save_pretrained(self, folder):
        Path(folder).mkdir(exist_ok=True)
        torch.save(self.state_dict(), Path(folder) / "weights")


def prepared(folder, *models, spec="constant:decay=0.5", swap=None, optimizer=None, num_updates=None, **arguments):
    """A hook on a script that has prepared these models, what was said, and the accelerator of its own."""
    said = []
    accelerator = SimpleNamespace(
        _optimizers=[None],
        scaler=None,
        is_main_process=True,
        distributed_type=SimpleNamespace(value=arguments.pop("distributed", "NO")),
        _models=list(models),
        _save_model_state_pre_hook={},
        register_save_state_pre_hook=lambda hook: None,
        register_load_state_pre_hook=lambda hook: None,
    )
    host = HostRun()
    host.refuse = lambda option, reason: said.append(f"{option}: {reason}")
    host.warn = said.append
    host.models, host.accelerator = list(models), accelerator
    host.optimizer = optimizer or torch.optim.SGD(torch.nn.Linear(1, 1).parameters())
    host.arguments = {"output_dir": str(folder), **arguments}
    clock = SimpleNamespace(run=host, counts=False, count_updates=lambda: num_updates)
    script = HostScript(str(SCRIPT))
    script._calls.pop("register_save_state_pre_hook")
    hook = EMAHook(script, clock, spec, swap)
    hook._begin()
    return hook, said


def quantised():
    model = torch.nn.Linear(2, 2)
    model.weight = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.uint8), requires_grad=False)
    return model


REFUSED = {
    "quantised": (quantised(), {}, "its Linear is quantised: weight is torch.uint8"),
    "sharded": (Saves(2, 2), {"distributed": "FSDP"}, "its models are sharded .FSDP."),
    "nothing trained": (Saves(2, 2).requires_grad_(False), {}, "nothing that it prepares has trainable parameters"),
    "no format": (torch.nn.Linear(2, 2), {}, "registers no hook for checkpoints, and its Linear saves no weights"),
    "no folder": (Saves(2, 2), {"output_dir": None}, "it has no --output_dir"),
    "embeddings": (Saves(2, 2), {"train_text_encoder_ti": True}, "it puts embeddings back"),
}


@cases("name", REFUSED)
def test_what_cannot_be_averaged_is_refused_before_training(tmp_path, name):
    model, arguments, reason = REFUSED[name]
    hook, said = prepared(tmp_path, model, **arguments)
    assert len(said) == 1
    assert said[0].startswith("--ema: ")
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(said[0])
    hook._step()
    hook._finish_late()
    assert (hook.num_seen, hook.report(), [*tmp_path.iterdir()]) == (0, "", [])


def test_two_averages_are_an_error(tmp_path):
    with pytest.raises(LabError, match=r"keeps an EMA itself \(--use_ema\)"):
        prepared(tmp_path, Saves(2, 2), use_ema=True)


def test_by_hand(tmp_path):
    """A model without a hook, updates that a GradScaler leaves out, and an end that is not seen before `end_training`."""
    model = Saves(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    hook, said = prepared(tmp_path, model, optimizer=optimizer, swap="final", num_updates=9)
    optimizer.register_step_post_hook(lambda *step: hook._step())
    Accelerator(cpu=True)  # whose state the wrapper asks for
    wrapped = AcceleratedOptimizer(optimizer, scaler=torch.amp.GradScaler("cpu", init_scale=2.0))
    values, expected = [], None
    for gradient in (1.0, float("inf"), 2.0, 3.0):
        wrapped.scaler.scale(model(torch.ones(1)).sum() * gradient).backward()
        wrapped.step()
        if gradient != float("inf"):
            value = model.weight.item()
            expected = value if expected is None else 0.5 * expected + 0.5 * value
            values.append(value)
        optimizer.zero_grad()
    assert hook.num_seen == 3
    hook._finish_late()
    assert "the script ended after 3 updates, where 9 were expected" in said[0]
    assert torch.load(tmp_path / "lrlab" / "ema" / "weights")["weight"].item() == pytest.approx(expected)
    assert model.weight.item() == values[-1]


def test_averages_of_something_else_and_damaged_ones(tmp_path):
    hook, said = prepared(tmp_path, Saves(2, 2))
    hook._step()
    hook._save_state(None, None, str(tmp_path / "checkpoint"))
    again, said = prepared(tmp_path, Saves(2, 2), spec="constant:decay=0.25")
    again._load_state(None, str(tmp_path / "checkpoint"))
    assert (again.num_seen, same(again.average.shadow_params, hook.average.shadow_params)) == (1, True)
    form = "constant:decay={},start_update=0,update_every=1"
    assert said == [f"the average was {form.format(0.5)} before, and goes on as {form.format(0.25)}."]
    other, _ = prepared(tmp_path, Saves(3, 2))
    with pytest.raises(LabError, match="is of other parameters than those that are trained"):
        other._load_state(None, str(tmp_path / "checkpoint"))
    path = tmp_path / "checkpoint" / "lrlab" / "ema.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(LabError, match="is damaged .* remove the file"):
        again._load_state(None, str(tmp_path / "checkpoint"))


def test_a_run_that_goes_on_after_its_end(tmp_path):
    hook, _ = prepared(tmp_path, Saves(1, 1), swap="final", num_updates=1)
    hook._step()
    assert hook._is_at_end()
    hook._finish()
    with pytest.raises(LabError, match="goes on to train after 1 update"):
        hook._step()
    hook, _ = prepared(tmp_path, Saves(1, 1), swap="final")
    with pytest.raises(LabError, match="--num_updates N before its name"):
        hook._step()


@cases(
    ("text", "reason"),
    [
        ("print()", "it prepares nothing"),
        ("accelerator.prepare(model)", "its end is not seen"),
        ("accelerator.prepare(model)\naccelerator.end_training()", "how it saves"),
        ("accelerator.prepare(model)\nupdate_ema(a, b)", "keeps an average itself .line 2."),
        ("accelerator.prepare(model)\nindex_no_updates = 1", "puts embeddings back"),
    ],
)
def test_scripts_that_are_not_recognised(tmp_path, text, reason):
    (tmp_path / "script.py").write_text(text)
    with pytest.raises(NotRecognised, match=reason):
        recognise(HostScript(str(tmp_path / "script.py")))


def test_what_is_recognised_is_told():
    found = recognise(HostScript(str(SCRIPT)))
    assert found.startswith("its hook for checkpoints saves what is trained (line ")
    assert found.endswith("); --ema_swap both")


def test_a_swap_without_an_average_is_an_error():
    options = SimpleNamespace(ema=None, ema_swap="final", strict=False, script=str(SCRIPT))
    options.__dict__.update(timestep_sampler=None, loss_weighting=None, log_timesteps=False, timestep_grad_every=None)
    options.__dict__.update(validation_fraction=None, validation_steps=None)
    with pytest.raises(LabError, match="--ema_swap final has no effect without --ema"):
        Hooks(options)
