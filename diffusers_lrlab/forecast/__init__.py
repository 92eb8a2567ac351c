"""The memory, time and disk that a run will take, before it begins."""
