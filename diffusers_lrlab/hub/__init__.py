"""Cards and uploads."""
