/* Four standard normal numbers from four random words (Box and Muller). Prepended to some sources. */

/* -log of (word + ½) / 2³². Near one a float has no digits left: there it is computed from the distance to one. */
__device__ __forceinline__ float minus_log(u32 word) {
    const float unit = 2.3283064365386963e-10f; /* 2⁻³² */
    return word < 0x80000000u ? -logf(((float)word + 0.5f) * unit) : -log1pf(((float)~word + 0.5f) * -unit);
}

__device__ __forceinline__ void box_muller(float *z, const u32 *word) {
    for (int q = 0; q < 4; q += 2) {
        float length = sqrtf(2.0f * minus_log(word[q]));
        sincospif(((float)word[q + 1] + 0.5f) * 4.656612873077393e-10f, &z[q + 1], &z[q]);
        z[q] *= length, z[q + 1] *= length;
    }
}
