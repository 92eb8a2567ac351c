"""What depends on the kind of data: images, points."""
