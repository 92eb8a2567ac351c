"""How the functions of trainers are called, and what takes their place: a function for each shape."""
