/* Gaussian noise on a whole matrix: a thread has four adjacent weights, which share a draw. */
struct Noisy {
    const void *w;
    void *y;
    i64 count;
    u32 matrix, plane;
    const i64 *seed;
    const double *std;
};

extern "C" __global__ void weight_noise(Noisy n) {
    i64 index = (i64)blockIdx.x * blockDim.x + threadIdx.x, first = index * 4;
    if (first >= n.count) return;
    u32 word[4];
    philox(word, (u64)*n.seed, (u32)index, n.matrix, 0, n.plane);
    float z[4];
    box_muller(z, word);
    float std = (float)*n.std;
    for (int q = 0; q < 4 && first + q < n.count; q++) {
        float noise = widen(narrowed(std * z[q]));
        ((narrow *)n.y)[first + q] = narrowed(widen(((const narrow *)n.w)[first + q]) + noise);
    }
}
