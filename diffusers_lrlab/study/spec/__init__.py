"""A study's specification: read, checked, and expanded into runs."""

from ...core.extras import require_extra

require_extra("study", "A study")
