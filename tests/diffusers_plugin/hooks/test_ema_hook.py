"""Averages of the weights of third-party scripts, against diffusers' EMAModel stepped by the script itself."""

import json
import shutil
import threading
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
from diffusers_lrlab.averaging.snapshots import read_snapshots
from diffusers_lrlab.cli.main import main
from diffusers_lrlab.diffusers_plugin import hook_options
from diffusers_lrlab.diffusers_plugin.hooks.ema import EMAHook, recognise
from diffusers_lrlab.diffusers_plugin.host import script_averages
from diffusers_lrlab.diffusers_plugin.host.run import HostRun
from diffusers_lrlab.diffusers_plugin.script.source import HostScript, NotRecognised
from diffusers_lrlab.launch import make_parser

SCRIPT = Path(__file__).parents[2] / "scripts" / "ema_script.py"
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
    """From a checkpoint; what the script validates and saves is the average, and the training continues from the weights."""
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
    assert "and in the script's final result." in stderr


SEVERAL = ["--ema=warmup_power", "--ema=constant:decay=0.5", "--ema=posthoc:sigma_rels=[0.1|0.2],snapshots=4", "--strict"]


def snapshots_of(folder):
    return [int(path.name[7:]) for path in sorted((folder / "lrlab" / "ema_snapshots").glob("update-*"))]


def test_several_averages_and_snapshots(tmp_path, capsys):
    """The first one is that of the script; `lrlab ema` makes others from the snapshots, in the script's format."""
    stderr, beside = run(tmp_path / "run", options=SEVERAL)
    folder = tmp_path / "run" / "lrlab"
    assert same(trained(folder / "ema" / "model"), of(beside, "ema"))
    assert not same(trained(folder / "ema_2" / "model"), of(beside, "ema"))
    assert not (folder / "ema_3").exists()
    assert "Beside it: ema_2. Averages of other widths: lrlab ema" in stderr
    assert snapshots_of(tmp_path / "run") == [2, 4, 6, 8]
    assert main(["ema", str(tmp_path / "run"), "--sigma_rel", "0.2", "--out", str(tmp_path / "wide")]) == 0
    assert "residual of the profile" in capsys.readouterr().out
    last = read_snapshots(folder / "ema_snapshots")[-1]
    expected = {
        f"0.trained.{name}": torch.zeros(value.shape)
        for name, value in zip(("weight", "bias"), of(beside, "ema"), strict=True)
    }
    last.read([0.0, 1.0], expected)
    found = trained(tmp_path / "wide" / "model")
    for value, own in zip(found, expected.values(), strict=True):
        torch.testing.assert_close(value, own)
    assert not same(found, of(beside, "ema"))
    frozen = [load_file(path / "model" / WEIGHTS)["frozen.weight"] for path in (tmp_path / "wide", folder / "ema")]
    assert frozen[0].equal(frozen[1])
    for arguments, message in (
        (["--sweep"], "must be of a script that measured widths itself: only the script has its data and its loss"),
        (["--sigma_rel", "0.05"], "--sigma_rel 0.05: must be at least 0.1"),
    ):
        assert main(["ema", str(tmp_path / "run"), *arguments, "--out", str(tmp_path / "no")]) == 2
        assert message in capsys.readouterr().err
    (folder / "ema_snapshots" / "places.json").unlink()
    assert main(["ema", str(tmp_path / "run"), "--sigma_rel", "0.2", "--out", str(tmp_path / "no")]) == 2
    assert "this file is written when the script ends" in capsys.readouterr().err


HELD_OUT = ["--validation_fraction=0.1", "--validation_steps=4"]


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_widths_are_measured_at_the_end_and_the_best_one_is_saved(tmp_path, capsys, processes):
    """The training is the same, to the bit; the loss of the average that is run is that of the script's own validation."""
    options = ["--ema=posthoc:sigma_rels=[0.1|0.2],snapshots=4", "--ema_swap=validation", "--strict", *HELD_OUT]
    _, beside = run(tmp_path / "bare", options=options, processes=processes)
    stderr, swept = run(tmp_path / "run", options=[*options, "--ema_sweep=3"], processes=processes)
    assert swept.keys() == beside.keys()
    assert all(torch.equal(value, swept[name]) for name, value in beside.items())
    out, folder = tmp_path / "best", tmp_path / "run" / "lrlab"
    assert main(["ema", str(tmp_path / "run"), "--sweep", "--out", str(out)]) == 0
    about = json.loads((out / "average.json").read_text())
    sweep, rows = about["sweep"], (folder / "validation.jsonl").read_text().splitlines()
    assert sweep["widths"] == pytest.approx([0.1, 0.025**0.5, 0.25])
    assert len({*sweep["values"]}) == 3
    assert sweep["of_run"] == pytest.approx(json.loads(rows[-1])["validation_loss"], rel=1e-6)
    assert sweep["values"][0] == pytest.approx(sweep["of_run"], rel=1e-4)  # the first average has this width
    assert about["sigma_rel"] == sweep["widths"][sweep["values"].index(min(sweep["values"]))]
    assert f"Of 3 widths of the average, it is lowest for sigma_rel {about['sigma_rel']:.4g}" in stderr
    assert (out / "ema_sweep.png").exists()
    for arguments, message in (
        (["--metric", "kl"], "must be validation_loss for a third-party script"),
        (["--num", "4"], "--num 4"),
    ):
        assert main(["ema", str(tmp_path / "run"), "--sweep", *arguments, "--out", str(tmp_path / "no")]) == 2
        assert message in capsys.readouterr().err
    saved = json.loads((folder / "ema_snapshots" / "sweep.json").read_text())
    (folder / "ema_snapshots" / "sweep.json").write_text(json.dumps({**saved, "update": 7}))
    assert main(["ema", str(tmp_path / "run"), "--sweep", "--out", str(tmp_path / "no")]) == 2
    assert "got no measurement. Hint: add --validation_fraction 0.05" in capsys.readouterr().err


def test_a_sweep_needs_snapshots():
    with pytest.raises(LabError, match="--ema_sweep 3 has no effect without --validation_steps"):
        hook_options.check(make_parser().parse_args(["--ema=posthoc", "--ema_sweep=3", str(SCRIPT)]))
    stderr = launch(SCRIPT, options=["--ema=constant", *HELD_OUT, "--ema_sweep=3"], expect=2)
    assert "--ema_sweep 3: must be given with --ema posthoc" in stderr


def test_several_averages_resume(tmp_path):
    """Each with its own state; snapshots after the checkpoint are taken again, and those before it stay."""
    run(tmp_path, "--max_train_steps=5", options=SEVERAL)
    assert snapshots_of(tmp_path) == [1, 2, 3, 5]
    again = f"--resume_from_checkpoint={tmp_path / 'checkpoint-5'}"
    _, beside = run(tmp_path, again, "--checkpointing_steps=7", options=SEVERAL)
    assert snapshots_of(tmp_path) == [1, 2, 3, 5, 6, 8]
    earlier, average = (trained(tmp_path / part / "lrlab/ema_2/model") for part in ("checkpoint-7", "."))
    for value, before, raw in zip(average, earlier, of(beside, "raw"), strict=True):
        torch.testing.assert_close(value, 0.5 * before + 0.5 * raw)


def test_a_new_run_without_snapshots_removes_those_of_the_run_before(tmp_path):
    run(tmp_path, "--max_train_steps=5", options=SEVERAL)
    assert snapshots_of(tmp_path)
    run(tmp_path, "--max_train_steps=5", options=["--ema=warmup_power", "--strict"])
    assert not snapshots_of(tmp_path)


def test_averages_that_a_checkpoint_lacks_all_start_anew(tmp_path):
    hook, _ = prepared(tmp_path, Saves(2, 2), spec="constant:decay=0.5")
    hook._step()
    hook._save_state(None, None, str(tmp_path / "checkpoint"))
    again, said = prepared(tmp_path, Saves(2, 2), spec="constant:decay=0.5|warmup_power")
    again._load_state(None, str(tmp_path / "checkpoint"))
    assert said == ["the checkpoint has no average number 2 of --ema, so all averages start from the weights."]
    assert (again.num_seen, again.average) == (0, None)


def test_snapshots_need_the_length_of_the_run(tmp_path):
    hook, _ = prepared(tmp_path, Saves(2, 2), spec="posthoc")
    with pytest.raises(LabError, match="--ema posthoc needs the number of updates, .* Give --num_updates N"):
        hook._step()
    short, _ = prepared(tmp_path, Saves(2, 2), spec="posthoc", num_updates=9)
    with pytest.raises(LabError, match="takes 16 snapshots, .* and the run has 9 updates"):
        short._step()


def test_a_slow_disk_holds_up_no_update(tmp_path, monkeypatch):
    """A snapshot is a copy of the average after its update, and is there before the checkpoint that follows it."""
    free, write = threading.Event(), script_averages.write_snapshot
    monkeypatch.setattr(script_averages, "write_snapshot", lambda *what: free.wait(30) and write(*what))
    model = Saves(2, 2)
    hook, _ = prepared(tmp_path, model, spec="posthoc:sigma_rels=[0.1],snapshots=2", num_updates=4)
    hook._step()
    hook._step()
    expected = [value.clone() for value in hook.average.shadow_params]
    with torch.no_grad():
        model.weight.add_(1.0)
    hook._step()
    assert not (tmp_path / "lrlab" / "ema_snapshots").exists()
    free.set()
    hook._save_state(None, None, str(tmp_path / "checkpoint-3"))
    (one,) = read_snapshots(tmp_path / "lrlab" / "ema_snapshots")
    found = {name: torch.zeros(shape) for name, shape in one.shapes().items()}
    one.read([1.0], found)
    assert same([found[name] for name in hook.trained.names], expected)
    monkeypatch.setattr(script_averages, "write_snapshot", lambda *what: 1 / 0)
    hook._step()
    with pytest.raises(ZeroDivisionError):
        hook._finish()


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


@pytest.mark.parametrize(("hook", "processes"), [("leaves", 1), pytest.param("leaves", 2, marks=pytest.mark.slow)])
def test_weights_that_a_hook_leaves_to_accelerate(tmp_path, hook, processes):
    """As sd-scripts' train_network.py: the hook only takes other models' weights away, and writes a file of its own."""
    stderr, beside = run(tmp_path, f"--hook={hook}", options=["--ema=warmup_power", "--strict"], processes=processes)
    folder = tmp_path / "lrlab" / "ema"
    assert sorted(path.name for path in folder.iterdir()) == ["model.safetensors", "train_state.json"]
    saved = load_file(folder / "model.safetensors")
    assert same([saved["trained.weight"], saved["trained.bias"]], of(beside, "ema"))
    assert saved["frozen.weight"].shape == (3, 2)
    assert f"--ema warmup_power: the average of 8 updates is in {folder}." in stderr
    assert (tmp_path / "checkpoint-5" / "lrlab" / "ema" / "model.safetensors").exists()


def test_weights_that_a_hook_takes_away_and_does_not_save(tmp_path):
    """The average is written by the names of parameters, and a checkpoint without weights is none to resume from exactly."""
    options = ["--ema=warmup_power", "--exact_resume", "--strict"]
    stderr, beside = run(tmp_path, "--hook=drops", "--checkpointing_steps=3", options=options)
    assert stderr.count("lacks the weights of 2 trained parameters, such as 0.trained.weight. A resume from it is not") == 1
    assert "--exact_resume: 0 checkpoints written from which a resume is exact." in stderr
    saved = load_file(tmp_path / "lrlab" / "ema" / "average.safetensors")
    assert same([saved["0.trained.weight"], saved["0.trained.bias"]], of(beside, "ema"))
    assert stderr.count("hook for checkpoints omits 2 of 2 trained tensors (0.trained.weight, 0.trained.bias)") == 1
    assert f"the average of 8 updates is in {tmp_path / 'lrlab' / 'ema' / 'average.safetensors'}" in stderr


@pytest.mark.parametrize("checkpoints", [5, 20])
def test_a_script_that_fails_after_its_last_update(tmp_path, checkpoints):
    """The average is where a checkpoint was written, and nowhere else."""
    arguments = [f"--output_dir={tmp_path}", f"--checkpointing_steps={checkpoints}", "--fail_at_end"]
    stderr = launch(SCRIPT, *arguments, options=["--ema=constant"], expect=1)
    assert not (tmp_path / "lrlab").exists()
    saved = f"the average of 5 updates is in {tmp_path / 'checkpoint-5' / 'lrlab' / 'ema'}, the last checkpoint"
    assert (saved if checkpoints == 5 else "the average was not written, since the script did not end") in stderr


@pytest.mark.slow
def test_it_begins_anew_where_a_checkpoint_has_none(tmp_path, bare):
    (tmp_path / "checkpoint-5").symlink_to(bare[0] / "checkpoint-5")
    stderr, _ = run(tmp_path, f"--resume_from_checkpoint={tmp_path / 'checkpoint-5'}", options=["--ema=constant"])
    assert "the checkpoint has no average" in stderr
    assert "the average of 3 updates is in" in stderr
    # A script with a checkpoint of an average resumes without --ema.
    assert "average" not in run(tmp_path / "2", f"--resume_from_checkpoint={tmp_path / 'checkpoint-5'}")[0]


def test_what_was_announced_is_looked_at(tmp_path):
    """Numbers that are not finite, and files that are gone, empty or damaged when the report is made."""
    model = Saves(2, 2)
    hook, _ = prepared(tmp_path, model)
    hook._step()
    hook._finish()
    folder = tmp_path / "lrlab" / "ema"
    assert hook.report() == f"--ema constant: the average of 1 update is in {folder}."
    assert hook.trained.missing_from(folder) == []
    (folder / "weights.pt").write_bytes(b"")
    assert f"is lost: {folder / 'weights.pt'} is empty" in hook.report()
    shutil.rmtree(folder)
    assert f"is lost: {folder} is missing" in hook.report()
    with torch.no_grad():
        model.bias[0] = float("nan")
    hook, _ = prepared(tmp_path, model)
    hook._step()
    hook._finish()
    assert "It cannot be used: 1 of its 2 tensors hold values that are not finite, such as 0.bias." in hook.report()
    assert hook.saved.path == folder  # as the script saves: not a number is a value, too


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
        torch.save(self.state_dict(), Path(folder) / "weights.pt")


def prepared(
    folder, *models, spec="constant:decay=0.5", swap=None, optimizer=None, num_updates=None, loader=None, **arguments
):
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
    host.optimizer = optimizer or torch.optim.SGD(torch.nn.Linear(1, 1).parameters())
    host.arguments = {"output_dir": str(folder), **arguments}
    host.training_loader = loader
    clock = SimpleNamespace(run=host, counts=False, count_updates=lambda: num_updates)
    script = HostScript(str(SCRIPT))
    script._calls.pop("register_save_state_pre_hook")
    hook = EMAHook(script, clock, spec, swap)
    hook._begin()
    return hook, said


def quantized():
    model = torch.nn.Linear(2, 2)
    model.weight = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.uint8), requires_grad=False)
    return model


REFUSED = {
    "quantized": (quantized(), {}, "its Linear is quantized: weight is torch.uint8"),
    "sharded": (Saves(2, 2), {"distributed": "FSDP"}, "its models are sharded .FSDP."),
    "nothing_trained": (Saves(2, 2).requires_grad_(False), {}, "nothing that it prepares has trainable parameters"),
    "no_format": (torch.nn.Linear(2, 2), {}, "registers no hook for checkpoints, and its Linear saves no weights"),
    "no_folder": (Saves(2, 2), {"output_dir": None}, "it has no --output_dir"),
    "embeddings": (Saves(2, 2), {"train_text_encoder_ti": True}, "it resets embeddings"),
}


@pytest.mark.parametrize("name", REFUSED)
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
    assert "the script ended after 3 updates, not the expected 9" in said[0]
    assert torch.load(tmp_path / "lrlab" / "ema" / "weights.pt")["weight"].item() == pytest.approx(expected)
    assert model.weight.item() == values[-1]


@cases("is_late", [False, True])
def test_a_half_life_knows_the_images_of_an_update(tmp_path, is_late):
    """Two micro-batches of 8, by the script's loader: at once, or at the first update if that is prepared elsewhere."""
    model, loader = Saves(1, 1), SimpleNamespace(total_batch_size=8)
    spec = "half_life:images=40,rampup=1e9"
    hook, _ = prepared(tmp_path / str(is_late), model, spec=spec, loader=None if is_late else loader, train_batch_size=8)
    assert hook.form.lacks_images == is_late
    hook.run.accelerator.gradient_state.active_dataloader = loader
    expected, decay = None, 0.5 ** (16 / 40)
    for value in (1.0, 5.0, -2.0):
        with torch.no_grad():
            model.weight.fill_(value)
        hook._step()
        expected = value if expected is None else decay * expected + (1 - decay) * value
    with hook.weights():
        assert model.weight.item() == pytest.approx(expected)
    assert "images_per_update=16" in hook._metadata()["form"]


def test_a_half_life_is_refused_where_the_images_are_unknown(tmp_path):
    loader = SimpleNamespace(total_batch_size=1)  # of a dataset that yields batches
    with pytest.raises(LabError, match="--ema half_life counts images, and .* Add images_per_update=N to it"):
        prepared(tmp_path, Saves(2, 2), spec="half_life", loader=loader, train_batch_size=8)
    hook, _ = prepared(tmp_path, Saves(2, 2), spec="half_life:images_per_update=8", loader=loader, train_batch_size=8)
    assert not hook.form.lacks_images


def test_averages_of_something_else_and_damaged_ones(tmp_path):
    hook, said = prepared(tmp_path, Saves(2, 2))
    hook._step()
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


def test_a_run_that_goes_on_after_its_end(tmp_path):
    hook, _ = prepared(tmp_path, Saves(1, 1), swap="final", num_updates=1)
    hook._step()
    assert hook._is_at_end()
    hook._finish()
    with pytest.raises(LabError, match="continues to train after 1 update"):
        hook._step()
    hook, _ = prepared(tmp_path, Saves(1, 1), swap="final")
    with pytest.raises(LabError, match="--num_updates N before its name"):
        hook._step()


@cases(
    ("text", "reason"),
    [
        ("print()", "it prepares nothing"),
        ("accelerator.prepare(model)", "the end of its training is unknown"),
        ("accelerator.prepare(model)\naccelerator.end_training()", "how it saves its weights is unknown"),
        ("accelerator.prepare(model)\nupdate_ema(a, b)", "keeps an average itself .line 2."),
        ("accelerator.prepare(model)\nindex_no_updates = 1", "resets embeddings"),
    ],
)
def test_scripts_that_are_not_recognised(tmp_path, text, reason):
    (tmp_path / "script.py").write_text(text)
    with pytest.raises(NotRecognised, match=reason):
        recognise(HostScript(str(tmp_path / "script.py")))


def test_what_is_recognised_is_told():
    found = recognise(HostScript(str(SCRIPT)))
    assert found.startswith("its hook for checkpoints saves the trained weights (line ")
    assert found.endswith("); --ema_swap both")


def test_a_swap_without_an_average_is_an_error():
    options = make_parser().parse_args(["--ema_swap=final", str(SCRIPT)])
    with pytest.raises(LabError, match="--ema_swap final has no effect without --ema"):
        hook_options.check(options)
