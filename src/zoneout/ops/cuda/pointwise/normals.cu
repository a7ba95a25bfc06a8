/* Normal numbers, [rows, units]: a thread has four adjacent units of one row, which share a draw. */
struct Normal {
    float *y;
    i64 rows, batch, units, first_step; /* rows = steps · batch */
    const i64 *examples, *seed;
    u32 plane;
};

extern "C" __global__ void normals(Normal n) {
    i64 fours = (n.units + 3) / 4, at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= n.rows * fours) return;
    i64 row = at / fours, unit = at % fours * 4;
    u32 word[4];
    float z[4];
    philox(word, (u64)*n.seed, (u32)(unit / 4), (u32)n.examples[row % n.batch], (u32)(n.first_step + row / n.batch),
        n.plane);
    box_muller(z, word);
    for (int q = 0; q < 4 && unit + q < n.units; q++) n.y[row * n.units + unit + q] = z[q];
}
