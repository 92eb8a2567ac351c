"""Scripts of pages that open from disk: charts by Observable Plot, which is in `vendor/`, without network."""

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
STYLE = _HERE / "charts.css"
_LIBRARIES = (_HERE / "vendor" / "d3.min.js", _HERE / "vendor" / "plot.umd.min.js", _HERE / "charts.js")


def scripts(own: Path) -> list[str]:
    """The texts of all scripts of a page, in their order; `own` is what the page itself does."""
    return [path.read_text(encoding="utf-8") for path in (*_LIBRARIES, own)]


def sources(texts: list[str]) -> str:
    """For `script-src` of a Content-Security-Policy: these scripts run, and no others."""
    sums = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{each}'" for each in sums)


def as_json(data: Any) -> str:
    """For a `<script type="application/json">`, in the order of its keys; a `ValueError` for NaN, which JSON lacks."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
