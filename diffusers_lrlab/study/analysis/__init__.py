"""From results to conclusions: statistics, tuning, findings."""
