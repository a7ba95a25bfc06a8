/* Any cell: all steps in one launch, with the product of block.cuh and the generated step. The matrices of products
 * inside the step are in shared memory, all of them in each block. */

/* Steps in the body of the loop: what happens every fourth step is then known at compile time. */
constexpr int unrolled_steps = KNOWN_STREAMS && ROWS_PER_THREAD == 1 ? 4 : 1;

/* Loop over the processed steps. Masks are drawn for four steps at a time; `phase` is the position among these. */
#define EACH_STEP(n, phase)                                                  \
    for (int first_ = 0; first_ < m.longest; first_ += unrolled_steps)              \
        _Pragma("unroll") for (int offset_ = 0; offset_ < unrolled_steps; offset_++)      \
            if (const int n = first_ + offset_, phase = unrolled_steps == 4 ? offset_ : n & 3; n < m.longest)

/* --- noise ------------------------------------------------------------------------------------------ */

struct Bits { /* by stream: bits [step][unit] of four steps and four units */
    u32 of[STATES + 1];
};

typedef u32 Thresholds[STATES + 1][WARPS * 16]; /* thresholds of all units, in shared memory */

__device__ __forceinline__ void set_thresholds(Thresholds &thresholds, const Thread &m, const Streams &n) {
    EACH_STREAM if (m.lane % 2 == 0) thresholds[k][m.unit] = n.noise[k].threshold;
}

/* The bits of a stream for four steps, from the words of one of them. All lanes of a warp must call this. */
__device__ __forceinline__ u32 bits_of_four(const u32 (&w)[4], const Stream &s, const u32 *thresholds,
                                            const Thread &m) {
    u32 bits = 0;
#pragma unroll
    for (int i = 0; i < 4; i++)
        bits |= (u32)(((s.sees_unit ? w[i] : w[0]) >> (s.high ? 16 : 0) & 0xFFFF) < thresholds[UNIT_QUAD * 4 + i]) << i;
    bits <<= 4 * QUAD_STEP;
    bits |= __shfl_xor_sync(~0u, bits, 4);
    return bits | __shfl_xor_sync(~0u, bits, 8);
}

/* The bits of four steps from the n-th on. All lanes of a warp must call this. */
__device__ __forceinline__ Bits draw_bits(const Loop &l, const CellArguments &o, const Thread &m,
                                          const Streams &noises, const Thresholds &thresholds, int c, int n) {
    Bits bits = {};
    u32 step = mask_step(l, nth_step(m, n + QUAD_STEP), m.length[c]), w[4] = {};
    int drawn = -1; /* the stream of `w` */
    EACH_STREAM {
        const Stream &s = stream_of(o, k);
        if (s.mode != DRAWN) continue;
        if (!(k && drawn == k - 1 && shares_word(o, noises, k)))
            philox(w, noises.noise[k].seed, s.sees_unit ? UNIT_QUAD : 0, s.sees_example ? m.example[c] : 0,
                s.sees_step ? step : 0,
                   s.plane);
        drawn = k;
        bits.of[k] = bits_of_four(w, s, thresholds[k], m);
    }
    return bits;
}

__device__ __forceinline__ bool any_drawn(const CellArguments &o) {
    bool any = false;
    EACH_STREAM any = any || stream_of(o, k).mode == DRAWN;
    return any;
}

/* Masks that are drawn in advance. If one draw serves all streams, its ten rounds are spread over the four steps
 * before. */
struct MaskPipeline {
    Bits now[ROWS_PER_THREAD], next[ROWS_PER_THREAD];
    u32 w[ROWS_PER_THREAD][4];
};

__device__ __forceinline__ constexpr bool one_draw() { /* at most states 0 and 1 are drawn, and from the same words */
#if KNOWN_STREAMS
    return (STREAM2 & 3) != DRAWN && (STREAM3 & 3) != DRAWN &&
           ((STREAM0 & 3) != DRAWN || (STREAM1 & 3) != DRAWN || STREAM1 & 8);
#else
    return false;
#endif
}

/* `n`: the number of the current step. */
__device__ __forceinline__ void advance_draw(MaskPipeline &d, const Loop &l, const CellArguments &o, const Thread &m,
                                             const Streams &noises, const Thresholds &thresholds, int n, int phase) {
    if (!any_drawn(o)) return;
    if (!one_draw()) {
        if (phase == 3) {
            EACH_ROW d.next[c] = draw_bits(l, o, m, noises, thresholds, c, n + 1);
        }
        return;
    }
    const int k = o.state[0].mode == DRAWN ? 0 : 1;
    EACH_ROW {
        if (phase == 0) begin_draw(d.w[c], o.state[k], UNIT_QUAD, m.example[c],
            mask_step(l, nth_step(m, n + 4 + QUAD_STEP), m.length[c]));
        if (phase < 2)
            draw_rounds<3>(d.w[c], noises.noise[k].seed, phase * 3);
        else
            draw_rounds<2>(d.w[c], noises.noise[k].seed, phase * 2 + 2);
        if (phase == 3) EACH_STATE {
            const Stream &s = o.state[k];
            if (s.mode == DRAWN) d.next[c].of[k] = bits_of_four(d.w[c], s, thresholds[k], m);
        }
    }
}

__device__ __forceinline__ Masks masks_from_bits(const CellArguments &o, const Bits &bits, const Streams &n, int unit,
                                                 int phase) {
    Masks masks = {};
    EACH_STREAM {
        const Stream &s = stream_of(o, k);
        bool keeps = bits.of[k] >> (phase * 4 + unit % 4) & 1;
        masks.of[k] = s.mode == EXPECTED ? n.noise[k].rate : s.mode == DRAWN && keeps ? 1.0f : 0.0f;
    }
    return masks;
}

/* --- products inside the step ------------------------------------------------------------------------ */
#if PRODUCTS
#define H_STEPS ((HIDDEN + VALUES_PER_K_STEP - 1) / VALUES_PER_K_STEP) /* k-steps over all units */
#define H_PITCH ((H_STEPS * 8 + 15) / 32 * 32 + 16)                    /* words of one value of all units of a row */
#define ALL_PARTS (product_first(PRODUCTS - 1) + product_parts(PRODUCTS - 1))
#define OPERANDS (BACKWARD ? ALL_PARTS : PRODUCTS) /* values of a unit that the products read */
#define MATRIX (H_STEPS * 32)                      /* fragments of 16 bytes of one part, of a warp */
#define EACH_LEVEL _Pragma("unroll") for (int level = 0; level < LEVELS; level++)
#define PRODUCTS_OF(level) EACH_PRODUCT if (product_level(k) == (level))

/* As word_of_step, over all units. */
__device__ __forceinline__ int word_of_units(int s, int q) {
    return H_STEPS % 2 && s == H_STEPS - 1 ? s * 8 + q * 2 : s / 2 * 16 + q * 4 + s % 2 * 2;
}

/* Word `word` of the depth and unit `unit` of the left operand: a part of a matrix, in the backward pass
 * transposed. */
__device__ __forceinline__ u32 matrix_word(const narrow *part, int unit, int word) {
    u32 out = 0;
#pragma unroll
    for (int half = 0; half < (TYPE ? 2 : 1); half++) {
        int from = TYPE ? word * 2 + half : word;
        narrow one = 0;
        if (unit < HIDDEN && from < HIDDEN) one = part[BACKWARD ? from * HIDDEN + unit : unit * HIDDEN + from];
#if TYPE
        out |= (u32)one << half * 16;
#else
        out = tf32_bits(one);
#endif
    }
    return out;
}

struct Products {
    const uint4 *matrices; /* [ALL_PARTS][H_STEPS][32 lanes] of the warp */
    u32 *operands;         /* [OPERANDS][ROWS][H_PITCH] of the block */
};

__device__ __forceinline__ u32 *operand(const Products &p, int number) {
    return p.operands + number * ROWS * H_PITCH;
}

/* Copy the matrices, and set the operands to zero: the units past the last one stay zero. */
__device__ __forceinline__ Products load_products(const CellArguments &o, const Thread &m) {
    extern __shared__ __align__(16) uint4 rest[];
    uint4 *first = rest + (RECURRENT ? WARPS * (K_STEPS - RESIDENT_K_STEPS) * TILES * 32 : 0);
    uint4 *to = first + m.warp * ALL_PARTS * MATRIX + m.lane;
    Products p = {to, (u32 *)(first + WARPS * ALL_PARTS * MATRIX)};
    const int unit = m.warp * 16 + m.lane / 4;
    EACH_PRODUCT for (int q = 0; q < product_parts(k); q++) {
        const narrow *part = o.matrix[k] + q * HIDDEN * HIDDEN;
        for (int s = 0; s < H_STEPS; s++, to += 32) {
            const int word = word_of_units(s, m.lane % 4);
            *to = make_uint4(matrix_word(part, unit, word), matrix_word(part, unit + 8, word),
                             matrix_word(part, unit, word + 1), matrix_word(part, unit + 8, word + 1));
        }
    }
    for (int i = threadIdx.x; i < OPERANDS * ROWS * H_PITCH; i += THREADS) p.operands[i] = 0;
    return p;
}

/* Write a unit's value of one row for a product. */
__device__ __forceinline__ void put(u32 *operand, int row, int unit, float v) {
#if TYPE
    ((narrow *)(operand + row * H_PITCH))[unit] = narrowed(v);
#else
    operand[row * H_PITCH + unit] = tf32_bits(v);
#endif
}

typedef float PartSums[COLUMN_TILES][4];

/* Add the product of part `number` with an operand. */
__device__ __forceinline__ void add_part(PartSums &sums, const Products &p, int number, const u32 *operand, int lane) {
    const uint4 *w = p.matrices + number * MATRIX;
#pragma unroll
    for (int n = 0; n < COLUMN_TILES; n++) {
        const u32 *from = operand + row_of_column(n, lane / 4) * H_PITCH;
#pragma unroll
        for (int s = 0; s < H_STEPS; s++) {
            uint4 a = w[s * 32];
            uint2 b = *(const uint2 *)(from + word_of_units(s, lane % 4));
            u32 one[4] = {a.x, a.y, a.z, a.w};
            multiply(sums[n], one, b.x, b.y);
        }
    }
}

/* The sum of a thread's unit and its row c. */
__device__ __forceinline__ float part_total(const PartSums &sums, int c, bool up) {
    return up ? sums[c / 2][2 + c % 2] : sums[c / 2][c % 2];
}
#endif

/* --- forward ---------------------------------------------------------------------------------------- */
#if !BACKWARD
extern "C" __global__ void __launch_bounds__(THREADS, 1) forward(const Loop given, const CellArguments given_cell) {
    __shared__ __align__(16) u32 entering[2][ROWS * ROW_PITCH];
    __shared__ __align__(16) Thresholds thresholds;
    Loop l = given;
    CellArguments o = given_cell;
    simplify(l), simplify(o);
    Thread m = thread_of(l);
    narrow *gates = (narrow *)l.gates;
    const narrow *scale = (const narrow *)l.scale_h;
#if RECURRENT
    Weights w;
    load_weights(l, w, m.warp, m.lane);
#endif
#if PRODUCTS
    const Products products = load_products(o, m);
#endif
    const int loaded_unit = m.in ? m.unit : 0;
    const Streams noises = streams_of(o, loaded_unit);
    const Unit constant = unit_of(l, o, loaded_unit);
    set_thresholds(thresholds, m, noises);
    for (int i = threadIdx.x; i < 2 * ROWS * ROW_PITCH; i += THREADS) ((u32 *)entering)[i] = 0;
    __syncthreads();

    float state[ROWS_PER_THREAD][STATES], stored[ROWS_PER_THREAD][GATES + SLOTS] = {}, held[ROWS_PER_THREAD];
    EarlyLoad x_part[ROWS_PER_THREAD][GATES], next[ROWS_PER_THREAD][GATES]; /* x's part of this step and of the next */
    bool cut[ROWS_PER_THREAD]; /* a reset lies between this step and the one before */
    EarlyLoad cut_next[ROWS_PER_THREAD]; /* the same for the next step */
    int at[ROWS_PER_THREAD]; /* row of this step; at · G · H stays below 2³¹ */
    const int step_stride = l.reverse ? -(int)l.batch : (int)l.batch;
    EACH_ROW {
        held[c] = 0.0f, cut[c] = false;
        EACH_STATE state[c][k] = 0.0f;
        at[c] = (int)row_index(l, 0, m.row[c], m.length[c]);
        cut_next[c] = CUT_AT(1, at[c] + step_stride);
        if (ALIVE(0)) {
            i64 start = (i64)m.row[c] * HIDDEN + m.unit;
            cut[c] = cut_at(l, 0, m.row[c], m.length[c]);
            EACH_STATE state[c][k] = start_at(l, o, k, cut[c], start);
            float out = scale ? state[c][0] * widen(scale[start]) : state[c][0];
            if (RECURRENT) enter(entering[0], local_row(m.lane, c), m.unit, &out);
        }
    }
    auto fetch = [&](int t, int offset) {
        EACH_ROW if (ALIVE(t)) {
            int gate = (at[c] + offset) * (GATES * HIDDEN) + m.unit;
            EACH_GATE next[c][q] = load_early(gates + gate + q * HIDDEN);
        }
    };
    auto store = [&](int t, int offset) { /* the results of step t, during the next product */
        EACH_ROW if (ALIVE(t)) {
            int unit = (at[c] + offset) * HIDDEN + m.unit, gate = (at[c] + offset) * (GATES * HIDDEN) + m.unit;
            ((narrow *)l.y)[unit] = narrowed(state[c][0]);
            EACH_STATE if (k) o.states[k][unit] = state[c][k];
            EACH_SLOT o.slot[k][unit] = stored[c][GATES + k];
            EACH_GATE gates[gate + q * HIDDEN] = narrowed(stored[c][q]);
        }
    };
    const L2Prefetch ahead = l2_prefetch_of(l, m, 0, gates, GATES * HIDDEN * sizeof(narrow));
    MaskPipeline pipeline = {};
    if (any_drawn(o)) {
        EACH_ROW pipeline.next[c] = draw_bits(l, o, m, noises, thresholds, c, 0);
    }
    fetch(0, 0);

    EACH_STEP(t, phase) {
        __syncthreads();
        Sums sums = {};
#if RECURRENT
        product(sums, w, entering[phase & 1], m.lane);
#endif
        /* Before the sums are complete: masks, x's part and stores. */
        if (phase == 0) {
            EACH_ROW pipeline.now[c] = pipeline.next[c];
        }
        advance_draw(pipeline, l, o, m, noises, thresholds, t, phase);
        EACH_ROW EACH_GATE x_part[c][q] = next[c][q];
        if (t + 1 < m.longest) fetch(t + 1, step_stride);
        if (t) store(t - 1, -step_stride);
        prefetch_l2(ahead, t + PREFETCH_STEPS);
        EarlyLoad cut_after_next[ROWS_PER_THREAD]; /* loaded now, since a load takes longer than the rest of a step */
        EACH_ROW cut_after_next[c] = CUT_AT(t + 2, at[c] + 2 * step_stride);
        Unit units[ROWS_PER_THREAD];
        auto begin = [&](int c) {
            i64 start = (i64)m.row[c] * HIDDEN + m.unit;
            Unit &u = units[c];
            u = constant;
            EACH_GATE {
                float v = RECURRENT ? total(sums, q, c, upper_half(m.lane)) : 0.0f;
                u.gate[q] = widen(x_part[c][q]) + (APART ? 0.0f : v);
                u.r[q] = v;
            }
            EACH_STATE u.old[k] = cut[c] ? start_at(l, o, k, true, start) : state[c][k];
            u.held = held[c];
            set_masks(u, o, masks_from_bits(o, pipeline.now[c], noises, m.unit, phase), t == 0 || cut[c]);
        };
#if PRODUCTS
        EACH_ROW begin(c);
        EACH_LEVEL {
            EACH_ROW if (ALIVE(t)) {
                step_enter(units[c], level);
                PRODUCTS_OF(level) put(operand(products, k), local_row(m.lane, c), m.unit, units[c].in[k]);
            }
            __syncthreads();
            PRODUCTS_OF(level) EACH_PART {
                const int number = product_first(k) + q;
                PartSums of_part = {};
                add_part(of_part, products, number, operand(products, k), m.lane);
                EACH_ROW {
                    const float v = units[c].inner[number] = part_total(of_part, c, upper_half(m.lane));
                    if (ALIVE(t)) o.inner[k][((i64)at[c] * product_parts(k) + q) * HIDDEN + m.unit] = v;
                }
            }
        }
#endif
        EACH_ROW {
            i64 start = (i64)m.row[c] * HIDDEN + m.unit;
            if (!PRODUCTS) begin(c);
            Unit &u = units[c];
            step_forward(u);
            EACH_STATE state[c][k] = u.made[k];
            EACH_GATE stored[c][q] = u.gate[q];
            EACH_SLOT stored[c][GATES + k] = u.slot[k];
            if (HELD >= 0) held[c] = stored[c][HELD < 0 ? 0 : HELD];
            if (ALIVE(t)) {
                float out = state[c][0];
                cut[c] = HAS_RESETS && cut_next[c].bits, cut_next[c] = cut_after_next[c];
                if (cut[c]) out = start_h(l, true, start);
                if (scale) out *= widen(scale[start]);
                if (RECURRENT) enter(entering[(phase + 1) & 1], local_row(m.lane, c), m.unit, &out);
            }
            at[c] += step_stride;
        }
    }
    if (m.longest) store(m.longest - 1, -step_stride);
}
#endif

/* --- backward --------------------------------------------------------------------------------------- */
#if BACKWARD
struct Fetched { /* inputs of a step, from memory */
    EarlyLoad gates[GATES], dy;
    float held, slot[SLOTS + 1], old[STATES], dseen[STATES];
#if PRODUCTS
    float inner[ALL_PARTS];
#endif
    bool first;
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward(const Loop given, const CellArguments given_cell) {
    __shared__ __align__(16) u32 entering[2][ROWS * ROW_PITCH];
    __shared__ __align__(16) Thresholds thresholds;
    Loop l = given;
    CellArguments o = given_cell;
    simplify(l), simplify(o);
    Thread m = thread_of(l);
    const narrow *gates = (const narrow *)l.gates, *scale = (const narrow *)l.scale_h;
#if RECURRENT
    Weights w;
    load_weights(l, w, m.warp, m.lane);
#endif
#if PRODUCTS
    const Products products = load_products(o, m);
#endif
    const int loaded_unit = m.in ? m.unit : 0;
    const Streams noises = streams_of(o, loaded_unit);
    const Unit constant = unit_of(l, o, loaded_unit);
    set_thresholds(thresholds, m, noises);
    for (int i = threadIdx.x; i < 2 * ROWS * ROW_PITCH; i += THREADS) ((u32 *)entering)[i] = 0;
    __syncthreads();
    float d[ROWS_PER_THREAD][STATES], dreset[ROWS_PER_THREAD][STATES], owed[ROWS_PER_THREAD],
        dparameter[ROWS_PER_THREAD][PARAMETERS + 1];
    float dx[ROWS_PER_THREAD][GATES] = {}, out[ROWS_PER_THREAD][VALUES_PER_UNIT] = {}; /* out: gradients of h·Wh */
    /* of this step and of the next one to be processed */
    Fetched f[ROWS_PER_THREAD], next[ROWS_PER_THREAD];
    /* a reset before these steps; cut_fetched: before the step to be fetched next */
    EarlyLoad cut[ROWS_PER_THREAD] = {}, cut_next[ROWS_PER_THREAD] = {}, cut_fetched[ROWS_PER_THREAD];
    int at[ROWS_PER_THREAD]; /* row of this step; at · G · H stays below 2³¹ */
    const int step_stride = l.reverse ? -(int)l.batch : (int)l.batch;
    auto fetch = [&](int t, int offset) {
        EACH_ROW if (ALIVE(t)) {
            int row = at[c] + offset, unit = row * HIDDEN + m.unit, gate = row * (GATES * HIDDEN) + m.unit;
            int old = unit - step_stride * HIDDEN;
            i64 start = (i64)m.row[c] * HIDDEN + m.unit;
            const bool is_cut = HAS_RESETS && cut_fetched[c].bits;
            next[c].first = t == 0 || is_cut;
            EACH_GATE next[c].gates[q] = load_early(gates + gate + q * HIDDEN);
            next[c].dy = load_early((const narrow *)l.dy + unit);
            EACH_SLOT next[c].slot[k] = o.slot[k][unit];
#if PRODUCTS
            EACH_PRODUCT EACH_PART next[c].inner[product_first(k) + q] =
                o.inner[k][((i64)row * product_parts(k) + q) * HIDDEN + m.unit];
#endif
            EACH_STATE {
                if (next[c].first)
                    next[c].old[k] = start_at(l, o, k, is_cut, start);
                else
                    next[c].old[k] = k ? o.states[k][old] : widen(((const narrow *)l.y)[old]);
                next[c].dseen[k] = k && o.dseen[k] ? o.dseen[k][unit] : 0.0f;
            }
#if HELD >= 0 && HELD < GATES
            if (o.update.hold && !next[c].first)
                next[c].held = widen(gates[gate + (HELD - step_stride * GATES) * HIDDEN]);
#elif HELD >= 0
            if (o.update.hold && !next[c].first) next[c].held = o.slot[HELD - GATES][old];
#endif
        }
        EACH_ROW cut_next[c] = cut_fetched[c], cut_fetched[c] = CUT_AT(t - 1, at[c] + offset - step_stride);
    };
    auto store = [&](int t, int offset) { /* the results of step t, during the next product */
        EACH_ROW if (ALIVE(t)) {
            int gate = (at[c] + offset) * (GATES * HIDDEN) + m.unit;
            EACH_GATE {
                ((narrow *)l.dgx)[gate + q * HIDDEN] = narrowed(dx[c][q]);
                if (APART) ((narrow *)l.dsh)[gate + q * HIDDEN] = narrowed(out[c][q]);
            }
        }
    };
    EACH_ROW {
        const bool exists = m.in && m.row[c] < l.batch;
        owed[c] = 0.0f;
        EACH_STATE d[c][k] = exists ? o.dstate[k][(i64)m.row[c] * HIDDEN + m.unit] : 0.0f, dreset[c][k] = 0.0f;
        EACH_PARAMETER dparameter[c][k] = 0.0f;
        at[c] = (int)row_index(l, m.longest - 1, m.row[c], m.length[c]);
        cut_fetched[c] = CUT_AT(m.longest - 1, at[c]);
    }
    L2Prefetch ahead = l2_prefetch_of(l, m, 0, gates, GATES * HIDDEN * sizeof(narrow));
    if (m.warp / ROWS == 1) ahead = l2_prefetch_of(l, m, 1, l.dy, HIDDEN * sizeof(narrow));
#pragma unroll
    for (int k = 1; k < STATES; k++)
        if (m.warp / ROWS == 1 + k) ahead = l2_prefetch_of(l, m, 1 + k, o.states[k], HIDDEN * sizeof(float));
    MaskPipeline pipeline = {};
    if (any_drawn(o)) {
        EACH_ROW pipeline.next[c] = draw_bits(l, o, m, noises, thresholds, c, 0);
    }
    if (m.longest) fetch(m.longest - 1, 0);

    /* Add the gradient that the product passes to step t; the last step receives none. */
    auto receive = [&](int t, int done, int phase) {
        __syncthreads();
        Sums sums = {};
#if RECURRENT
        product(sums, w, entering[phase & 1], m.lane);
#endif
        /* Before the sums are complete: masks, inputs of the next step, and stores. */
        if (phase == 0) {
            EACH_ROW pipeline.now[c] = pipeline.next[c];
        }
        advance_draw(pipeline, l, o, m, noises, thresholds, done, phase);
        EarlyLoad cut_above[ROWS_PER_THREAD]; /* a reset before step t + 1 */
        EACH_ROW cut_above[c] = cut[c], cut[c] = cut_next[c], f[c] = next[c];
        if (t > 0) fetch(t - 1, -step_stride);
        if (done) store(t + 1, step_stride);
        prefetch_l2(ahead, t - PREFETCH_STEPS);
        EACH_ROW if (ALIVE(t + 1)) {
            float rec = RECURRENT ? total(sums, 0, c, upper_half(m.lane)) : 0.0f;
            d[c][0] += scale ? rec * widen(scale[(i64)m.row[c] * HIDDEN + m.unit]) : rec;
            if (HAS_RESETS && done && cut_above[c].bits) EACH_STATE dreset[c][k] += d[c][k], d[c][k] = 0.0f;
        }
    };

    EACH_STEP(done, phase) {
        const int t = m.longest - 1 - done;
        receive(t, done, phase);
        Unit units[ROWS_PER_THREAD];
        auto begin = [&](int c) {
            Unit &u = units[c];
            u = constant;
            EACH_GATE u.gate[q] = widen(f[c].gates[q]);
            EACH_SLOT u.slot[k] = f[c].slot[k];
            EACH_STATE u.old[k] = f[c].old[k], u.dstate[k] = d[c][k] + f[c].dseen[k];
            u.dy = widen(f[c].dy), u.held = f[c].first ? 0.0f : f[c].held, u.owed = owed[c];
            set_masks(u, o, masks_from_bits(o, pipeline.now[c], noises, m.unit, phase), f[c].first);
        };
#if PRODUCTS
        EACH_ROW if (ALIVE(t)) {
            begin(c);
#pragma unroll
            for (int i = 0; i < ALL_PARTS; i++) units[c].inner[i] = f[c].inner[i];
            step_inputs(units[c]);
            EACH_PRODUCT o.ins[k][(i64)at[c] * HIDDEN + m.unit] = narrowed(units[c].in[k]);
        }
        EACH_LEVEL {
            const int below = LEVELS - 1 - level; /* the highest level is first */
            EACH_ROW if (ALIVE(t)) {
                step_leave(units[c], below);
                PRODUCTS_OF(below) EACH_PART {
                    const int number = product_first(k) + q;
                    const float v = units[c].dinner[number];
                    o.dinner[k][((i64)at[c] * product_parts(k) + q) * HIDDEN + m.unit] = narrowed(v);
                    put(operand(products, number), local_row(m.lane, c), m.unit, v);
                }
            }
            __syncthreads();
            PRODUCTS_OF(below) {
                PartSums sums = {};
                EACH_PART {
                    const int number = product_first(k) + q;
                    add_part(sums, products, number, operand(products, number), m.lane);
                }
                EACH_ROW units[c].din[k] = part_total(sums, c, upper_half(m.lane));
            }
        }
#endif
        EACH_ROW {
            if (ALIVE(t)) {
                if (!PRODUCTS) begin(c);
                Unit &u = units[c];
                step_backward(u);
                owed[c] = u.owed;
                EACH_STATE d[c][k] = u.dstate[k];
                EACH_PARAMETER dparameter[c][k] += u.dparameter[k];
                EACH_GATE dx[c][q] = u.dx[q], out[c][q % VALUES_PER_UNIT] = APART ? u.dr[q] : u.dx[q];
                if (RECURRENT) enter(entering[(phase + 1) & 1], local_row(m.lane, c), m.unit, out[c]);
            }
            at[c] -= step_stride;
        }
    }
    if (m.longest) receive(-1, m.longest, m.longest & 3);
    EACH_ROW if (m.in && m.row[c] < l.batch) {
        const i64 at = (i64)m.row[c] * HIDDEN + m.unit;
        EACH_STATE {
            o.dstate[k][at] = d[c][k];
            if (l.resets) o.dreset[k][at] = dreset[c][k];
        }
        EACH_PARAMETER o.dparameter[k][at] = dparameter[c][k];
    }
}
#endif
