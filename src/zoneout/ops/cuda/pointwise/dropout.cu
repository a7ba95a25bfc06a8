/* Dropout of a whole sequence: one thread has four neighbouring units of one row, which share a draw. */
struct Dropped {
    const void *x;
    void *y;
    i64 rows, batch, units; /* x is [rows, units], rows = steps · batch */
    i64 first_step;
    const i64 *examples; /* [batch] */
};

extern "C" __global__ void dropout(Stream s, Dropped d) {
    i64 fours = (d.units + 3) / 4, at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= d.rows * fours) return;
    i64 row = at / fours, unit = at % fours * 4;
    u32 word[4];
    u32 example = s.sees_example ? (u32)d.examples[row % d.batch] : 0;
    u32 step = s.sees_step ? (u32)(d.first_step + row / d.batch) : 0;
    philox(word, (u64)*s.seed, (u32)(unit / 4), example, step, s.plane);
    for (int q = 0; q < 4 && unit + q < d.units; q++) {
        double rate = s.rate[(unit + q) * s.stride];
        u32 threshold = (u32)rint(rate * 65536.0), bits = (word[q] >> (s.high ? 16 : 0)) & 0xFFFF;
        i64 i = row * d.units + unit + q;
        float x = widen(((const narrow *)d.x)[i]);
        double scale = 65536.0 / (65536u - threshold); /* by the rate as it is drawn; never used at a rate of 1 */
        ((narrow *)d.y)[i] = narrowed(bits < threshold ? 0.0f : (float)(x * scale));
    }
}
