"""Many small runs as one computation."""
