"""`lrlab data export` and `lrlab data encode`."""

import argparse
import shlex
from pathlib import Path
from typing import Any

from ..core.errors import LabError, did_you_mean, must_be
from ..core.extras import require_extra
from ..core.ranges import Range
from .output import announce_loading, say

_EXPORT: dict[str, Any] = {"n": 100_000, "n_test": 10_000, "seed": 42, "resolution": None}
_ENCODE: dict[str, Any] = {
    "vae": None,
    "subfolder": None,
    "revision": None,
    "resolution": None,
    "flip": False,
    "label_column": None,
    "image_column": None,
    "dataset_config_name": None,
    "dataset_split": "train",
    "batch_size": 16,
    "cache_dir": None,
}
# Options of each action with their defaults.
_ACTIONS = {"export": _EXPORT, "encode": _ENCODE}


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
    parser.set_defaults(**{**_EXPORT, **_ENCODE})


def data(options: argparse.Namespace) -> None:
    announce_loading()
    require_extra("train", f"`lrlab data {options.action}`")
    for action, known in _ACTIONS.items():
        for name in known.keys() - _ACTIONS[options.action].keys():
            if getattr(options, name) != known[name]:
                hint = f"it is an option of lrlab data {action}"
                raise must_be(f"--{name}", getattr(options, name), f"left out of lrlab data {options.action}", hint)
    (_export if options.action == "export" else _encode)(options)


def _export(options: argparse.Namespace) -> None:
    from ..data.image_sets import IMAGE_DATASETS, check_resolution
    from ..data.toy2d import MAX_POINTS, TOY_DATASETS
    from ..hub.dataset_folder import export_image_dataset, export_toy_dataset

    is_images = options.name in IMAGE_DATASETS
    if not is_images and options.name not in TOY_DATASETS:
        names = [*TOY_DATASETS, *IMAGE_DATASETS]
        raise LabError(f"Unknown data set {options.name!r}.{did_you_mean(options.name, names)} Known: {', '.join(names)}.")
    for flag, least in (("n", 1), ("n_test", 0)):
        Range(f"[{least}, {MAX_POINTS}]", whole=True).check(f"--{flag}", getattr(options, flag), "it is a number of rows")
    if options.resolution is not None and not is_images:
        raise LabError(f"--resolution {options.resolution} has no effect on the points of {options.name!r}. Leave it out.")
    size = ""
    if is_images:
        if options.resolution is not None:
            check_resolution(options.name, options.resolution)
        defaults = IMAGE_DATASETS[options.name].facts["defaults"]
        size = f" --resolution {options.resolution or defaults['resolution']} --image_channels {defaults['image_channels']}"
        export_image_dataset(options.name, options.dir, options.n, options.n_test, options.seed, options.resolution)
    else:
        export_toy_dataset(options.name, options.dir, options.n, options.n_test, options.seed)
    # A folder with the name of an embedded set is taken for that set unless its path begins with "./".
    folder = f"./{options.dir}" if str(options.dir) in (*TOY_DATASETS, *IMAGE_DATASETS) else options.dir
    say(f"Wrote {options.dir}: load_dataset({str(options.dir)!r}), or --dataset_name {folder}{size} to train on it.")


def _encode(options: argparse.Namespace) -> None:
    if options.vae is None:
        raise must_be("--vae", None, "given to lrlab data encode", "such as --vae stabilityai/sd-vae-ft-mse")
    from ..data.latent_data import encode_dataset, summary
    from ..data.options import DataConfig

    given = {name: getattr(options, name) for name in _ENCODE}
    how = {name: given.pop(name) for name in ("vae", "subfolder", "revision", "flip", "batch_size")}
    record = encode_dataset(DataConfig(dataset_name=options.name, **given), options.dir, **how)
    say(summary(record))
    say(f"Train on them: lrlab train --train_data_dir {shlex.quote(str(options.dir))}")
