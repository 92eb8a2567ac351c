"""Which precision a run computes in if nobody says."""

import dataclasses
import json
import platform

import pytest
import torch

from diffusers_lrlab import TrainingConfig
from diffusers_lrlab.core import environment
from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.study.runs import precision
from diffusers_lrlab.study.runs.context import StudyContext
from diffusers_lrlab.study.runs.precision import products_in
from diffusers_lrlab.study.runs.results import StudyFolder
from diffusers_lrlab.training import plan_text
from diffusers_lrlab.training.prepare import check_precision, make_accelerator, prepare, usual_precision
from diffusers_lrlab.training.resolve import resolve_config
from diffusers_lrlab.training.resume import resumed_config
from diffusers_lrlab.training.stepping import use_tf32


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that computes in bfloat16, as far as torch says."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)


def test_a_cpu_computes_in_what_the_launcher_says():
    assert usual_precision() is None


@pytest.mark.parametrize(("launched", "expected"), [(None, "bf16"), ("no", "bf16"), ("fp16", None)])
def test_a_gpu_computes_in_bfloat16_unless_the_launcher_says_otherwise(monkeypatch, gpu, launched, expected):
    if launched is not None:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launched)
    assert usual_precision() == expected


def test_tf32_is_a_matter_of_gpus_that_have_it(monkeypatch, gpu):
    config = resolve_config(TrainingConfig(dataset_name="digits", max_train_steps=2, allow_tf32=True))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    check_precision(config)
    for allowed in (True, False):  # the run before says nothing about this one; the latter is torch's default
        use_tf32(allowed)
        assert torch.backends.cuda.matmul.allow_tf32 is allowed
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    with pytest.raises(LabError, match="--allow_tf32 needs an NVIDIA GPU of Ampere or later, and there is none"):
        check_precision(config)


@pytest.mark.parametrize(("name", "allowed"), [("fp32", False), ("tf32", True)])
def test_products_of_a_study_by_the_switch_that_accelerate_uses(name, allowed):
    """torch cannot read, and so cannot compile with, what was set by both of its names."""
    matmul = torch.backends.cuda.matmul
    before, matmul.allow_tf32 = matmul.allow_tf32, not allowed
    try:
        with products_in(name, torch.device("cuda")):
            assert matmul.allow_tf32 is allowed
            assert torch.get_float32_matmul_precision() == ("high" if allowed else "highest")
        assert matmul.allow_tf32 is not allowed
    finally:
        matmul.allow_tf32 = before


def test_a_program_may_set_tf32_by_the_newer_name_of_the_switch(tmp_path):
    """torch then refuses to read the older one."""
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "tf32"
    try:
        with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
            assert matmul.allow_tf32
        make_accelerator(resolve_config(TrainingConfig(dataset_name="digits", output_dir=str(tmp_path / "run"))))
        with products_in("fp32", torch.device("cuda")):
            assert matmul.allow_tf32 is False
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = before


@pytest.mark.parametrize(("then", "asked", "expected"), [("no", None, "no"), ("bf16", None, None), ("no", "bf16", "bf16")])
def test_a_run_of_float32_stays_one(tmp_path, then, asked, expected):
    config = resolve_config(TrainingConfig(dataset_name="digits", max_train_steps=2, mixed_precision=asked))
    saved = dataclasses.replace(config, mixed_precision=then).to_dict()
    (tmp_path / "trainer.json").write_text(json.dumps({"config": saved, "mixed_precision": then}))
    assert resumed_config(config, tmp_path).mixed_precision == expected


# --- bfloat16 on a CPU -----------------------------------------------------------------------------------------------

NO_GPU = pytest.mark.skipif(torch.accelerator.is_available(), reason="about CPUs")


@NO_GPU
@pytest.mark.parametrize(
    ("mkldnn", "avx512", "amx", "machine", "expected"),
    [
        (True, False, False, "x86_64", False),  # AVX-512 alone: there are kernels, and slow ones
        (True, True, False, "x86_64", True),
        (True, False, False, "aarch64", True),
    ],
)
def test_whether_a_cpu_computes_in_bfloat16(monkeypatch, mkldnn, avx512, amx, machine, expected):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: mkldnn)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert environment.cpu_computes_in_bf16() is expected


@pytest.mark.slow
@NO_GPU
@pytest.mark.parametrize("has_it", [False, True])
def test_the_plan_says_that_bfloat16_is_slow(tmp_path, monkeypatch, has_it):
    monkeypatch.setattr(plan_text, "cpu_computes_in_bf16", lambda: has_it)
    config = TrainingConfig(dataset_name="moons", max_train_steps=20, cpu_threads=1, output_dir=str(tmp_path / "run"))
    plan, *_ = prepare(config)
    assert "bf16" not in plan_text.describe_plan(plan)
    asked = dataclasses.replace(plan, config=dataclasses.replace(plan.config, mixed_precision="bf16"))
    assert ("bf16 is several times slower than float32" in plan_text.describe_plan(asked)) is not has_it


@NO_GPU
@pytest.mark.parametrize("rounded", [False, True])
def test_a_study_says_that_products_in_bfloat16_are_none(tmp_path, monkeypatch, capsys, rounded):
    monkeypatch.setattr(precision, "products_are_rounded", lambda name: rounded)
    StudyContext(StudyFolder(tmp_path), precision="bf16")
    assert ("--precision bf16 has no effect on this CPU" in capsys.readouterr().err) is not rounded
    StudyContext(StudyFolder(tmp_path), precision="fp32")
    assert not capsys.readouterr().err


def test_products_of_float32_are_not_rounded():
    assert not precision.products_are_rounded("fp32")
