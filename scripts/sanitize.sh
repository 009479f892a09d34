#!/bin/sh
# `make sanitize`: tests with AddressSanitizer and UBSan in the CPU kernels (`ssd/kernels/cpu.c`). Arguments are pytest's;
# without any, what runs these kernels by themselves, and engines with drafts up to their last position.
set -eu
cd "$(dirname "$0")/.."
if [ $# -eq 0 ]; then
    for name in round_kernels cpu_kernels branch_attention quantized sampling_kernels invariance; do
        set -- "$@" "tests/kernels/test_$name.py"
    done
    set -- "$@" tests/decoding/test_speculation.py::test_same_answers
    set -- "$@" tests/decoding/test_speculation.py::test_ahead_up_to_the_last_position
fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
compiler=${CC:-cc}
$compiler -shared -fPIC tests/kernels/torch_malloc.c -o "$scratch/torch_malloc.so"

# The runtime has to be loaded first, and libstdc++ before torch throws; the compiler does without both. Checks that are
# calls make the code slower, and compile in a third of the time.
export CC="env -u LD_PRELOAD $compiler -fsanitize=address,undefined -fno-sanitize-recover=undefined -g1 \
    --param asan-instrumentation-with-call-threshold=0"
export LD_PRELOAD="$($compiler -print-file-name=libasan.so) libstdc++.so.6 $scratch/torch_malloc.so"
export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1

# Without kernels, or if it did not see the bounds of tensors, it would find nothing.
"$PYTHON" -c "from ssd.kernels import cpu; cpu.build()"
before="import ctypes, torch; ctypes.string_at(torch.ones(9).data_ptr() - 9, 9)"
"$PYTHON" -c "$before" 2>&1 | grep --quiet heap-buffer-overflow
"$PYTHON" -m pytest -n auto --dist worksteal -m "not slow" -x --capture=sys "$@" # reports go to stderr
