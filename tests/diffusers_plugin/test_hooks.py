"""Timesteps and weights of scripts that are not ours, of each form that diffusers' examples have, in real processes."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler
from scipy.stats import chisquare
from test_launch import launch

from diffusers_lrlab import get_loss_weighting, get_timestep_sampler
from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.diagnostics.gradients import gradient_norms
from diffusers_lrlab.diagnostics.timestep_log import TimestepLog, read_timesteps
from diffusers_lrlab.diffusers_plugin.hooks.log import LogHook
from diffusers_lrlab.diffusers_plugin.hooks.timesteps import TimestepHook
from diffusers_lrlab.diffusers_plugin.script.source import HostScript, NotRecognised

SCRIPTS = {name: Path(__file__).parents[1] / "scripts" / f"{name}_script.py" for name in ("ddpm", "flow")}


def run(folder, name, *arguments, options=(), **how):
    """What a script did: its rows, its weights, and what the launcher said."""
    folder.mkdir(exist_ok=True)
    stderr = launch(SCRIPTS[name], f"--output_dir={folder}", *arguments, options=options, **how)
    done = [json.loads(path.read_text()) for path in sorted(folder.glob("rows-*.json"))]
    return done, stderr


def timesteps(rows):
    """As they grow with the noise, of either form."""
    return [np.array(row["timesteps"] if "timesteps" in row else 999 - np.array(row["indices"])) for row in rows]


@pytest.mark.parametrize("name", SCRIPTS)
def test_uniform_changes_nothing(tmp_path, name):
    (bare,), _ = run(tmp_path / "bare", name)
    (hooked,), stderr = run(tmp_path / "hooked", name, options=["--timestep_sampler=uniform"])
    assert hooked == bare
    assert "--timestep_sampler uniform: 6 draws of timesteps replaced." in stderr


@pytest.mark.parametrize("name", SCRIPTS)
def test_draws_follow_the_density_of_their_update(tmp_path, name):
    """At the first, a middle and the last update of a curriculum; other numbers of the script stay as they were."""
    spec, size = "clts:sigma=0.5", 64
    arguments = [f"--train_batch_size={size}", "--gradient_accumulation_steps=8"]
    (bare,), _ = run(tmp_path / "bare", name, *arguments)
    (hooked,), _ = run(tmp_path / "hooked", name, *arguments, options=[f"--timestep_sampler={spec}"])
    assert [row["after"] for row in hooked["rows"]] == [row["after"] for row in bare["rows"]]
    scheduler = DDPMScheduler() if name == "ddpm" else None
    sampler = get_timestep_sampler(spec, 1000, 6, scheduler)
    for update in (0, 3, 5):
        drawn = np.concatenate(timesteps(row for row in hooked["rows"] if row["update"] == update))
        expected = sampler.probabilities(update).numpy()
        counts = np.histogram(drawn, np.arange(0, 1001, 100))[0]
        parts = expected.reshape(10, 100).sum(1)
        assert len(drawn) == 512
        assert chisquare(counts, parts * len(drawn)).pvalue > 1e-4, update


def test_processes_and_accumulation_share_one_batch(tmp_path):
    """The global batch of an update is the same however it is divided; each process and micro-batch has its own part."""
    options = ["--timestep_sampler=logit_normal", "--strict"]
    whole = run(tmp_path / "1", "ddpm", "--train_batch_size=8", "--seed=3", options=options)[0]
    split = run(
        tmp_path / "2",
        "ddpm",
        "--train_batch_size=2",
        "--gradient_accumulation_steps=2",
        "--seed=3",
        options=options,
        processes=2,
    )[0]
    for update in range(6):
        together = [row["timesteps"] for row in whole[0]["rows"] if row["update"] == update]
        parts = zip(*([row["timesteps"] for row in rank["rows"] if row["update"] == update] for rank in split), strict=True)
        assert [t for row in together for t in row] == [t for micro in parts for part in micro for t in part]


@pytest.mark.parametrize(("updates", "rows"), [(6, 10), (3, 0)])
def test_the_log_of_a_script_that_fails_after_its_last_update(tmp_path, updates, rows):
    """The rows so far are written, and nothing is announced that is not there."""
    arguments = [f"--max_train_steps={updates}", "--fail_at_end"]
    _, stderr = run(tmp_path, "ddpm", *arguments, options=["--log_timesteps"], expect=1)
    paths = [tmp_path / "lrlab" / f"timesteps.{end}" for end in ("parquet", "png")]
    assert [path.exists() for path in paths] == [bool(rows)] * 2
    assert (str(paths[1]) in stderr) == bool(rows)
    if rows:
        table = read_timesteps(paths[0])
        assert (len(table), {*table["update"].to_pylist()}) == (rows, {5})
        assert "The script did not end: this is up to update 5." in stderr
    else:
        assert "no row was written, since the script did not end" in stderr


def test_strata_span_updates_where_batches_are_small(tmp_path):
    """64 draws of batch 1 have one in each 64th of the timesteps."""
    arguments = ["--train_batch_size=1", "--max_train_steps=128"]
    (done,), _ = run(tmp_path / "run", "ddpm", *arguments, options=["--timestep_sampler=stratified"])
    drawn = np.concatenate(timesteps(done["rows"]))
    for window in drawn.reshape(2, 64):
        borders = np.arange(65) * 1000 / 64
        assert (np.sort(window) >= np.floor(borders[:-1])).all()
        assert (np.sort(window) < borders[1:]).all()


@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction"])
def test_losses_of_ddpm_are_weighted(tmp_path, prediction_type):
    arguments = [f"--prediction_type={prediction_type}"]
    (done,), stderr = run(tmp_path / "run", "ddpm", *arguments, options=["--loss_weighting=min_snr", "--strict"])
    weighting = get_loss_weighting("min_snr", DDPMScheduler(prediction_type=prediction_type))
    for row in done["rows"]:
        weights = weighting.weights(torch.tensor(row["timesteps"])).numpy()
        np.testing.assert_allclose(row["loss"], np.mean(weights * row["errors"]), rtol=1e-5)
    assert "--loss_weighting min_snr: 6 losses weighted." in stderr


@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize("precondition", [0, 1])
def test_losses_of_flow_matching_are_weighted(tmp_path, shift, precondition):
    """Min-SNR is on the error of the image: min(SNR, 5) of it, and SNR is ((1 - sigma) / sigma)^2."""
    arguments = [f"--shift={shift}", f"--precondition_outputs={precondition}"]
    options = ["--loss_weighting=min_snr", "--timestep_sampler=logit_normal:mean=1", "--strict"]
    (done,), _ = run(tmp_path / "run", "flow", *arguments, options=options)
    for row in done["rows"]:
        sigmas = np.array(row["sigmas"])
        weights = np.minimum(((1 - sigmas) / sigmas) ** 2, 5.0)
        weights = weights if precondition else weights * sigmas**2
        np.testing.assert_allclose(row["loss"], np.mean(weights * row["errors"]), rtol=1e-4)


def test_what_makes_up_for_a_density_weighs_losses(tmp_path):
    spec = "logit_normal:unbiased=true"
    (done,), _ = run(tmp_path / "run", "ddpm", options=[f"--timestep_sampler={spec}"])
    probabilities = get_timestep_sampler(spec, 1000).probabilities(0).numpy()
    for row in done["rows"]:
        weights = 1 / (1000 * probabilities[row["timesteps"]])
        np.testing.assert_allclose(row["loss"], np.mean(weights * row["errors"]), rtol=1e-5)


def test_an_update_that_a_gradient_scaler_left_out_is_drawn_again():
    """By all its micro-batches, where fp16 overflows: it is no draw too many."""
    accelerator = SimpleNamespace(gradient_accumulation_steps=2, num_processes=1, process_index=0)
    run = SimpleNamespace(accelerator=accelerator, arguments={}, num_skipped=0)
    clock = SimpleNamespace(run=run, update=3)
    hook = TimestepHook(HostScript(str(SCRIPTS["ddpm"])), clock, "logit_normal", "--timestep_sampler")
    hook.sampler = get_timestep_sampler("logit_normal", 1000)
    drawn = []
    for skipped in (0, 0, 1, 1):
        run.num_skipped = skipped
        drawn.append(hook._drawn_by_sampler(torch.zeros(4).long()).tolist())
    assert drawn[:2] == drawn[2:]
    assert drawn[0] != drawn[1]
    with pytest.raises(LabError, match="draws timesteps 3 times in one update, where 2"):
        hook._drawn_by_sampler(torch.zeros(4).long())


@pytest.mark.parametrize(
    ("name", "arguments", "options", "status", "message"),
    [
        ("ddpm", ["--draw_twice"], ["--timestep_sampler=logit_normal"], 2, "draws timesteps 2 times in one update"),
        ("ddpm", ["--snr_gamma=5"], ["--loss_weighting=min_snr"], 2, "weighs losses by itself (--snr_gamma 5.0)"),
        ("flow", ["--weighting_scheme=cosmap"], ["--loss_weighting=p2"], 2, "weighs losses by itself (--weighting_scheme"),
        ("ddpm", [], ["--strict"], 2, "--strict has no effect without"),
        ("ddpm", [], ["--timestep_sampler=loss_second_moment"], 2, "follows the losses of single images"),
        ("ddpm", [], ["--loss_weighting=learned_log_variance"], 2, "follows the losses of single images"),
        ("ddpm", [], ["--timestep_sampler=logit_norml"], 2, "Did you mean 'logit_normal'"),
    ],
)
def test_what_is_refused(tmp_path, name, arguments, options, status, message):
    done, stderr = run(tmp_path / "run", name, *arguments, options=options, expect=status)
    assert message in stderr
    assert not done


@pytest.mark.parametrize("strict", [False, True])
def test_a_script_that_draws_in_another_way_is_left_alone(tmp_path, strict):
    from test_launch import HOST_SCRIPT

    options = ["--timestep_sampler=logit_normal", *["--strict"] * strict]
    stderr = launch(HOST_SCRIPT, f"--output_dir={tmp_path}", options=options, expect=2 * strict)
    assert "cannot be used in this script: it calls neither torch.randint(0, " in stderr
    assert (tmp_path / "rows.json").exists() != strict


def test_forms_are_recognised_by_the_text(tmp_path):
    def form(text):
        (tmp_path / "script.py").write_text(text)
        return HostScript(tmp_path / "script.py")

    index = "t = torch.randint(0, s.config.num_train_timesteps, (b,))\n"
    density = "u = compute_density_for_timestep_sampling(b)\ni = (u * s.config.num_train_timesteps).long()\n"
    assert form(index).form == "index"
    assert form(density).form == "density"
    assert not form(density + "x = (1.0 - sigmas) * data + sigmas * noise").sigma_is_of_data
    assert form(density + "x = (1.0 - sigmas) * noise + sigmas * data").sigma_is_of_data
    for text, reason in [
        (index + density, "in two ways .lines 1, 2."),
        ("u = compute_density_for_timestep_sampling(b)\n", "for noise levels, not for places"),
        ("t = torch.randint(0, args.num_ddim_timesteps, (b,))\n", "it calls neither"),
        ("not python", "it calls neither"),
    ]:
        with pytest.raises(NotRecognised, match=reason):
            _ = form(text).form


# --- what each noise level does ------------------------------------------------------------------------------------------


def read_log(folder):
    import pyarrow.parquet as pq

    return pq.read_table(folder / "lrlab" / "timesteps.parquet").to_pandas()


def losses_by_level(rows, loss="errors"):
    """The mean loss and the number of images of each tenth of the timesteps."""
    bins = np.concatenate(timesteps(rows)) // 100
    values = np.concatenate([row[loss] for row in rows])
    counts = np.bincount(bins, minlength=10)
    return counts, np.bincount(bins, values, minlength=10) / np.maximum(counts, 1)


@pytest.mark.parametrize("options", [[], ["--timestep_sampler=logit_normal", "--loss_weighting=min_snr"]])
def test_logged_losses_are_those_of_the_images(tmp_path, options):
    """Before any weight; a run that is only logged is the script's own."""
    arguments = ["--train_batch_size=32", "--gradient_accumulation_steps=2"]
    (bare,), _ = run(tmp_path / "bare", "ddpm", *arguments, options=options)
    logging = ["--log_timesteps", "--timestep_grad_every=2"]
    (logged,), stderr = run(tmp_path / "logged", "ddpm", *arguments, options=[*options, *logging])
    assert logged == bare
    table = read_log(tmp_path / "logged")
    gradients, table = table[table["grad_norm"].notna()], table[table["num_samples"].notna()]
    assert gradients["update"].unique().tolist() == [1, 3, 5]
    for update, rows in gradients.groupby("update"):
        measured = next(row for row in logged["rows"] if row["update"] == update - 1)["timesteps"][:8]
        assert rows["bin"].tolist() == sorted({timestep // 100 for timestep in measured})
    assert table["update"].unique().tolist() == [1, 2, 3, 4, 5, 6]
    for update, rows in table.groupby("update"):
        counts, means = losses_by_level([row for row in logged["rows"] if row["update"] == update - 1])
        assert rows["num_samples"].tolist() == counts.tolist()
        np.testing.assert_allclose(rows["loss_mean"].dropna(), means[counts > 0], rtol=1e-5)
    assert "--log_timesteps: by losses of images, the loss is highest at timesteps" in stderr
    assert (tmp_path / "logged" / "lrlab" / "timesteps.png").exists()
    assert table["asked_share"].notna().all()


def test_levels_means_follow_from_micro_batches(tmp_path):
    """A script that shows no losses of images: its means agree with those of the images within their errors."""
    (logged,), stderr = run(
        *(tmp_path, "flow", "--train_batch_size=4", "--gradient_accumulation_steps=4", "--max_train_steps=60"),
        options=["--log_timesteps", "--timestep_grad_every=20"],
    )
    assert "--timestep_grad_every cannot be used in this script: it shows the mean loss of 4 images." in stderr
    table = read_log(tmp_path)
    assert table["update"].unique().tolist() == [40, 60]
    deviations, first = [], 0
    for update, rows in table.groupby("update"):
        seen, first = [row for row in logged["rows"] if first <= row["update"] < update], update
        counts, means = losses_by_level(seen)
        assert rows["num_samples"].tolist() == counts.tolist()
        deviations += list((rows["loss_mean"] - means) / np.sqrt(rows["loss_variance"] / rows["num_samples"]))
    assert np.mean(np.abs(deviations) < 3) > 0.95
    assert table["asked_share"].isna().all()  # what the script's own density is
    assert "by least squares from the losses of micro-batches" in stderr


@pytest.mark.slow
def test_gradients_of_micro_batches_of_one_image(tmp_path):
    """The script shows the loss of one image at a time, so that its gradient can be measured."""
    arguments = ["--train_batch_size=1", "--gradient_accumulation_steps=4", "--max_train_steps=20"]
    (bare,), _ = run(tmp_path / "bare", "flow", *arguments)
    (logged,), _ = run(tmp_path / "logged", "flow", *arguments, options=["--log_timesteps", "--timestep_grad_every=1"])
    assert logged == bare
    table = read_log(tmp_path / "logged")
    assert table["grad_norm"].notna().sum() >= 10


def test_gradients_are_of_the_updates_that_were_asked_for():
    """What a small update leaves of its eight is not made up for in the next, which a resume would not know of."""
    hook = LogHook(HostScript(str(SCRIPTS["ddpm"])), SimpleNamespace(run=None), SimpleNamespace(num_seen=0), grad_every=2)
    hook.is_active, left = False, []
    for update in (0, 0, 1, 2):
        hook._at_draw(update)
        left.append(hook._gradients_left)
        hook._gradients_left = max(0, hook._gradients_left - 1)
    assert left == [8, 7, 0, 8]


def test_gradient_norms_are_those_of_single_images():
    model = torch.nn.Linear(3, 1).double()
    inputs = torch.randn(5, 3, dtype=torch.float64)
    losses = model(inputs).square().mean(1)
    norms = gradient_norms(losses, list(model.parameters()))
    by_hand = []
    for image in inputs:
        model.zero_grad()
        model(image[None]).square().mean().backward()
        by_hand.append(torch.linalg.vector_norm(torch.cat([each.grad.flatten() for each in model.parameters()])).item())
    np.testing.assert_allclose(norms.numpy(), by_hand, rtol=1e-6)
    losses.mean().backward()  # the graph is still there


def test_processes_are_logged_together(tmp_path):
    both, _ = run(tmp_path, "ddpm", "--train_batch_size=32", options=["--log_timesteps"], processes=2)
    rows = read_log(tmp_path).query("update == 3")
    counts, means = losses_by_level([row for rank in both for row in rank["rows"] if row["update"] == 2])
    assert rows["num_samples"].tolist() == counts.tolist()
    np.testing.assert_allclose(rows["loss_mean"].dropna(), means[counts > 0], rtol=1e-5)


def test_a_hook_with_nothing_to_act_on(tmp_path):
    """Its text has what is hooked, in a place that is never reached: said, or with `--strict` an error."""
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\nif not torch.__version__:\n    t = torch.randint(0, s.config.num_train_timesteps, (3,))\n"
    )
    unused = "--timestep_sampler logit_normal: no draw of timesteps replaced."
    assert unused in launch(script, options=["--timestep_sampler=logit_normal"])
    assert f"error: {unused} (--strict)" in launch(script, options=["--timestep_sampler=logit_normal", "--strict"], expect=2)


def test_a_log_without_new_rows_says_so():
    """As of a run that was at its end when it was resumed; and of one without a folder, which is said once."""
    script, said = HostScript(str(SCRIPTS["ddpm"])), []
    clock = SimpleNamespace(run=SimpleNamespace(arguments={}, refuse=lambda *what: said.append(what)))
    hook = LogHook(script, clock, SimpleNamespace(num_seen=0))
    hook._at_draw(0)
    hook._at_draw(1)
    assert len(said) == 1
    hook = LogHook(script, clock, SimpleNamespace(num_seen=0))
    hook.log = TimestepLog(10, 1000)
    hook.log.add_losses(1, torch.ones(3, 10, dtype=torch.float64), None)
    hook.log.last_means = TimestepLog(10, 1000).last_means
    assert hook.report() == "--log_timesteps: no loss was seen, and no row is added."
