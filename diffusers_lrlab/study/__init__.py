"""Studies: arms x data sets x seeds, run, compared and reported."""
