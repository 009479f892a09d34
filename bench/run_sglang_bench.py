"""bench.py with SGLang beside this engine: the same flags. SSD_SGLANG_PYTHON names the interpreter that has SGLang.

python run_sglang_bench.py --llama --size 8 --numseqs 8 --output_len 128
"""

import sys

import bench

if __name__ == "__main__":
    sys.argv[1:1] = ["--peer", "sglang"]
    sys.exit(bench.main())
