"""Commands on folders: `lrlab check`, `push` and `pull` of results, `lrlab data export` and `encode` of data sets."""

import argparse
import shlex
from pathlib import Path
from typing import Any

from ..core.environment import require_extra
from ..core.errors import LabError, did_you_mean
from ..core.values import Range
from ..core.words import counted
from . import add_actions, announce_loading, say, say_json


def check_arguments(parser: argparse.ArgumentParser) -> None:
    folders = "Folder of a run, study, toy dataset or set of latents, also a downloaded one."
    parser.add_argument("dir", type=Path, metavar="DIR", help=folders)
    parser.add_argument("--json", action="store_true", help="Print JSON.")


def check(options: argparse.Namespace) -> int:
    """Verify a run, study, toy dataset or download: damaged files, and how to go on."""
    announce_loading()
    require_extra("train", "`lrlab check`")
    from ..run.check import check_folder

    finding = check_folder(options.dir)
    if options.json:
        say_json(finding.as_data(), indent=2)
    else:
        say(finding.describe())
    return int(bool(finding.damaged))  # the exit status


def push_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("dir", type=Path, metavar="DIR", help="Folder of a run, study or toy dataset.")
    add("--repo_id", required=True, metavar="USER/NAME", help="Repository, created if it is missing.")
    add("--private", action="store_true", help="Make a new repository private.")
    add("--revision", metavar="BRANCH", default="main", help="Branch, created if it is missing (default: %(default)s).")
    add("--message", metavar="TEXT", help="Message of the commit (default: the command that made the result).")


def push(options: argparse.Namespace) -> None:
    """Upload a run, study or toy dataset to the Hub."""
    from ..hub.transfer import Target, push_folder

    if options.message is not None and not options.message.strip():
        raise LabError("--message '' is empty. Leave it out, or say what changed.")
    target = Target(options.repo_id, private=options.private, revision=options.revision)
    say(f"Uploaded: {push_folder(options.dir, target, options.message)}")


def pull_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("repo_id", metavar="USER/NAME", help="Repository.")
    add("--out", type=Path, metavar="DIR", help="New or empty folder (default: the name of the repository).")
    add("--revision", metavar="REVISION", help="Branch, tag or commit (default: main).")


def pull(options: argparse.Namespace) -> None:
    """Download a published result."""
    from ..hub.contents import kind_of_folder
    from ..hub.transfer import fetch

    out = options.out or Path(options.repo_id.split("/")[-1])
    fetch(options.repo_id, out, options.revision)
    kind = kind_of_folder(out)
    say(f"Downloaded a {kind.name} to {out}. Next, for instance: {kind.example.format(folder=shlex.quote(str(out)))}")


# --- lrlab data ----------------------------------------------------------------------------------------------------


def data_arguments(parser: argparse.ArgumentParser) -> None:
    actions = {"export": "Write a dataset as Parquet files", "encode": "Write the latents of images, to train on"}
    export, encode = add_actions(parser, **actions)
    for action, name, size in (
        (export, "A toy dataset or a generated image set (see `lrlab list`).", "16"),
        (encode, "Any set of images.", "the set's own, or 256"),
    ):
        action.argument_default = argparse.SUPPRESS
        action.add_argument("name", metavar="NAME", help=name)
        action.add_argument("dir", type=Path, metavar="DIR", help="New or empty folder.")
        action.add_argument("--resolution", type=int, metavar="PIXELS", help=f"Size of images (default: {size}).")
    add = export.add_argument
    add("--n", type=int, metavar="N", help="Rows of the train split (default: 100000).")
    add("--n_test", type=int, metavar="N", help="Rows of the test split, or 0 (default: 10000).")
    add("--seed", type=int, metavar="S", help="Seed of the data (default: 42).")
    add = encode.add_argument
    add("--vae", required=True, metavar="ID|FOLDER", help="Autoencoder of diffusers, such as stabilityai/sd-vae-ft-mse.")
    add("--subfolder", metavar="NAME", help="Subfolder of --vae that holds the autoencoder, such as vae.")
    add("--revision", metavar="REVISION", help="Branch, tag or commit of its repository.")
    add(
        "--flip",
        action="store_true",
        help="Also encode mirrored images; training uses the mirrored version half of the time.",
    )
    add("--label_column", metavar="NAME", help="Column of class labels to store beside the latents, for lrlab train.")
    add("--image_column", metavar="NAME", help="Column of the images (default: the only one of that type).")
    add("--dataset_config_name", metavar="NAME", help="Configuration of a Hub dataset.")
    add("--dataset_split", metavar="SPLIT", help="Split to encode (default: train).")
    add("--batch_size", type=int, metavar="B", help="Images that are encoded at once (default: 16).")
    add("--cache_dir", metavar="DIR", help="Folder for downloaded datasets and autoencoders (default: the Hub's cache).")


def data(options: argparse.Namespace) -> None:
    """Export a toy dataset as files that load anywhere, or encode images to latents."""
    announce_loading()
    require_extra("train", f"`lrlab data {options.action}`")
    given = {name: value for name, value in vars(options).items() if name not in ("command", "action", "name", "dir")}
    (_export if options.action == "export" else _encode)(options.name, options.dir, given)


def _export(name: str, folder: Path, given: dict[str, Any]) -> None:
    from ..data.image_sets import IMAGE_DATASETS, check_resolution
    from ..data.toy2d import MAX_POINTS, TOY_DATASETS
    from ..hub.dataset_folder import export_dataset

    names = [*TOY_DATASETS, *IMAGE_DATASETS]
    if name not in names:
        raise LabError(f"Unknown data set {name!r}.{did_you_mean(name, names)} Known: {', '.join(names)}.")
    for flag, least in (("n", 1), ("n_test", 0)):
        Range(f"[{least}, {MAX_POINTS}]", whole=True).check(f"--{flag}", given.get(flag), "it is a number of rows")
    resolution, size = given.get("resolution"), ""
    if name not in IMAGE_DATASETS:
        if resolution is not None:
            raise LabError(f"--resolution {resolution} has no effect on the points of {name!r}. Leave it out.")
    else:
        if resolution is not None:
            check_resolution(name, resolution)
        defaults = IMAGE_DATASETS[name].facts["defaults"]
        size = f" --resolution {resolution or defaults['resolution']} --image_channels {defaults['image_channels']}"
    export_dataset(name, folder, **given)
    # A folder with the name of an embedded set is taken for that set unless its path begins with "./".
    shown = f"./{folder}" if str(folder) in names else folder
    say(f"Wrote {folder}: load_dataset({str(folder)!r}), or --dataset_name {shown}{size} to train on it.")


def _encode(name: str, folder: Path, given: dict[str, Any]) -> None:
    from ..data.latent_data import encode_dataset
    from ..data.options import DataConfig

    how = {key: given.pop(key) for key in ("vae", "subfolder", "revision", "flip", "batch_size") if key in given}
    record = encode_dataset(DataConfig(dataset_name=name, **given), folder, **how)
    size, shape = record.resolution, " x ".join(map(str, record.shape))
    say(f"{counted(record.num_images, 'image', ',')} of {size}x{size} pixels as latents of {shape}.")
    say(f"Train on them: lrlab train --train_data_dir {shlex.quote(str(folder))}")
