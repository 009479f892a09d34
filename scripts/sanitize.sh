#!/bin/sh
# `make sanitize`: tests with AddressSanitizer and UBSan in the CPU kernels (`ssd/kernels/cpu/csrc`). Arguments are pytest's;
# without any, what runs these kernels by themselves, and engines with drafts up to their last position.
set -eu
cd "$(dirname "$0")/.."
if [ $# -eq 0 ]; then
    for name in round_kernels cpu_kernels expert_kernels e4m3 branch_attention quantized sampling_kernels suffix_trees invariance; do
        set -- "$@" "tests/kernels/test_$name.py"
    done
    set -- "$@" tests/decoding/test_speculation.py::test_same_answers
    set -- "$@" tests/decoding/test_speculation.py::test_ahead_up_to_the_last_position
fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
compiler=${CC:-cc}
$compiler -shared -fPIC tests/kernels/torch_malloc.c -o "$scratch/torch_malloc.so"

# The runtime has to be loaded first, and libstdc++ before torch throws; the compiler does without both. The last options
# make it four times as quick: no checks of what AddressSanitizer finds anyway, and calls in place of inline code.
export CC="env -u LD_PRELOAD $compiler -g1 -fsanitize=address,undefined -fno-sanitize-recover=undefined \
    -fno-sanitize=null,object-size,pointer-overflow --param asan-instrumentation-with-call-threshold=0"
export LD_PRELOAD="$($compiler -print-file-name=libasan.so) libstdc++.so.6 $scratch/torch_malloc.so"
export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1

# Without kernels, or if it did not see the bounds of tensors, it would find nothing.
probe="from ssd.kernels.cpu import library; library.build(); ctypes.string_at(torch.ones(9).data_ptr() - 9, 9)"
said=$("$PYTHON" -c "import ctypes, torch; $probe" 2>&1) || true
case $said in
*heap-buffer-overflow*) ;;
*) echo "a read before a tensor was not found: $said" >&2 && exit 1 ;;
esac
"$PYTHON" -m pytest -n auto --dist worksteal -m "not slow" -x --capture=sys "$@" # reports go to stderr
