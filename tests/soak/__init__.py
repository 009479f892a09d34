"""A soak of `ssd serve`: thousands of clients, some of which vanish or read slowly, while its drafter is being killed.

`make soak` runs it; `PYTHONPATH=tests python -m soak --help` has its options.

- `asks.py`: random requests, and their answers in one shape, streamed or not
- `clients.py`: one client of each kind
- `run.py`: the soak itself, and what must hold at its end
"""
