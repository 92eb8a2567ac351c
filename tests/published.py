"""Folders to publish, made without training, and the `lrlab` command in processes of its own."""

import json
import shutil
import subprocess
import time
import warnings
from pathlib import Path

import numpy as np
import started
from safetensors.numpy import save_file

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "model_cards" / "ddpm-digits-8"


def lrlab(*arguments, env, cwd, status=0, timeout=120):
    """Runs the command, and expects this exit status."""
    command = ("-m", "diffusers_lrlab.cli.main", *arguments)
    how = {"env": env, "cwd": cwd, "timeout": timeout, "before": refuse_warnings_and_waits}
    result = subprocess.CompletedProcess(command, *started.run(*command, **how))
    assert result.returncode == status, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    return result


EACH = """
import contextlib, io, json, sys
from diffusers_lrlab.cli.main import main
for command in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            status = main(command)
        except SystemExit as end:
            status = end.code
    print(json.dumps([status or 0, out.getvalue(), err.getvalue()]))
"""


def lrlab_each(commands, env, cwd):
    """Status, output and errors of each of these commands, in one process."""
    words = json.dumps([[str(word) for word in command] for command in commands])
    status, out, error = started.run("-c", EACH, words, env=env, cwd=cwd, before=refuse_warnings_and_waits)
    assert status == 0, error
    return [json.loads(line) for line in out.splitlines()]


def refuse_warnings_and_waits():
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "Use 'content=", DeprecationWarning)  # the client's own call to its HTTP library
    wait_briefly()


def wait_briefly():
    """Whoever waits before trying again, as a message has said then, waits for a twentieth of a second."""
    sleep = time.sleep
    time.sleep = lambda seconds: sleep(min(seconds, 0.05))


def run_folder(folder, status="finished", megabytes=1):
    """The committed record of a run, with weights of this size that nobody trained."""
    shutil.copytree(RECORD, folder)
    file = folder / "lrlab" / "run.json"
    record = json.loads(file.read_text())
    record["run"]["status"] = status
    del record["run"]["manifest"]  # tests change its files
    file.write_text(json.dumps(record))
    (folder / "manifest.json").unlink()
    (folder / "model_index.json").write_text('{"_class_name": "DDPMPipeline"}')
    (folder / "unet").mkdir()
    weights = np.random.default_rng(0).integers(0, 256, megabytes << 20, dtype=np.uint8)
    save_file({"weights": weights}, folder / "unet" / "diffusion_pytorch_model.safetensors")
    for name in ("checkpoint-100/optimizer.bin", "lrlab/samples/1.npy", ".tmp-7-x", "logs/events"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("not for users")
    return folder
