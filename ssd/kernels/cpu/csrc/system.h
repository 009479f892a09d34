/* The C library, the compiler and the operating system: nothing else asks which ones they are. */
#include <limits.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#if defined(__linux__)
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define COMPILER_BARRIER() __asm__ __volatile__("" ::: "memory")
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

#if defined(MADV_HUGEPAGE)
#define advise_huge_pages(at, bytes) madvise((at), (bytes), MADV_HUGEPAGE)
#else
#define advise_huge_pages(at, bytes) 0
#endif
