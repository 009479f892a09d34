/* exp, 1-2 ulp: 2^n * P(r) with |r| <= ln2/2; exactly 0 far below the range, inf above it, NaN stays NaN */
INLINE vf vexp(vf x) {
    x = vselect(x > vset(100.0f), vset(100.0f), x);
    x = vselect(x < vset(-110.0f), vset(-110.0f), x);
    const vf magic = vset(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    vf shifted = vfma(magic, x, vset(1.44269504088896341f));
    vf n = shifted - magic;
    vf r = vfma(x, n, vset(-0.693359375f));
    r = vfma(r, n, vset(2.12194440e-4f));
    vf p = vset(1.9875691500e-4f);
    p = vfma(vset(1.3981999507e-3f), p, r);
    p = vfma(vset(8.3334519073e-3f), p, r);
    p = vfma(vset(4.1665795894e-2f), p, r);
    p = vfma(vset(1.6666665459e-1f), p, r);
    p = vfma(vset(5.0000001201e-1f), p, r);
    p = vfma(r, p, r * r) + 1.0f;
    vi e = (vi)shifted - (vi)magic;
    vi half = e >> 1;
    return p * (vf)((half + 127) << 23) * (vf)((e - half + 127) << 23);
}

/* x * sigmoid(slope * x) */
INLINE vf vsilu(vf x, float slope) { return x / (1.0f + vexp(-slope * x)); }
