"""`python -m graphlin bench` measures the ops, layers and peers; `python -m graphlin tune` looks for launch records."""
