"""Averages of the weights of third-party scripts, against diffusers' EMAModel stepped by the script itself."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from launched_here import launch_here, script_of
from safetensors.torch import load_file
from tables import cases
from test_launch import launch

from diffusers_lrlab import LabError
from diffusers_lrlab.diffusers_plugin.hooks.ema import EMAHook, recognise
from diffusers_lrlab.diffusers_plugin.host.run import HostRun
from diffusers_lrlab.diffusers_plugin.host.source import HostScript, NotRecognised

SCRIPT = Path(__file__).parents[2] / "scripts" / "ema_script.py"
WEIGHTS = "diffusion_pytorch_model.safetensors"


def run(folder, *arguments, options=(), **how):
    """What a script said about it, and what it wrote beside: raw weights, its own average, and a random number."""
    stderr = launch(SCRIPT, f"--output_dir={folder}", *arguments, options=options, **how)
    return stderr, load_file(folder / "beside.safetensors")


def weights(path, prefix=""):
    """The trained weights in a file, in the order of the script."""
    saved = load_file(path)
    return [saved[f"{prefix}trained.{name}"] for name in ("weight", "bias")]


def trained(folder):
    return weights(folder / WEIGHTS)


def by_names(path):
    return weights(path, "0.")


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
    folder = tmp_path / "lrlab" / "ema"
    assert same(by_names(folder / "average.safetensors"), of(beside, "ema"))
    assert f"--ema warmup_power: the average of 8 updates is in {folder}. Load it with Tiny.from_pretrained(" in stderr
    assert "/average.safetensors')." in stderr


def test_it_resumes(tmp_path, bare):
    """From its state in a checkpoint; the training continues from the weights."""
    options = ["--ema=warmup_power", "--strict"]
    run(tmp_path, "--max_train_steps=7", "--checkpointing_steps=7", options=options)
    saved = by_names(tmp_path / "checkpoint-7" / "lrlab" / "ema.safetensors")
    stderr, beside = run(tmp_path, f"--resume_from_checkpoint={tmp_path / 'checkpoint-7'}", options=options)
    decay = 1 - 8**-0.75
    for value, before, raw in zip(trained(tmp_path / "lrlab" / "ema" / "model"), saved, of(beside, "raw"), strict=True):
        torch.testing.assert_close(value, decay * before + (1 - decay) * raw)
    assert "the average of 8 updates" in stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "arguments", "processes"),
    [
        ("constant:decay=0.7", ["--decay=0.7", "--gradient_accumulation_steps=2"], 2),
        ("warmup_power", ["--without_hook"], 1),
    ],
)
def test_accumulation_processes_and_models_without_a_hook(tmp_path, spec, arguments, processes):
    stderr, beside = run(tmp_path, *arguments, options=[f"--ema={spec}", "--strict"], processes=processes)
    folder = tmp_path / "lrlab" / "ema"
    assert same(trained(folder if "--without_hook" in arguments else folder / "model"), of(beside, "ema"))
    assert "the average of 8 updates is in" in stderr


def test_weights_that_a_hook_leaves_to_accelerate_are_saved_by_names(tmp_path):
    stderr, beside = run(tmp_path, "--leave_weights", options=["--ema=warmup_power", "--strict"])
    assert same(by_names(tmp_path / "lrlab" / "ema" / "average.safetensors"), of(beside, "ema"))
    assert "Load it by the names of parameters with safetensors.torch.load_file(" in stderr


def test_a_script_that_fails_after_its_last_update_or_never_ends_its_training(tmp_path):
    """The average is written by then; if a script stops before, its state is in the last checkpoint."""
    arguments = [f"--output_dir={tmp_path}", "--fail_at_end"]
    options = ["--ema=constant", "--num_updates=9"]
    stderr = launch(SCRIPT, *arguments, options=options, expect=1)
    assert not (tmp_path / "lrlab").exists()
    assert (tmp_path / "checkpoint-5" / "lrlab" / "ema.safetensors").exists()
    assert "the average was not written, since the script did not end" in stderr
    options = ["--ema=constant", "--lr_scheduler=rex"]  # another schedule counts the same updates
    stderr = launch(SCRIPT, *arguments, options=options, expect=1)
    assert f"the average of 8 updates is in {tmp_path / 'lrlab' / 'ema'}. Load it with" in stderr
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.read_text().replace("    accelerator.end_training()\n", ""))
    assert launch_here(script, f"--output_dir={tmp_path}", options=["--ema=warmup_power", "--num_updates=9"]) == 0
    assert same(trained(tmp_path / "lrlab" / "ema" / "model"), of(load_file(tmp_path / "beside.safetensors"), "ema"))


def test_a_hook_that_fails_at_the_end(tmp_path):
    """As where the script has deleted the models that its hook names."""
    hook, said = prepared(tmp_path, Saves(2, 2))
    hook._step()
    hook.run.accelerator._save_model_state_pre_hook = {1: lambda models, weights, folder: 1 / 0}
    hook.run.accelerator.get_state_dict = lambda model, unwrap: model.state_dict()
    hook._finish()
    text = "--ema: the script's hook for checkpoints failed (division by zero), so only average.safetensors is written."
    assert said == [text]
    assert [path.name for path in (tmp_path / "lrlab" / "ema").iterdir()] == ["average.safetensors"]


@pytest.mark.slow
def test_it_begins_anew_where_a_checkpoint_has_none(tmp_path, bare):
    (tmp_path / "checkpoint-5").symlink_to(bare[0] / "checkpoint-5")
    stderr, _ = run(tmp_path, f"--resume_from_checkpoint={tmp_path / 'checkpoint-5'}", options=["--ema=constant"])
    assert "the checkpoint has no average" in stderr
    assert "the average of 3 updates is in" in stderr
    # A script with a checkpoint of an average resumes without --ema.
    assert "average" not in run(tmp_path / "2", f"--resume_from_checkpoint={tmp_path / 'checkpoint-5'}")[0]


# --- without a process ---------------------------------------------------------------------------------------------------


class Saves(torch.nn.Linear):
    def save_pretrained(self, folder):
        Path(folder).mkdir(exist_ok=True)
        torch.save(self.state_dict(), Path(folder) / "weights.pt")


def prepared(folder, *models, spec="constant:decay=0.5", **arguments):
    """A hook on a script that has prepared these models, what was said, and the accelerator of its own."""
    said = []
    accelerator = SimpleNamespace(
        _optimizers=[None],
        scaler=None,
        is_main_process=True,
        num_processes=1,
        gradient_accumulation_steps=2,
        gradient_state=SimpleNamespace(active_dataloader=None),
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
    host.optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters())
    host.arguments = {"output_dir": str(folder), **arguments}
    script = HostScript(str(SCRIPT))
    script._calls.pop("register_save_state_pre_hook")
    hook = EMAHook(script, SimpleNamespace(run=host, counts=False, count_updates=lambda: None), spec)
    hook.install()
    host.on_prepared[0]()
    return hook, said


BYTES = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.uint8), requires_grad=False)
QUANTIZED = torch.nn.Linear(2, 2)
QUANTIZED.weight = BYTES
REFUSED = {
    "quantized": (QUANTIZED, {}, "its Linear is quantized: weight is torch.uint8"),
    "sharded": (Saves(2, 2), {"distributed": "FSDP"}, "its models are sharded (FSDP)"),
    "nothing_trained": (Saves(2, 2).requires_grad_(False), {}, "nothing that it prepares has trainable parameters"),
    "no_format": (torch.nn.Linear(2, 2), {}, "it registers no hook for checkpoints, and its Linear saves no weights"),
    "no_folder": (Saves(2, 2), {"output_dir": None}, "it has no --output_dir"),
    "embeddings": (Saves(2, 2), {"train_text_encoder_ti": True}, "it resets embeddings"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_averaged_is_refused_before_training(tmp_path, name):
    model, arguments, reason = REFUSED[name]
    hook, said = prepared(tmp_path, model, **arguments)
    assert [text.startswith(f"--ema constant: {reason}") for text in said] == [True]
    hook.run.on_update[0]()
    hook._finish()
    assert (hook.num_seen, hook.report(), [*tmp_path.iterdir()]) == (0, "", [])


@cases(
    ("how", "message"),
    [
        ({"use_ema": True}, r"keeps an EMA itself \(--use_ema\)"),
        ({"spec": "posthoc:snapshots=4"}, "--ema 'posthoc:snapshots=4': must be an average that needs no snapshots, got"),
        ({"spec": "half_life"}, "--ema 'half_life': must be an average with images_per_update, .* Hint: the batch"),
    ],
)
def test_averages_that_cannot_be_are_errors(tmp_path, how, message):
    with pytest.raises(LabError, match=message):
        prepared(tmp_path, Saves(2, 2), **how)


def test_averages_of_something_else_and_damaged_ones(tmp_path):
    hook, said = prepared(tmp_path, Saves(2, 2).bfloat16())
    hook._step()
    assert {each.dtype for each in hook.average.shadow_params} == {torch.float32}
    hook._save_state(None, None, str(tmp_path / "checkpoint"))
    again, said = prepared(tmp_path, Saves(2, 2), spec="constant:decay=0.25")
    again._load_state(None, str(tmp_path / "checkpoint"))
    assert (again.num_seen, same(again.average.shadow_params, hook.average.shadow_params)) == (1, True)
    form = "constant:decay={},start_update=0,update_every=1"
    assert said == [f"the average was {form.format(0.5)} before, and continues as {form.format(0.25)}."]
    other, _ = prepared(tmp_path, Saves(3, 2))
    with pytest.raises(LabError, match="does not have the parameters that are trained"):
        other._load_state(None, str(tmp_path / "checkpoint"))
    path = tmp_path / "checkpoint" / "lrlab" / "ema.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(LabError, match="is damaged .* remove the file"):
        again._load_state(None, str(tmp_path / "checkpoint"))


@cases(
    ("text", "reason"),
    [
        ("accelerator.prepare(model)", "how it saves its weights is unknown"),
        ("accelerator.prepare(model)\nupdate_ema(a, b)", "keeps an average itself .line 2."),
        ("accelerator.prepare(model)\nindex_no_updates = 1", "resets embeddings"),
    ],
)
def test_scripts_that_are_not_recognised(tmp_path, text, reason):
    with pytest.raises(NotRecognised, match=reason):
        recognise(script_of(tmp_path, text))
    assert recognise(HostScript(str(SCRIPT))).startswith("its hook for checkpoints saves the trained weights (line ")
