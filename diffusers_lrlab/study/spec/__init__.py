"""A study's specification: read, checked, and expanded into runs."""
