"""`lrlab data export` and `lrlab data encode`."""

import argparse
import shlex
from pathlib import Path
from typing import Any

from ..core.environment import require_extra
from ..core.errors import LabError, did_you_mean, must_be
from ..core.values import Range
from ..core.words import counted
from .output import announce_loading, say

# Options of each action alone.
_ACTIONS = {
    "export": ("n", "n_test", "seed"),
    "encode": (
        *("vae", "subfolder", "revision", "flip", "label_column", "image_column", "dataset_config_name", "dataset_split"),
        *("batch_size", "cache_dir"),
    ),
}


def data_arguments(parser: argparse.ArgumentParser) -> None:
    actions = "export: write a dataset as Parquet files. encode: write the latents of images, to train on."
    parser.add_argument("action", choices=tuple(_ACTIONS), help=actions)
    name = "For export, a toy dataset or a generated image set (see `lrlab list`); for encode, any set of images."
    parser.add_argument("name", metavar="NAME", help=name)
    parser.add_argument("dir", type=Path, metavar="DIR", help="New or empty folder.")
    size = "Size of images (default: 16 for export; for encode the set's own, or 256)."
    parser.add_argument("--resolution", type=int, metavar="PIXELS", help=size)
    add = parser.add_argument_group("options of export").add_argument
    add("--n", type=int, metavar="N", help="Rows of the train split (default: 100000).")
    add("--n_test", type=int, metavar="N", help="Rows of the test split, or 0 (default: 10000).")
    add("--seed", type=int, metavar="S", help="Seed of the data (default: 42).")
    add = parser.add_argument_group("options of encode").add_argument
    add("--vae", metavar="ID|FOLDER", help="Autoencoder of diffusers, such as stabilityai/sd-vae-ft-mse.")
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
    for action in parser._actions:
        action.default = argparse.SUPPRESS


def data(options: argparse.Namespace) -> None:
    announce_loading()
    require_extra("train", f"`lrlab data {options.action}`")
    given = {name: value for name, value in vars(options).items() if name not in ("command", "action", "name", "dir")}
    for action, own in _ACTIONS.items():
        for name in given.keys() & {*own} if action != options.action else ():
            hint = f"it is an option of lrlab data {action}"
            raise must_be(f"--{name}", given[name], f"left out of lrlab data {options.action}", hint)
    (_export if options.action == "export" else _encode)(options.name, options.dir, given)


def _export(name: str, folder: Path, given: dict[str, Any]) -> None:
    from ..data.image_sets import IMAGE_DATASETS, check_resolution
    from ..data.toy2d import MAX_POINTS, TOY_DATASETS
    from ..hub.dataset_folder import export_image_dataset, export_toy_dataset

    names = [*TOY_DATASETS, *IMAGE_DATASETS]
    if name not in names:
        raise LabError(f"Unknown data set {name!r}.{did_you_mean(name, names)} Known: {', '.join(names)}.")
    for flag, least in (("n", 1), ("n_test", 0)):
        Range(f"[{least}, {MAX_POINTS}]", whole=True).check(f"--{flag}", given.get(flag), "it is a number of rows")
    given = {"n": 100_000, "n_test": 10_000, "seed": 42, **given}
    resolution, size = given.get("resolution"), ""
    if name not in IMAGE_DATASETS:
        if resolution is not None:
            raise LabError(f"--resolution {resolution} has no effect on the points of {name!r}. Leave it out.")
        export_toy_dataset(name, folder, **given)
    else:
        if resolution is not None:
            check_resolution(name, resolution)
        defaults = IMAGE_DATASETS[name].facts["defaults"]
        size = f" --resolution {resolution or defaults['resolution']} --image_channels {defaults['image_channels']}"
        export_image_dataset(name, folder, **given)
    # A folder with the name of an embedded set is taken for that set unless its path begins with "./".
    shown = f"./{folder}" if str(folder) in names else folder
    say(f"Wrote {folder}: load_dataset({str(folder)!r}), or --dataset_name {shown}{size} to train on it.")


def _encode(name: str, folder: Path, given: dict[str, Any]) -> None:
    if "vae" not in given:
        raise must_be("--vae", None, "given to lrlab data encode", "such as --vae stabilityai/sd-vae-ft-mse")
    from ..data.latent_data import encode_dataset
    from ..data.options import DataConfig

    how = {key: given.pop(key) for key in ("vae", "subfolder", "revision", "flip", "batch_size") if key in given}
    record = encode_dataset(DataConfig(dataset_name=name, **given), folder, **how)
    size, shape = record.resolution, " x ".join(map(str, record.shape))
    say(f"{counted(record.num_images, 'image', ',')} of {size}x{size} pixels as latents of {shape}.")
    say(f"Train on them: lrlab train --train_data_dir {shlex.quote(str(folder))}")
