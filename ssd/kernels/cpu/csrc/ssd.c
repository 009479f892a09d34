/* CPU kernels of ssd: plain C with GCC/Clang vector extensions, called through ctypes (ssd/kernels/cpu).
 *
 * The rule every kernel keeps: the bits of a row's result are a function of that row's own inputs.  They never depend
 * on how many rows are computed together, on the row's place among them, on the threads, or on chunking.  So each
 * output element has one fixed order of operations, the same in every instance of a kernel; multiplies and adds are
 * fused only where vfma() says so (compile with -ffp-contract=off and without -ffast-math).
 *
 * Storage is fp32 or bf16 (flag `bf16`); a KV cache may be in e4m3 instead (`kv`, a storage type).  Arithmetic is fp32,
 * or integers where that is said.  "ld*" arguments are row strides in elements.
 *
 * Numbers in tensors that are used as indices (token ids, positions, slots, blocks, rows) are checked: see kernels.h, which
 * describes the calls.  Shapes are the caller's business.
 */
#include "system.h"
#include "kernels.h"
#include "isa/isa.h"
#include "exp.h"
#include "dtypes.h"
#include "team.h"
#include "pack.h"
#include "linear_tile.h"
#include "codes.h"
#include "digits.h"
#include "linear_amx.h"
#include "linear.h"
#include "experts.h"
#include "norm.h"
#include "rope.h"
#include "attention.h"
#include "attention_amx.h"
#include "attention_tasks.h"
#include "sample.h"
#include "state.h"
#include "calls.h"
