"""The rules for a run that diverges, by name, in a module without heavy imports."""

from typing import Any

from ..core.registry import Parameter, Registry
from ..core.spec import resolve_spec
from .config import ResolvedConfig

ON_DIVERGENCE = Registry("rule for a run that diverges")
ON_DIVERGENCE.register("stop", description="the run ends with an error; its last checkpoint is finite", source="–")(None)
ON_DIVERGENCE.register(
    "rollback",
    description="the run goes back to its last checkpoint and continues at a lower learning rate",
    source="own",
    parameters=(
        Parameter("factor", float, 0.5, "factor on the learning rate, each time", "(0, 1)"),
        Parameter("max_rollbacks", int, 3, "how often a run may go back; the next time it stops", "[1, 1000]"),
        Parameter(
            "explosion",
            float,
            100.0,
            "a loss above this multiple of the first update's counts as diverged, and no checkpoint is written then: its "
            "weights would be finite, but no use to go back to",
            "(1, inf)",
        ),
    ),
)(None)


def rollback_rule(config: ResolvedConfig) -> dict[str, Any] | None:
    """The parameters of `rollback`; `None` for a run that stops."""
    name, kwargs = resolve_spec(config.on_divergence, None, ON_DIVERGENCE)
    return kwargs if name == "rollback" else None
