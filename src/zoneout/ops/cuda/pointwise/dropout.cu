/* Dropout of a whole sequence: a thread has four adjacent units of one row, which share a draw. */
struct Dropped {
    const void *x;
    void *y;
    i64 rows, batch, units; /* x is [rows, units], rows = steps · batch */
    i64 first_step;
    const i64 *examples; /* [batch] */
};

struct Four { /* up to four units of one row, and the 16 random bits of each */
    i64 row, unit;
    u32 bits[4];
    bool in;
};

__device__ __forceinline__ Four four_of(const Stream &s, const Dropped &d) {
    i64 fours = (d.units + 3) / 4, at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    Four f = {at / fours, at % fours * 4};
    f.in = at < d.rows * fours;
    if (!f.in) return f;
    u32 example = s.sees_example ? (u32)d.examples[f.row % d.batch] : 0;
    u32 step = s.sees_step ? (u32)(d.first_step + f.row / d.batch) : 0;
    philox(f.bits, (u64)*s.seed, s.sees_unit ? (u32)(f.unit / 4) : 0, example, step, s.plane);
    u32 first = f.bits[0];
    for (int q = 0; q < 4; q++) f.bits[q] = ((s.sees_unit ? f.bits[q] : first) >> (s.high ? 16 : 0)) & 0xFFFF;
    return f;
}

/* Write the random bits, [rows, units]. */
extern "C" __global__ void bits(Stream s, Dropped d) {
    Four f = four_of(s, d);
    if (!f.in) return;
    for (int q = 0; q < 4 && f.unit + q < d.units; q++) ((int *)d.y)[f.row * d.units + f.unit + q] = (int)f.bits[q];
}

extern "C" __global__ void dropout(Stream s, Dropped d) {
    Four f = four_of(s, d);
    if (!f.in) return;
    i64 row = f.row, unit = f.unit;
    for (int q = 0; q < 4 && unit + q < d.units; q++) {
        double rate = s.rate[(unit + q) * s.stride];
        u32 threshold = (u32)rint(rate * 65536.0), bits = f.bits[q];
        i64 i = row * d.units + unit + q;
        float x = widen(((const narrow *)d.x)[i]);
        double scale = 65536.0 / (65536u - threshold); /* by the rate as it is drawn; never used at a rate of 1 */
        ((narrow *)d.y)[i] = narrowed(bits < threshold ? 0.0f : (float)(x * scale));
    }
}
