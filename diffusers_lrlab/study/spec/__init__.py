"""A study's specification: read, checked, and expanded into runs."""

from ...core.environment import require_extra

require_extra("study", "A study")
