"""From results to conclusions: statistics, ranks, speed-ups, findings."""
