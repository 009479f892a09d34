"""bench.py with vLLM beside this engine: the same flags. SSD_VLLM_PYTHON names the interpreter that has vLLM.

python run_vllm_bench.py --llama --size 8 --numseqs 8 --output_len 128
"""

import sys

import bench

if __name__ == "__main__":
    sys.argv[1:1] = ["--peer", "vllm"]
    sys.exit(bench.main())
