"""What a run is going to take: memory, time and disk, before it begins."""
