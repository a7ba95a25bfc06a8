/* Gaussian noise on a whole matrix: one thread has four neighbouring weights, which share a draw. */
struct Noisy {
    const void *w;
    void *y;
    i64 count;
    u32 matrix, plane;
    const i64 *seed;
    const double *std;
};

/* -log of (word + ½) / 2³². Near one, where a float has no digits left, from how far it is from one. */
__device__ __forceinline__ float minus_log(u32 word) {
    const float unit = 2.3283064365386963e-10f; /* 2⁻³² */
    return word < 0x80000000u ? -logf(((float)word + 0.5f) * unit) : -log1pf(((float)~word + 0.5f) * -unit);
}

extern "C" __global__ void weight_noise(Noisy n) {
    i64 index = (i64)blockIdx.x * blockDim.x + threadIdx.x, first = index * 4;
    if (first >= n.count) return;
    u32 word[4];
    philox(word, (u64)*n.seed, (u32)index, n.matrix, 0, n.plane);
    float z[4];
    for (int q = 0; q < 4; q += 2) {
        float length = sqrtf(2.0f * minus_log(word[q]));
        sincospif(((float)word[q + 1] + 0.5f) * 4.656612873077393e-10f, &z[q + 1], &z[q]);
        z[q] *= length, z[q + 1] *= length;
    }
    float std = (float)*n.std;
    for (int q = 0; q < 4 && first + q < n.count; q++) {
        float noise = widen(narrowed(std * z[q]));
        ((narrow *)n.y)[first + q] = narrowed(widen(((const narrow *)n.w)[first + q]) + noise);
    }
}
