"""A differential fuzzer: random engines, requests and faults against plain decoding of each request alone.

`make fuzz` runs it; `PYTHONPATH=tests python -m fuzz --help` has its options.

- `case.py`: a case (configuration, requests, events) as plain data, and random ones
- `run.py`: runs a case, through the driver and from the calling thread
- `faults.py`: what may happen to an engine
- `oracle.py`: what each request must be answered, and the comparison
- `shrink.py`: the smallest case that still fails
"""
