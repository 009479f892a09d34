// Runs the kernel ENTRY in all blocks and threads; see `emulated_ptx.h`.

#undef s
static const void* const* launched;
static void call(void (*kernel)(Params)) { kernel(*(const Params*)launched[0]); }
template <typename First>
static void call(void (*kernel)(First, Params)) {
    kernel(*(const First*)launched[0], *(const Params*)launched[1]);
}
template <typename First, typename Second>
static void call(void (*kernel)(First, Second, Params)) {
    kernel(*(const First*)launched[0], *(const Second*)launched[1], *(const Params*)launched[2]);
}
static void run_fiber() {
    call(ENTRY);
    fiber->ended = true;
    yield();
}

// Whether all waits ended.
extern "C" bool launch(const void* const* params, u32 blocks, u32 threads, u32 shared, u32 seed) {
    launched = params, gridDim.x = blocks, blockDim.x = threads, emulator.failed = false;
    std::vector<Block> grid(blocks);
    std::vector<Fiber> fibers(blocks * blockDim.x);
    for (u32 i = 0; i < fibers.size(); ++i) {
        Fiber& f = fibers[i];
        Block& block = grid[i / blockDim.x];
        block.number = i / blockDim.x, block.shared.resize(shared, 0xee), block.warps.resize(blockDim.x / 32);
        block.warpgroups.resize(blockDim.x / 128);
        f.block = &block, f.number = i % blockDim.x, f.ended = false, f.stack.resize(128 << 10);
        getcontext(&f.context);
        f.context.uc_stack.ss_sp = f.stack.data(), f.context.uc_stack.ss_size = f.stack.size();
        makecontext(&f.context, run_fiber, 0);
    }
    std::mt19937 random(seed);
    for (u32 left = fibers.size(); left > 0 && !emulator.failed;) {
        const u32 block = random() % blocks, first = random() % blockDim.x;  // a block runs for a while
        for (u32 turns = random() % 8 + 1; turns > 0; --turns) {
            auto& copies = grid[block].copies;
            if (!copies.empty() && random() % 2) {
                std::swap(copies[random() % copies.size()], copies.back());
                const auto end = std::move(copies.back());
                copies.pop_back();
                end();
            }
            for (u32 i = 0; i < blockDim.x; ++i) {
                fiber = &fibers[block * blockDim.x + (first + i) % blockDim.x];
                if (fiber->ended) continue;
                swapcontext(&scheduler, &fiber->context);
                if (fiber->ended) --left;
            }
        }
    }
    return !emulator.failed;
}
