"""Folders of each kind that can be published."""

import json
import shutil

import pytest
from made_up_studies import made_up_study
from published import ROOT, run_folder

from diffusers_lrlab.hub.dataset_folder import export_dataset
from diffusers_lrlab.study.reading import write_runs
from diffusers_lrlab.study.report.report import write_report

STUDY = ROOT / "model_cards" / "lr-study-2d"


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """One of each kind."""
    folder = tmp_path_factory.mktemp("folders")
    run_folder(folder / "run")
    export_dataset("dino", folder / "dino", n=1000, n_test=100)
    results, summary = made_up_study(("a", "b"), ("dino",), 2)
    (folder / "study" / "runs").mkdir(parents=True)
    write_report(folder / "study", results, summary)
    (folder / "study" / "summary.json").write_text(json.dumps(summary))
    for name in ("summary.parquet", "spec.yaml"):
        shutil.copyfile(STUDY / name, folder / "study" / name)
    (folder / "study" / "runs" / "a--dino--0--0.json").write_text("{}")
    write_runs(results, {}, folder / "study")
    (folder / "study" / "weights").mkdir()
    (folder / "study" / "weights" / "a.safetensors").write_bytes(b"weights")
    return folder
