"""`python -m graphlin demo`: trains a small byte-level model twice, eager and captured, and compares the two runs."""
