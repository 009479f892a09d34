/* AMX, beside AVX-512. */
#define HAS_AMX 1
#define tile_configure _tile_loadconfig
#define tile_zero _tile_zero
#define tile_load _tile_loadd
#define tile_store _tile_stored
#define tile_dot_bf16 _tile_dpbf16ps
#define tile_dot_bytes _tile_dpbsud
#define tile_release _tile_release

INLINE int enable_amx(void) {
#if defined(__AMX_TILE__) && defined(SYS_arch_prctl)
    const int request_permission = 0x1023, tile_data = 18; /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA */
    return syscall(SYS_arch_prctl, request_permission, tile_data) != 0;
#else
    return 0;
#endif
}
