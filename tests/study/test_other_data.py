"""Studies on other data sets than their own: `lrlab study run SPEC --dataset_name THEIRS`."""

import json

import numpy as np
import pytest
import yaml
from PIL import Image
from small_studies import ONE, SPEC, records, study, write_spec
from tables import cases

from diffusers_lrlab import run_study
from diffusers_lrlab.cli.main import main
from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.study.shown_command import names_in
from diffusers_lrlab.study.spec.expansion import expand
from diffusers_lrlab.study.spec.reading import load_spec, with_datasets

OF_IMAGES = {
    "base": {
        "resolution": 8,
        "denoiser": "dit:hidden_size=32,num_layers=1,patch_size=4",
        "max_train_steps": 2,
        "train_batch_size": 4,
        "num_validation_images": 4,
        "num_inference_steps": 2,
    },
    "arms": {"cosine": {"lr_scheduler": "cosine"}},
    "datasets": ["digits"],
    "seeds": 1,
    "metrics": ["validation_loss_ema", "frechet_distance"],
    "evaluation_points": 1,
}


@pytest.fixture
def pictures(tmp_path, monkeypatch):
    """A folder of 12 images in the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my pictures").mkdir()
    for seed in range(12):
        pixels = np.random.default_rng(seed).integers(0, 255, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "my pictures" / f"{seed}.png")
    return tmp_path / "my pictures"


@pytest.mark.slow
def test_the_flag_may_be_repeated_and_hold_several(bare, home, tmp_path):
    out = study(home, tmp_path / "out", "--dataset_name=line", "--dataset_name=moons,circle", seeds=1, arms={"constant": {}})
    assert {record["run"]["dataset"] for record in records(out).values()} == {"line", "moons", "circle"}
    saved = yaml.safe_load((out / "spec.yaml").read_text())
    assert [*saved["spec"]["datasets"]] == ["line", "moons", "circle"]
    assert "--dataset_name line,moons,circle" in saved["command"]
    assert load_spec(out / "spec.yaml").datasets == {name: {"dataset_name": name} for name in ("line", "moons", "circle")}


def test_folders_and_ids_of_the_hub(pictures):
    """In a file, and separated by commas unless it is the name of a folder."""
    pictures.rename("red, green")
    assert names_in(["red, green", "dino,moons"]) == ["red, green", "dino", "moons"]
    names = ["./my photos", "huggan/flowers", "dino"]
    spec = load_spec({"arms": {"constant": {}}, "datasets": names})
    assert {short: fields["dataset_name"] for short, fields in spec.datasets.items()} == {
        "my-photos": "./my photos",
        "flowers": "huggan/flowers",
        "dino": "dino",
    }


def test_a_folder_of_images(capsys, pictures, tmp_path):
    (tmp_path / "of").mkdir()
    (tmp_path / "of" / "images.yaml").write_text(yaml.safe_dump(OF_IMAGES))
    run_study("of/images.yaml", "out", dataset_name="my pictures", quiet=True)
    assert "Left out: frechet_distance needs features" in capsys.readouterr().err
    (record,) = records(tmp_path / "out").values()
    assert record["run"]["dataset"] == "my-pictures"
    assert record["config"]["dataset_name"] == "../my pictures"  # from the file, and without this machine's folders
    assert {*record["train"]["results"]} == {"validation_loss_ema"}
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["study"]["datasets"] == ["my-pictures"]


def test_a_folder_beside_a_preset_starts_from_the_current_folder(capsys, pictures):
    spec = with_datasets(load_spec("timesteps-digits"), ["my pictures/"])
    assert "Left out: frechet_distance" in capsys.readouterr().err
    assert spec.datasets == {"my-pictures": {"dataset_name": "./my pictures"}}
    assert spec.metrics == ("validation_loss_ema",)
    assert len(expand(spec)) == 35


@cases(("preset", "names", "expected"), [
    ("paper-lr-schedules", ["dino", "my pictures"], "on 'my-pictures': metrics: 'kl' is for points"),
    ("flow-or-ddpm-shapes", ["my pictures"], "'flow-or-ddpm-shapes' has no other metric"),
    ("quick", ["dinoo"], "Unknown data set 'dinoo'. Did you mean 'dino'"),
    ("quick", ["./none"], "'./none': must be a data set, or a folder that exists"),
    ("quick", ["dino", ""], "--dataset_name '': must be the name of a data set"),
    ("quick", ["dino", "dino"], "dino,dino: two data sets would be called 'dino'. Hint: name each once"),
    ("quick", ["a/photos", "b/photos"],
     "as in datasets: {photos-1: {dataset_name: a/photos}, photos-2: {dataset_name: b/photos}}"),
])  # fmt: skip
def test_data_that_are_refused(pictures, preset, names, expected):
    with pytest.raises(LabError) as error:
        expand(with_datasets(load_spec(preset), names))
    assert expected in str(error.value)


def test_a_folder_keeps_its_data_sets(bare, home, tmp_path, capsys):
    path, out = write_spec(home, **{**ONE, "arms": {"constant": SPEC["arms"]["constant"]}}), tmp_path / "out"
    command = ["study", "run", str(path), f"--out={out}"]
    assert main([*command, "--dataset_name=line"]) == 0
    before = {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}
    for more, given in (([], "dino"), (["--dataset_name=moons"], "moons"), (["--dataset_name=moons", "--dry_run"], "moons")):
        capsys.readouterr()
        assert main([*command, *more]) == 2
        error = capsys.readouterr().err
        for part in ("which has the study on line", f"got {given}", "give the same --dataset_name, or another --out"):
            assert part in error
        assert "None" not in error
    assert {file: file.read_bytes() for file in out.rglob("*") if file.is_file()} == before
    spec = (out / "spec.yaml").read_bytes()
    for again in ([*command, "--dataset_name=line"], ["study", "run", str(out / "spec.yaml"), f"--out={out}"]):
        assert main(again) == 0
        assert (out / "spec.yaml").read_bytes() == spec
