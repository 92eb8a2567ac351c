"""Collects the scoreboard of claims: the claims of the presets, judged by the summaries of their published cards."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from ...core.errors import LabError
from ...data.toy2d_entries import TOY_DATASETS
from ..spec.claims import link_of
from ..spec.reading import load_spec, preset_names
from ..spec.spec import ARM_NOTES, Claim, StudySpec
from .claims import expected, judge_claims, label_of

NOT_RUN = "not run yet"
_COMPARED = ("base", "arms", "datasets", "seeds", "baseline", "metrics", "tune", "horizons", "speedup_metric")
_DIGITS = 6  # of figures: the last ones differ between processors


def collect(cards: Path) -> list[dict[str, Any]]:
    """
    A row for each preset with claims and each of its cards in the folder `cards`; claims without a card are not run yet.

    Raises a `LabError` if a card lacks the comparison of a claim, since its verdict would be about nothing.
    """
    specs = [spec for spec in map(load_spec, preset_names()) if spec.claims]
    found: dict[str, list[Path]] = {}
    for file in sorted(cards.glob("*/summary.json")):
        found.setdefault(json.loads(file.read_text(encoding="utf-8"))["study"]["name"], []).append(file.parent)
    return [_rounded(_row(spec, card)) for spec in specs for card in found.get(spec.name, [None])]


def _row(spec: StudySpec, card: Path | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "name": spec.name,
        "title": spec.title,
        "command": f"lrlab study run {spec.name} --out {spec.name}",
        "own_data": f"lrlab study run {spec.name} --out my-{spec.name} --dataset_name {_yours(spec)}",
    }
    if card is None:
        row |= {"card": None, "arms": list(spec.arms), "datasets": list(spec.datasets), "seeds": len(spec.seeds)}
        return row | {"runs": 0, "rates": "", "changed": [], "claims": [_untested(claim) for claim in spec.claims]}
    summary = json.loads((card / "summary.json").read_text(encoding="utf-8"))
    study = summary["study"]
    saved = yaml.safe_load((card / "spec.yaml").read_text(encoding="utf-8"))["spec"]
    row |= {"card": f"{card.parent.name}/{card.name}", "arms": list(study["arms"]), "datasets": study["datasets"]}
    row |= {"seeds": len(study["seeds"]), "runs": sum(study["runs"].values())}
    row |= {"rates": "learning rates tuned for each arm" if summary.get("tuning") else "learning rates as given"}
    return row | {"changed": _changed(spec, saved), "claims": _judged(spec, card, summary)}


def _yours(spec: StudySpec) -> str:
    """A placeholder for the data sets of others, by the kind of data that the settings of a study are for."""
    are_points = all(fields.get("dataset_name") in TOY_DATASETS for fields in spec.datasets.values())
    return "YOUR_POINTS" if are_points else "YOUR_IMAGES"


def _judged(spec: StudySpec, card: Path, summary: dict[str, Any]) -> list[dict[str, Any]]:
    claims = judge_claims(spec.claims, summary)
    for claim in claims:
        if not any(each["pairs"] for each in claim["datasets"]):
            raise LabError(
                f"The card {card.name!r} does not compare {claim['arm']} with {claim['against']} by {claim['metric']}, as a "
                f"claim of the preset {spec.name!r} does. Run the preset again, and write its card."
            )
    return claims


def _untested(claim: Claim) -> dict[str, Any]:
    row = asdict(claim) | {"link": link_of(claim.source), "expected": expected(claim), "label": label_of(claim)}
    return row | {"verdict": NOT_RUN, "held_on": [], "datasets": [], "limits": []}


def _changed(spec: StudySpec, saved: dict[str, Any]) -> list[str]:
    """The keys of a preset that were others when the card was written, so that its command computes other runs today."""
    now = json.loads(json.dumps(spec.to_dict()))
    return [
        key
        for key in _COMPARED
        if _plain(key, now[key]) != _plain(key, saved.get(key, [] if isinstance(now[key], list) else None))
    ]


def _plain(key: str, value: Any) -> Any:
    if key != "arms":
        return value
    return {arm: {name: field for name, field in fields.items() if name not in ARM_NOTES} for arm, fields in value.items()}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value
