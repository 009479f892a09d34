/* Vectors of VL 32-bit lanes, and what the compiler's vector extensions make of them on every machine. */
typedef float vf __attribute__((vector_size(VL * 4)));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef uint32_t vu __attribute__((vector_size(VL * 4)));
typedef float vf_mem __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef uint32_t vu_mem __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef uint8_t vb_mem __attribute__((vector_size(VL), aligned(1), may_alias));
typedef int8_t vc_mem __attribute__((vector_size(VL), aligned(1), may_alias));
typedef uint16_t vs_mem __attribute__((vector_size(VL * 2), aligned(2), may_alias));

INLINE vf vload(const float *p) { return *(const vf_mem *)p; }
INLINE void vstore(float *p, vf v) { *(vf_mem *)p = v; }
INLINE vf vset(float s) { return s - (vf){0}; } /* exact, where 0 + s is not */
INLINE vf vselect(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }
INLINE vf vmax(vf a, vf b) { return vselect(a > b, a, b); }

INLINE vi vmax_int(vi a, vi b) {
    vi mask = a > b;
    return (mask & a) | (~mask & b);
}

/* the four bytes at p in every lane */
INLINE vi vset_word(const void *p) {
    int32_t word;
    memcpy(&word, p, 4);
    return (vi){0} + word;
}

/* the number of each lane */
INLINE vi vlanes(void) {
    vi lanes;
    UNROLL for (int i = 0; i < VL; i++) lanes[i] = i;
    return lanes;
}

INLINE vf vround_bf16(vf v) {
    vu u = (vu)v;
    vu rounded = (u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u;
    vi nan = v != v;
    return vselect(nan, (vf)((u & 0xffff0000u) | 0x400000u), (vf)rounded);
}
