"""Which parameters of a model Muon orthogonalises, by their names and shapes."""

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from ..core.errors import LabError, must_be
from ..core.words import counted

HIDDEN = "hidden layers"
VECTORS = "biases and norms"
MODULATION = "modulation"
EMBEDDINGS = "embeddings"
OUTER = "first and last layers"
ASKED = "by adamw="

# Parts of names that diffusers' models use for modulations (adaptive norms, time embeddings of residual blocks), and for
# embeddings of timesteps, labels, texts, patches and positions.
_MODULATION = re.compile(r"adaln|modulation|(^|_)mod(_|$)|scale_shift|^time_emb_proj$|^gate_table$", re.IGNORECASE)
_NORM, _LINEAR = re.compile(r"norm\d*(_\w+)?$"), re.compile(r"(linear|fc|proj)(_?\d+)?$")
_EMBEDDING = re.compile(r"embed|(^|_)emb(_|$)|_tokens?$", re.IGNORECASE)
_WEIGHTS = re.compile(r"weight|bias|base_layer|lora_\w+|default")  # ends of names, also of peft's
# Projections that hold several of one shape: the end of the layer's name, and their number.
_FUSED = {
    "to_qkv": 3,
    "to_added_qkv": 3,
    "qkv": 3,
    "qkv_proj": 3,
    "in_proj_weight": 3,
    "to_kv": 2,
    "to_added_kv": 2,
    "kv": 2,
}
_MOST_CHUNKS = 12  # of a modulation; 9 is the most in diffusers


class Layer(NamedTuple):
    """A parameter by its name, `None` if it is unknown, with its role and its number of blocks."""

    name: str | None
    role: str
    chunks: int = 1


def layers_of(
    named: Sequence[tuple[str | None, Any]], hidden: Sequence[str] = (), adamw: Sequence[str] = (), chunks: bool = True
) -> list[Layer]:
    """
    The roles of parameters, of which Muon takes those that are [`HIDDEN`]; only their shapes are read.

    Parameters outside of a model's numbered blocks belong to its first and last layers; where none is outside, or all are,
    the first and the last matrix do. Without names, all matrices are hidden. Parameters whose names match a pattern in
    `adamw` are not hidden; others that match one in `hidden` are, in any layer. With `chunks`, fused projections have
    several blocks.

    Raises a `LabError` for a pattern without a match, and if nothing is hidden.
    """
    _check_patterns(named, hidden=hidden, adamw=adamw)
    ends = _ends(named)
    layers: list[Layer] = []
    for index, (name, parameter) in enumerate(named):
        shape, role = tuple(parameter.shape), VECTORS if parameter.ndim < 2 else HIDDEN
        if role == HIDDEN and name is not None:
            role = _role(name, index in ends, hidden, adamw)
        num = chunks_of(name, shape) if chunks and role == HIDDEN and name is not None else 1
        layers.append(Layer(name, role, num))
    if not any(layer.role == HIDDEN for layer in layers):
        raise LabError("'muon' finds no weights of hidden layers. Hint: name some with hidden=[PATTERN], or use 'adamw'.")
    return layers


def _role(name: str, is_end: bool, hidden: Sequence[str], adamw: Sequence[str]) -> str:
    if any(fnmatchcase(name, pattern) for pattern in adamw):
        return ASKED
    if any(fnmatchcase(name, pattern) for pattern in hidden):
        return HIDDEN
    if _is_modulation(name):
        return MODULATION
    if any(_EMBEDDING.search(part) for part in name.split(".")):
        return EMBEDDINGS
    return OUTER if is_end else HIDDEN


def _is_modulation(name: str) -> bool:
    parts = [part for part in name.split(".") if not _WEIGHTS.fullmatch(part)]
    is_of_norm = any(_NORM.match(norm) and _LINEAR.match(inner) for norm, inner in zip(parts, parts[1:], strict=False))
    return is_of_norm or any(_MODULATION.search(part) for part in parts)


def _ends(named: Sequence[tuple[str | None, Any]]) -> set[int]:
    """The places of the first and last layers' matrices."""
    matrices = [index for index, (name, parameter) in enumerate(named) if name is not None and parameter.ndim >= 2]
    outside = {index for index in matrices if not any(part.isdecimal() for part in str(named[index][0]).split("."))}
    if outside and len(outside) < len(matrices):
        return outside
    is_lora = any("lora_" in str(named[index][0]) for index in matrices)  # whose first layer is not the model's
    return {matrices[0], matrices[-1]} if len(matrices) > 2 and not is_lora else set()


def _check_patterns(named: Sequence[tuple[str | None, Any]], **patterns: Sequence[str]) -> None:
    """Raises a `LabError` for a pattern without a match, and for patterns without names."""
    names = [name for name, parameter in named if name is not None and parameter.ndim >= 2]
    for argument, each in ((argument, each) for argument, given in patterns.items() for each in given):
        if not names:
            raise LabError(
                f"{argument}={each!r} of 'muon' needs the names of parameters. Hint: pass model.named_parameters() to "
                "get_optimizer."
            )
        if not any(fnmatchcase(name, each) for name in names):
            some = ", ".join(names[:4]) + (f" and {len(names) - 4} others" if len(names) > 4 else "")
            raise must_be(argument, each, "patterns of names of matrices", f"they are {some}", of="'muon'")


def chunks_of(name: str, shape: Sequence[int]) -> int:
    """
    The number of equal blocks of rows in a matrix, 1 unless it is a fused projection (arXiv 2608.02502).

    Names tell these, and shapes must agree: each block of an attention's queries, keys or values is square, and so is each
    factor of a modulation.
    """
    rows, columns = shape[0], shape[-1]
    if len(shape) != 2 or rows % columns:
        return 1
    num = rows // columns
    parts = [part for part in name.split(".") if part != "weight"]
    if parts and _FUSED.get(parts[-1]) == num:
        return num
    return num if _is_modulation(name) and 2 <= num <= _MOST_CHUNKS else 1


def parts_of(named: Sequence[tuple[str | None, Any]], layers: Sequence[Layer]) -> dict[str, Any]:
    """What is orthogonalised and what AdamW trains, for records: names, and numbers of parameters."""

    def size(is_hidden: bool) -> int:
        return sum(
            each.numel() for (_, each), layer in zip(named, layers, strict=True) if (layer.role == HIDDEN) == is_hidden
        )

    def names(role: str) -> list[str]:
        return [layer.name or "unnamed" for layer in layers if layer.role == role]

    others = {role: names(role) for role in (OUTER, EMBEDDINGS, MODULATION, ASKED, VECTORS) if names(role)}
    return {
        "muon": {"num_parameters": size(True), "names": names(HIDDEN)},
        "adamw": {"num_parameters": size(False), "names": others},
        "chunks": {layer.name: layer.chunks for layer in layers if layer.chunks > 1},
    }


def parts_in_words(parts: Mapping[str, Any]) -> str:
    """The same in one sentence, with numbers for the names."""
    muon, chunks = parts["muon"], parts["chunks"]
    words = f"Muon for {counted(len(muon['names']), 'weight')} of hidden layers ({muon['num_parameters']:,} numbers)"
    if chunks:
        words += f", {len(chunks)} of them in blocks"
    others = ", ".join(f"{role} ({len(names)})" for role, names in parts["adamw"]["names"].items())
    return f"{words}; AdamW for {others}" if others else words
