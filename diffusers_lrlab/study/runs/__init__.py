"""One run of a study, its record, and the folder of all of them."""
