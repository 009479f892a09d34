"""Real clients of the served APIs, in an environment of their own: what they send, and whether they read the answers.

- `sessions.py`: what each client does; runs in that environment, which `environment.py` builds
- `agents.py`: the programs of coding agents, their versions, and a task for them
- `record.py`: `PYTHONPATH=tests python -m clients.record` runs all of them against a server, and writes the bodies of
  their requests to `tests/data/clients`, which `tests/server/test_clients.py` replays
"""
