"""The summary of an older version, with the verdicts, the power and the claims of this one."""

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from ...evaluation.metrics import metric_label
from ..runs.results import finite
from ..spec.reading import load_spec, preset_names
from ..spec.spec import PRESETS, SPEEDUP, Claim, StudySpec
from .claims import judge_claims
from .findings import findings, speedup_findings
from .power import power_rows
from .verdicts import Row, Verdict


def renewed(spec: StudySpec, summary: dict[str, Any]) -> dict[str, Any]:
    """
    A summary whose runs were not kept, renewed from its own rows: their statistics stay, the sentences about them are
    written again.

    Args:
        spec (`StudySpec`): The specification of the study.
        summary (`dict`): Its `summary.json`, of any version.
    """
    rows, baseline = summary["rows"], summary["study"]["baseline"]
    controls = summary.get("controls") or {}
    verdicts: dict[str, list[Verdict]] = {}
    for metric in summary["study"]["metrics"]:
        of_metric, label = [row for row in rows if row["metric"] == metric], metric_label(metric)
        verdicts[metric] = findings(of_metric, metric, baseline, label)
        for control, some in _by_control(controls.get(metric, ()), of_metric):
            verdicts[metric] += findings(some, metric, control, label)
    if speedups := summary.get("speedups"):
        label = metric_label(spec.speedup_metric or "")
        quality = f"{label[0].lower()}{label[1:]}"
        verdicts[SPEEDUP] = speedup_findings(speedups, baseline, quality)
        for control, some in _by_control(controls.get(SPEEDUP, ()), speedups):
            verdicts[SPEEDUP] += speedup_findings(some, control, quality, common=True)
    found = {metric: [asdict(verdict) for verdict in some] for metric, some in verdicts.items()}
    now = {**summary, "findings": found, "power": power_rows(summary)}
    return finite(with_claims(spec, now))


def with_claims(spec: StudySpec, summary: dict[str, Any]) -> dict[str, Any]:
    """The summary with the claims that its study tests, judged: a preset may have got them after the study ran."""
    claims: tuple[Claim, ...] = spec.claims
    if not claims and spec.folder == PRESETS and spec.name in preset_names():
        claims = load_spec(spec.name).claims
    return {**summary, "claims": judge_claims(claims, summary)} if claims else summary


def _by_control(rows: Iterable[Row], of_arms: list[Row]) -> list[tuple[str, list[Row]]]:
    """Each control, and the rows of the arms compared with it beside its own."""
    by_control: dict[str, list[Row]] = {}
    for row in rows:
        by_control.setdefault(row["control"], []).append(row)
    return [(name, [*some, *(row for row in of_arms if row["arm"] == name)]) for name, some in by_control.items()]
