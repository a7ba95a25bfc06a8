/* All steps in one launch for small H: each block holds all of W_h and processes its own rows, so blocks exchange
 * nothing.
 *
 * The product is computed transposed: the weights are the left operand and stay in registers, the rows are the
 * right operand and come through shared memory. A tile of the left operand is one gate of 16 units in the forward
 * pass, and 16 units in the backward pass. Several of the 8 columns of the right operand are the same row, so each
 * thread finds all gates of one unit of its rows among its sums, the same ones at all steps. A step is bound by its
 * instructions, so each block gets few rows. Macros:
 *
 *   BACKWARD          0: forward pass; 1: backward pass
 *   HIDDEN            units
 *   WARPS             one for every 16 units
 *   K_STEPS           a k-step is 8 words of the depth
 *   RESIDENT_K_STEPS  the first k-steps, with their weights in registers; those of the others are in shared memory
 *   ROWS_PER_THREAD   a block has twice as many rows
 *   NORM              0: none; 1: over the units; 2: over the examples, with given moments
 */
#define THREADS (32 * WARPS)
#define ROWS (2 * ROWS_PER_THREAD)
#define COLUMN_TILES ((ROWS_PER_THREAD + 1) / 2) /* of 8 columns of the right operand */
#define VALUES_PER_K_STEP (TYPE ? 16 : 8) /* always 8 words */
#define VALUES_PER_UNIT (!BACKWARD || GATES == 1 ? 1 : GATES <= 4 ? 4 : 8) /* operands of one unit */
#define TILES (BACKWARD ? 1 : GATES) /* of 16 rows of the left operand */
#define ACCUMULATORS (TILES > 2 ? 1 : 4) /* independent, so that a product need not wait for the one before */
#define WORDS (K_STEPS * 8)
#define ROW_PITCH ((WORDS + 15) / 32 * 32 + 16) /* words of a row in shared memory: adjacent rows use different banks */
#define PREFETCH_STEPS 6                        /* steps between a prefetch into L2 and its use */

/* --- the position of a thread ------------------------------------------------------------------------- */

struct Thread { /* the position of a thread: one unit of ROWS_PER_THREAD rows */
    int warp, lane, unit;
    bool in; /* the unit exists */
    int row[ROWS_PER_THREAD], length[ROWS_PER_THREAD]; /* a row that does not exist has length 0 */
    u32 example[ROWS_PER_THREAD];
    int longest; /* the longest row of the block */
};

#define EACH_ROW _Pragma("unroll") for (int c = 0; c < ROWS_PER_THREAD; c++)
#ifndef EACH_GATE
#define EACH_GATE _Pragma("unroll") for (int q = 0; q < GATES; q++)
#endif
#define ALIVE(t) (m.in && (HAS_LENGTHS ? (t) < m.length[c] : m.length[c] > 0))
/* 1 if a reset lies between step t and the one before; `at`: the row of step t. Loaded one step before its use. */
#define CUT_AT(t, at)                                                                         \
    (HAS_RESETS && (t) >= 0 && (t) < m.length[c] && !(l.reverse && (t) == 0)               \
         ? load_early(l.resets + (at) + (l.reverse ? l.batch : 0))                               \
         : EarlyLoad{0})

/* The row and the half of a tile of a thread. Lane / 2 % 2 selects the first or last 8 units, lane % 2 one of two
 * rows. */
__device__ __forceinline__ int local_row(int lane, int c) { return lane % 2 + c * 2; }
__device__ __forceinline__ int upper_half(int lane) { return lane / 2 % 2; }
/* The row of column j of tile n: column 2q + c % 2 is row c of the threads of column pair q. */
__device__ __forceinline__ int row_of_column(int n, int j) {
    return ROWS_PER_THREAD == 1 ? j / 2 % 2 : j / 2 % 2 + (n * 2 + j % 2) * 2;
}

__device__ __forceinline__ Thread thread_of(const Loop &l) {
    Thread m;
    m.warp = threadIdx.x / 32, m.lane = threadIdx.x % 32;
    m.unit = m.warp * 16 + upper_half(m.lane) * 8 + m.lane / 4, m.in = m.unit < HIDDEN;
    EACH_ROW {
        m.row[c] = blockIdx.x * ROWS + local_row(m.lane, c);
        bool exists = m.row[c] < l.batch;
        m.length[c] = exists ? (int)length_of(l, m.row[c]) : 0;
        m.example[c] = exists ? (u32)l.examples[m.row[c]] : 0;
    }
    m.longest = HAS_LENGTHS ? 0 : (int)l.steps;
    for (int r = 0; HAS_LENGTHS && r < ROWS; r++) {
        int row = blockIdx.x * ROWS + r, length = row < l.batch ? (int)length_of(l, row) : 0;
        m.longest = length > m.longest ? length : m.longest;
    }
    return m;
}

/* --- the product ------------------------------------------------------------------------------------ */

/* The position of the two words of k-step s that a thread of column pair q reads: two k-steps are 16 adjacent bytes. */
__device__ __forceinline__ int word_of_step(int s, int q) {
    return K_STEPS % 2 && s == K_STEPS - 1 ? s * 8 + q * 2 : s / 2 * 16 + q * 4 + s % 2 * 2;
}

/* Word `word` of the depth and row `row` of a tile of a warp's part of the left operand. */
__device__ __forceinline__ u32 weights_at(const Loop &l, int warp, int tile, int row, int word) {
    const narrow *w = (const narrow *)l.w_hh;
    u32 out = 0;
#pragma unroll
    for (int half = 0; half < (TYPE ? 2 : 1); half++) {
        int k = TYPE ? word * 2 + half : word;
        narrow one = 0;
        int unit = warp * 16 + row, from = k / VALUES_PER_UNIT, gate = BACKWARD ? k % VALUES_PER_UNIT : tile;
        if (unit < HIDDEN && from < HIDDEN && gate < GATES)
            one = w[BACKWARD ? (gate * HIDDEN + from) * HIDDEN + unit : (gate * HIDDEN + unit) * HIDDEN + from];
#if TYPE
        out |= (u32)one << half * 16;
#else
        out = tf32_bits(one);
#endif
    }
    return out;
}

struct Weights {
    u32 in_registers[RESIDENT_K_STEPS][TILES][4];
    const uint4 *in_shared; /* [K_STEPS - RESIDENT_K_STEPS][TILES][32 lanes] of the warp */
};

__device__ __forceinline__ void load_weights(const Loop &l, Weights &w, int warp, int lane) {
    extern __shared__ __align__(16) uint4 rest[];
    uint4 *to = rest + warp * (K_STEPS - RESIDENT_K_STEPS) * TILES * 32 + lane;
    w.in_shared = to;
#pragma unroll
    for (int s = 0; s < K_STEPS; s++)
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            u32 one[4];
#pragma unroll
            for (int part = 0; part < 4; part++)
                one[part] = weights_at(l, warp, i, part % 2 * 8 + lane / 4, word_of_step(s, lane % 4) + part / 2);
            if (s < RESIDENT_K_STEPS) {
#pragma unroll
                for (int part = 0; part < 4; part++) w.in_registers[s < RESIDENT_K_STEPS ? s : 0][i][part] = one[part];
            } else {
                to[((s - RESIDENT_K_STEPS) * TILES + i) * 32] = make_uint4(one[0], one[1], one[2], one[3]);
            }
        }
}

/* Add one k-step of one tile; weights in shared memory are read again each time. */
__device__ __forceinline__ void add_step(float *sum, const Weights &w, int s, int i, u32 b0, u32 b1) {
    if (s < RESIDENT_K_STEPS) {
        multiply(sum, w.in_registers[s < RESIDENT_K_STEPS ? s : 0][i], b0, b1);
    } else {
        uint4 v = w.in_shared[((s - RESIDENT_K_STEPS) * TILES + i) * 32];
        u32 one[4] = {v.x, v.y, v.z, v.w};
        multiply(sum, one, b0, b1);
    }
}

typedef float Sums[ACCUMULATORS][COLUMN_TILES][TILES][4];

/* Add the product to the sums, without waiting for them. */
__device__ __forceinline__ void product(Sums &sums, const Weights &w, const u32 *entering, int lane) {
#pragma unroll
    for (int n = 0; n < COLUMN_TILES; n++) {
        const u32 *from = entering + row_of_column(n, lane / 4) * ROW_PITCH;
#pragma unroll
        for (int s = 0; s + 1 < K_STEPS; s += 2) {
            uint4 v = *(const uint4 *)(from + word_of_step(s, lane % 4));
#pragma unroll
            for (int i = 0; i < TILES; i++) add_step(sums[s % ACCUMULATORS][n][i], w, s, i, v.x, v.y);
#pragma unroll
            for (int i = 0; i < TILES; i++) add_step(sums[(s + 1) % ACCUMULATORS][n][i], w, s + 1, i, v.z, v.w);
        }
        if (K_STEPS % 2) {
            uint2 v = *(const uint2 *)(from + word_of_step(K_STEPS - 1, lane % 4));
#pragma unroll
            for (int i = 0; i < TILES; i++)
                add_step(sums[(K_STEPS - 1) % ACCUMULATORS][n][i], w, K_STEPS - 1, i, v.x, v.y);
        }
    }
}

/* The sum of a thread's unit and its row c, of one tile. */
__device__ __forceinline__ float total(const Sums &sums, int tile, int c, bool up) {
    float low = 0.0f, high = 0.0f;
#pragma unroll
    for (int k = 0; k < ACCUMULATORS; k++) low += sums[k][c / 2][tile][c % 2], high += sums[k][c / 2][tile][2 + c % 2];
    return up ? high : low;
}

/* Write a unit's operands of one row for the next product. */
__device__ __forceinline__ void enter(u32 *entering, int row, int unit, const float *v) {
#if TYPE
    if (VALUES_PER_UNIT == 1)
        ((narrow *)(entering + row * ROW_PITCH))[unit] = narrowed(v[0]);
    else
#pragma unroll
        for (int q = 0; q < VALUES_PER_UNIT; q += 4)
            *(uint2 *)(entering + row * ROW_PITCH + (unit * VALUES_PER_UNIT + q) / 2) =
                make_uint2(pair(v[q], v[(q + 1) % VALUES_PER_UNIT]),
                    pair(v[(q + 2) % VALUES_PER_UNIT], v[(q + 3) % VALUES_PER_UNIT]));
#else
    if (VALUES_PER_UNIT == 1)
        entering[row * ROW_PITCH + unit] = tf32_bits(v[0]);
    else
#pragma unroll
        for (int q = 0; q < VALUES_PER_UNIT; q += 4)
            *(uint4 *)(entering + row * ROW_PITCH + unit * VALUES_PER_UNIT + q) =
                make_uint4(tf32_bits(v[q]), tf32_bits(v[(q + 1) % VALUES_PER_UNIT]),
                    tf32_bits(v[(q + 2) % VALUES_PER_UNIT]), tf32_bits(v[(q + 3) % VALUES_PER_UNIT]));
#endif
}

/* --- memory ----------------------------------------------------------------------------------------- */

/* The prefetch into L2 of a row of at most 4 KB, some steps before its use. Each warp prefetches one row of one
 * array. */
struct L2Prefetch {
    const char *from; /* the lane's cache line of the row at step 0 */
    int length;       /* of the row, in steps */
    i64 step_stride;  /* bytes from one step to the next */
};

__device__ __forceinline__ L2Prefetch l2_prefetch_of(const Loop &l, const Thread &m, int kind, const void *from,
                                                     int bytes) {
    int row = blockIdx.x * ROWS + m.warp % ROWS, byte = m.lane * 128;
    L2Prefetch b = {};
    if (m.warp / ROWS != kind || row >= l.batch || byte >= bytes + 127) return b;
    b.length = (int)length_of(l, row), b.step_stride = bytes * (l.reverse ? -l.batch : l.batch);
    b.from = (const char *)from + row_index(l, 0, row, b.length) * bytes + (byte < bytes ? byte : bytes - 1);
    return b;
}

__device__ __forceinline__ void prefetch_l2(const L2Prefetch &b, int t) {
    if (t >= 0 && t < b.length) asm volatile("prefetch.global.L2 [%0];" ::"l"(b.from + t * b.step_stride));
}

/* The n-th step in the order of processing. */
__device__ __forceinline__ int nth_step(const Thread &m, int n) { return BACKWARD ? m.longest - 1 - n : n; }

/* One draw serves four adjacent units. So of the four lanes with these units each draws for another step. */
#define UNIT_QUAD (m.unit / 4)
#define QUAD_STEP (m.lane / 4 % 4) /* of the four steps */

/* Philox 4x32-10 in parts, which can be spread over steps. */
__device__ __forceinline__ void begin_draw(u32 (&w)[4], const Stream &s, u32 four, u32 example, u32 step) {
    w[0] = s.sees_unit ? four : 0, w[1] = s.sees_example ? example : 0, w[2] = s.sees_step ? step : 0, w[3] = s.plane;
}
template <int COUNT>
__device__ __forceinline__ void draw_rounds(u32 (&w)[4], u64 seed, int first) {
    u32 k0 = (u32)seed + first * 0x9E3779B9u, k1 = (u32)(seed >> 32) + first * 0xBB67AE85u;
#pragma unroll
    for (int round = 0; round < COUNT; round++) {
        u64 p0 = (u64)w[0] * 0xD2511F53u, p1 = (u64)w[2] * 0xCD9E8D57u;
        w[0] = (u32)(p1 >> 32) ^ w[1] ^ k0;
        w[1] = (u32)p1;
        w[2] = (u32)(p0 >> 32) ^ w[3] ^ k1;
        w[3] = (u32)p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
}
