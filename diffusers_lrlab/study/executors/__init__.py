"""From specifications of runs to files of results."""
