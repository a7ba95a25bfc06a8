/* LSTM, GRU and RNN: all steps in one launch, with the product of block.cuh and optional norms. */

/* Steps in the body of the loop: what happens every fourth step is then known at compile time, and no values are
 * moved. */
constexpr int unrolled_steps = KNOWN_MODES && (ROWS_PER_THREAD == 1 || !NORM) ? 4 : 1;

/* --- noise ------------------------------------------------------------------------------------------ */

/* Masks of four units and four steps are drawn at once: a draw has one word for each unit, and of the four lanes
 * with these units each draws for another step. */
struct MaskBits {
    u32 states, update; /* bits [step][unit][cell, hidden] and [step][unit][update, none] */
};
struct Rates { /* of a thread's unit */
    float cell, hidden, update;
};
struct Seeds {
    u64 cell, hidden, update;
    bool same; /* one word serves both states */
};

/* Every second bit: 1 if a unit keeps its old value. If the mask does not see the unit, all units use the first
 * word. */
__device__ __forceinline__ u32 compare_words(const u32 (&w)[4], const Stream &s, const u32 *thresholds) {
    uint4 limit = *(const uint4 *)thresholds;
    int low = s.high ? 16 : 0;
    u32 v[4];
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = (s.sees_unit ? w[i] : w[0]) >> low & 0xFFFF;
    return (u32)(v[0] < limit.x) | (u32)(v[1] < limit.y) << 2 | (u32)(v[2] < limit.z) << 4 | (u32)(v[3] < limit.w) << 6;
}

__device__ __forceinline__ u32 gather_steps(u32 bits, int which) {
    bits <<= 8 * which;
    bits |= __shfl_xor_sync(~0u, bits, 4);
    return bits | __shfl_xor_sync(~0u, bits, 8);
}

/* Draw the masks of four steps from the n-th on. All lanes of a warp must call this. */
__device__ __forceinline__ MaskBits draw_masks(const Loop &l, const Thread &m, const Seeds &seeds,
                                               const u32 (*thresholds)[WARPS * 16], int c, int n) {
    MaskBits k = {0, 0};
    u32 step = mask_step(l, nth_step(m, n + QUAD_STEP), m.length[c]), w[4];
    if (l.cell.mode == DRAWN) {
        begin_draw(w, l.cell, UNIT_QUAD, m.example[c], step);
        draw_rounds<10>(w, seeds.cell, 0);
        k.states = compare_words(w, l.cell, thresholds[0] + UNIT_QUAD * 4);
    }
    if (l.hidden_state.mode == DRAWN) {
        if (!seeds.same) {
            begin_draw(w, l.hidden_state, UNIT_QUAD, m.example[c], step);
            draw_rounds<10>(w, seeds.hidden, 0);
        }
        k.states |= compare_words(w, l.hidden_state, thresholds[1] + UNIT_QUAD * 4) << 1;
    }
    k.states = gather_steps(k.states, QUAD_STEP);
    if (l.update.mode == DRAWN) {
        begin_draw(w, l.update, UNIT_QUAD, m.example[c], step);
        draw_rounds<10>(w, seeds.update, 0);
        k.update = gather_steps(compare_words(w, l.update, thresholds[2] + UNIT_QUAD * 4), QUAD_STEP);
    }
    return k;
}

/* Masks that are drawn in advance. With zoneout only, the ten rounds are spread over the four steps before. */
struct MaskPipeline {
    MaskBits now[ROWS_PER_THREAD], next[ROWS_PER_THREAD];
    u32 w[ROWS_PER_THREAD][4];
};

__device__ __forceinline__ bool any_drawn(const Loop &l) {
    return l.cell.mode == DRAWN || l.hidden_state.mode == DRAWN || l.update.mode == DRAWN;
}

__device__ __forceinline__ void advance_draw(MaskPipeline &d, const Loop &l, const Thread &m, const Seeds &seeds,
                                           const u32 (*thresholds)[WARPS * 16], int n) {
    if (!any_drawn(l)) return;
    int phase = n & 3;
#if KNOWN_MODES
    const Stream &s = l.cell.mode == DRAWN ? l.cell : l.hidden_state;
    u64 seed = l.cell.mode == DRAWN ? seeds.cell : seeds.hidden;
    EACH_ROW {
        if (phase == 0) {
            u32 step = mask_step(l, nth_step(m, n + 4 + QUAD_STEP), m.length[c]);
            begin_draw(d.w[c], s, UNIT_QUAD, m.example[c], step);
        }
        if (phase < 2) {
            draw_rounds<3>(d.w[c], seed, phase * 3);
        } else {
            draw_rounds<2>(d.w[c], seed, phase * 2 + 2);
        }
        if (phase == 3) {
            u32 bits = l.cell.mode == DRAWN ? compare_words(d.w[c], l.cell, thresholds[0] + UNIT_QUAD * 4) : 0;
            if (l.hidden_state.mode == DRAWN)
                bits |= compare_words(d.w[c], l.hidden_state, thresholds[1] + UNIT_QUAD * 4) << 1;
            d.next[c].states = gather_steps(bits, QUAD_STEP);
        }
    }
#else
    if (phase == 3) {
        EACH_ROW d.next[c] = draw_masks(l, m, seeds, thresholds, c, n + 1);
    }
#endif
}

__device__ __forceinline__ Keep keep_at(const Loop &l, const MaskBits &k, const Rates &rates, int unit, int n) {
    int at = (n & 3) * 8 + unit % 4 * 2;
    return {l.cell.mode == EXPECTED ? rates.cell : k.states >> at & 1 ? 1.0f : 0.0f,
            l.hidden_state.mode == EXPECTED ? rates.hidden : k.states >> (at + 1) & 1 ? 1.0f : 0.0f,
            l.update.mode == EXPECTED ? rates.update : k.update >> at & 1 ? 1.0f : 0.0f};
}

/* The new value or the old one: for drawn masks a selection without arithmetic. */
__device__ __forceinline__ float select(const Stream &s, float value, float old, float keep) {
    return s.mode == DRAWN ? (keep > 0.0f ? old : value) : mix(value, old, keep);
}

/* Return the rates of a thread's unit, and write the thresholds of all units to shared memory. */
__device__ __forceinline__ Rates rates_of(const Loop &l, const Thread &m, Seeds &seeds, u32 (*thresholds)[WARPS * 16]) {
    Noises n = {};
    if (m.in) n = noises_of(l, m.unit);
    if (m.lane % 2 == 0) {
        thresholds[0][m.unit] = n.cell.threshold;
        thresholds[1][m.unit] = n.hidden.threshold;
        thresholds[2][m.unit] = n.update.threshold;
    }
    seeds.cell = l.cell.mode == DRAWN ? (u64)*l.cell.seed : 0;
    seeds.hidden = l.hidden_state.mode == DRAWN ? (u64)*l.hidden_state.seed : 0;
    seeds.update = l.update.mode == DRAWN ? (u64)*l.update.seed : 0;
    Noise one = {0, 0.0f, seeds.cell}, two = {0, 0.0f, seeds.hidden};
    seeds.same = l.cell.mode == DRAWN && same_words(l.cell, one, l.hidden_state, two);
    return {n.cell.rate, n.hidden.rate, n.update.rate};
}

/* --- norms ------------------------------------------------------------------------------------------ */

#if NORM
#define MOMENTS_GIVEN (NORM == 2)
/* moments of a thread: of each row, or of each value of its unit */
#define MOMENTS(K) (NORM == 1 ? ROWS_PER_THREAD : (K))
#define MOMENT (NORM == 1 ? c : q)
#define EACH_MOMENT(K) _Pragma("unroll") for (int p = 0; p < MOMENTS(K); p++)
#define EACH_INDEX(K) _Pragma("unroll") for (int q = 0; q < (K); q++)
/* Floats in shared memory for the sums of h·Wh and of c. If a step computes only one of them, two buffers alternate. */
#define NORM_SUMS (ROWS * WARPS * 2)
#define NORM_BUFFERS (LSTM ? 1 : 2)

__device__ __forceinline__ float inverse(float var, double eps) { return rsqrtf(var + (float)eps); }

__device__ __forceinline__ float *norm_memory() {
    extern __shared__ __align__(16) uint4 rest[];
    return (float *)(rest + WARPS * (K_STEPS - RESIDENT_K_STEPS) * TILES * 32);
}

/* The index of the moments of a step. */
template <int K>
__device__ __forceinline__ int moment_at(const Thread &m, int t, int row, int q) {
    return NORM == 1 ? row : (t * K + q) * HIDDEN + m.unit;
}

/* Sum over all units of a row. All threads must call this. */
__device__ __forceinline__ void sum_over_units(float (&one)[ROWS_PER_THREAD], float (&two)[ROWS_PER_THREAD],
                                               float *memory, const Thread &m) {
    float2 *part = (float2 *)memory; /* [ROWS][WARPS] */
    EACH_ROW {
#pragma unroll
        for (int far = 2; far < 32; far *= 2) {
            one[c] += __shfl_xor_sync(~0u, one[c], far);
            two[c] += __shfl_xor_sync(~0u, two[c], far);
        }
        if (m.lane < 2) part[local_row(m.lane, c) * WARPS + m.warp] = make_float2(one[c], two[c]);
    }
    __syncthreads();
    EACH_ROW {
        one[c] = two[c] = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            float2 v = part[local_row(m.lane, c) * WARPS + w];
            one[c] += v.x, two[c] += v.y;
        }
    }
}

/* Mean and variance. The mean of the step before is subtracted first, for accuracy. */
template <int K>
__device__ __forceinline__ void moments(float (&mean)[ROWS_PER_THREAD], float (&var)[ROWS_PER_THREAD],
                                        const float (&v)[ROWS_PER_THREAD][K], const bool (&alive)[ROWS_PER_THREAD],
                                        float *memory, const Thread &m) {
    const float share = 1.0f / (K * HIDDEN);
    float one[ROWS_PER_THREAD] = {}, two[ROWS_PER_THREAD] = {};
    EACH_ROW EACH_INDEX(K) if (alive[c]) {
        float d = v[c][q] - mean[c];
        one[c] += d, two[c] += d * d;
    }
    sum_over_units(one, two, memory, m);
    EACH_ROW {
        float d = one[c] * share;
        var[c] = fmaxf(two[c] * share - d * d, 0.0f);
        mean[c] += d;
    }
}

/* The backward pass of a norm: from the gradient of the normalised values to that of the norm's input. */
template <int K>
__device__ __forceinline__ void moments_back(float (&d)[ROWS_PER_THREAD][K], const float (&hat)[ROWS_PER_THREAD][K],
                                             const float (&var)[MOMENTS(K)], const bool (&alive)[ROWS_PER_THREAD],
                                             float *memory, double eps, const Thread &m) {
    const float share = 1.0f / (K * HIDDEN);
    float one[ROWS_PER_THREAD] = {}, two[ROWS_PER_THREAD] = {};
    if (!MOMENTS_GIVEN) {
        EACH_ROW EACH_INDEX(K) if (alive[c]) one[c] += d[c][q], two[c] += d[c][q] * hat[c][q];
        sum_over_units(one, two, memory, m);
    }
    EACH_ROW EACH_INDEX(K) d[c][q] =
        inverse(var[MOMENT], eps) * (d[c][q] - one[c] * share - hat[c][q] * (two[c] * share));
}
#endif

/* --- forward pass --------------------------------------------------------------------------------------- */
#if !BACKWARD
extern "C" __global__ void __launch_bounds__(THREADS, 1) forward(const Loop given, const Norm n) {
    __shared__ __align__(16) u32 entering[2][ROWS * ROW_PITCH];
    __shared__ __align__(16) u32 thresholds[3][WARPS * 16];
    Loop l = given;
    simplify(l);
    Thread m = thread_of(l);
    narrow *gates = (narrow *)l.gates;
    const narrow *scale = (const narrow *)l.scale_h;
    Weights w;
    load_weights(l, w, m.warp, m.lane);
    Seeds seeds;
    Rates rates = rates_of(l, m, seeds, thresholds);
    float bias_x[GATES] = {}, bias_h[GATES] = {}; /* with a norm, x's part already contains its bias */
    EACH_GATE {
        if (m.in && l.b_x && !NORM) bias_x[q] = widen(((const narrow *)l.b_x)[q * HIDDEN + m.unit]);
        if (m.in && l.b_h) bias_h[q] = widen(((const narrow *)l.b_h)[q * HIDDEN + m.unit]);
    }

#if NORM
    float *sums_h = norm_memory(), *sums_c = sums_h + NORM_BUFFERS * NORM_SUMS;
    float scale_h[GATES] = {}, scale_c = 0.0f, shift_c = 0.0f;
    float mean_h[MOMENTS(GATES)] = {}, var_h[MOMENTS(GATES)], mean_c[MOMENTS(1)] = {}, var_c[MOMENTS(1)];
    EACH_GATE if (m.in) scale_h[q] = n.scale_h[q * HIDDEN + m.unit];
    if (LSTM && m.in) scale_c = n.scale_c[m.unit], shift_c = n.shift_c[m.unit];
#endif
    for (int i = threadIdx.x; i < 2 * ROWS * ROW_PITCH; i += THREADS) ((u32 *)entering)[i] = 0;
    __syncthreads();

    float h[ROWS_PER_THREAD], state[ROWS_PER_THREAD], o[ROWS_PER_THREAD];
    float a[ROWS_PER_THREAD][GATES], gh[ROWS_PER_THREAD];
    EarlyLoad x_part[ROWS_PER_THREAD][GATES], next[ROWS_PER_THREAD][GATES]; /* x's part of this step and of the next */
    bool cut[ROWS_PER_THREAD]; /* a reset lies between this step and the one before */
    EarlyLoad cut_next[ROWS_PER_THREAD]; /* the same for the next step */
    int at[ROWS_PER_THREAD]; /* row of this step; at · G · H stays below 2³¹ */
    const int step_stride = l.reverse ? -(int)l.batch : (int)l.batch;
    EACH_ROW {
        h[c] = state[c] = o[c] = 0.0f, cut[c] = false;
        at[c] = (int)row_index(l, 0, m.row[c], m.length[c]);
        cut_next[c] = CUT_AT(1, at[c] + step_stride);
        if (ALIVE(0)) {
            i64 start = (i64)m.row[c] * HIDDEN + m.unit;
            cut[c] = cut_at(l, 0, m.row[c], m.length[c]);
            h[c] = start_h(l, cut[c], start);
            if (LSTM) state[c] = start_c(l, cut[c], start);
            float out = scale ? h[c] * widen(scale[start]) : h[c];
            enter(entering[0], local_row(m.lane, c), m.unit, &out);
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
            ((narrow *)l.y)[unit] = narrowed(h[c]);
            if (LSTM) l.c[unit] = state[c];
            if (GRU && !NORM) l.gh[unit] = gh[c];
            EACH_GATE gates[gate + q * HIDDEN] = narrowed(a[c][q]);
        }
    };
    const L2Prefetch ahead = l2_prefetch_of(l, m, 0, gates, GATES * HIDDEN * sizeof(narrow));
    MaskPipeline pipeline = {};
    if (any_drawn(l)) {
        EACH_ROW pipeline.next[c] = draw_masks(l, m, seeds, thresholds, c, 0);
    }
    fetch(0, 0);

#pragma unroll unrolled_steps
    for (int t = 0; t < m.longest; t++) {
        __syncthreads();
        Sums sums = {};
        product(sums, w, entering[t & 1], m.lane);
        /* Before the sums are complete: masks, x's part and stores. */
        if ((t & 3) == 0) {
            EACH_ROW pipeline.now[c] = pipeline.next[c];
        }
        advance_draw(pipeline, l, m, seeds, thresholds, t);
        EACH_ROW EACH_GATE x_part[c][q] = next[c][q];
        if (t + 1 < m.longest) fetch(t + 1, step_stride);
        if (t) store(t - 1, -step_stride);
        prefetch_l2(ahead, t + PREFETCH_STEPS);
        EarlyLoad cut_after_next[ROWS_PER_THREAD]; /* loaded now, since a load takes longer than the rest of a step */
        EACH_ROW cut_after_next[c] = CUT_AT(t + 2, at[c] + 2 * step_stride);
        float v[ROWS_PER_THREAD][GATES];
        EACH_ROW EACH_GATE v[c][q] =
            total(sums, q, c, upper_half(m.lane)) + (NORM ? 0.0f : GRU ? bias_h[q] : bias_x[q]);

#if NORM
        bool alive[ROWS_PER_THREAD];
        EACH_ROW alive[c] = ALIVE(t);
        const bool writes = !MOMENTS_GIVEN && m.in && m.unit == 0;
#if MOMENTS_GIVEN
        EACH_MOMENT(GATES) {
            int from = moment_at<GATES>(m, t, 0, p);
            mean_h[p] = m.in ? n.mean_h[from] : 0.0f, var_h[p] = m.in ? n.var_h[from] : 0.0f;
        }
#else
        moments<GATES>(mean_h, var_h, v, alive, sums_h + t % NORM_BUFFERS * NORM_SUMS, m);
#endif
        EACH_ROW EACH_GATE {
            float hat = (v[c][q] - mean_h[MOMENT]) * inverse(var_h[MOMENT], n.eps);
            v[c][q] = hat * scale_h[q] + bias_h[q];
            if (alive[c]) l.gh[(at[c] * GATES + q) * HIDDEN + m.unit] = hat;
            if (writes && alive[c] && q == 0) n.mean_h[at[c]] = mean_h[MOMENT], n.var_h[at[c]] = var_h[MOMENT];
        }
#endif
        float shown[ROWS_PER_THREAD][1];
        Keep keep[ROWS_PER_THREAD];
        EACH_ROW {
            i64 start = (i64)m.row[c] * HIDDEN + m.unit;
            keep[c] = keep_at(l, pipeline.now[c], rates, m.unit, t);
            if (cut[c]) {
                h[c] = start_h(l, true, start);
                if (LSTM) state[c] = start_c(l, true, start);
            }
#if LSTM
            EACH_GATE {
                a[c][q] = widen(x_part[c][q]) + v[c][q];
                a[c][q] = q == 2 ? tanh_approx(a[c][q]) : sigmoid_approx(a[c][q]);
            }
            shown[c][0] = lstm_candidate(l, a[c][0], a[c][1], a[c][2], state[c], keep[c]);
            state[c] = KNOWN_MODES && l.cell.mode ? select(l.cell, shown[c][0], state[c], keep[c].cell)
                                           : carried_c(l, shown[c][0], state[c], keep[c]);
#endif
        }
#if NORM && LSTM
#if MOMENTS_GIVEN
        int from = moment_at<1>(m, t, 0, 0);
        mean_c[0] = m.in ? n.mean_c[from] : 0.0f, var_c[0] = m.in ? n.var_c[from] : 0.0f;
#else
        moments<1>(mean_c, var_c, shown, alive, sums_c, m);
#endif
        EACH_ROW EACH_INDEX(1) {
            shown[c][0] = (shown[c][0] - mean_c[MOMENT]) * inverse(var_c[MOMENT], n.eps) * scale_c + shift_c;
            if (writes && alive[c]) n.mean_c[at[c]] = mean_c[MOMENT], n.var_c[at[c]] = var_c[MOMENT];
        }
#endif
        EACH_ROW {
#if LSTM
            float gate = a[c][3];
            if (l.update.mode && l.update.hold && t && !cut[c]) gate = mix(gate, o[c], keep[c].update);
            o[c] = a[c][3];
            float candidate = gate * tanh_approx(shown[c][0]);
#elif GRU
            float reset = sigmoid_approx(widen(x_part[c][0]) + bias_x[0] + v[c][0]);
            float z = sigmoid_approx(widen(x_part[c][1]) + bias_x[1] + v[c][1]);
            float new_h = tanh_approx(fmaf(reset, v[c][2], widen(x_part[c][2]) + bias_x[2])), update = (1 - z) * new_h;
            a[c][0] = reset, a[c][1] = z, a[c][2] = new_h, gh[c] = v[c][2];
            if (l.update.mode) update = drop_out(update, keep[c].update);
            float candidate = fmaf(z, h[c], update);
#else
            a[c][0] = widen(x_part[c][0]) + v[c][0];
            a[c][0] = RELU ? fmaxf(a[c][0], 0.0f) : tanh_approx(a[c][0]);
            float candidate = a[c][0];
#endif
            h[c] = KNOWN_MODES && l.hidden_state.mode ? select(l.hidden_state, candidate, h[c], keep[c].hidden)
                                                : carried_h(l, candidate, h[c], keep[c]);
            if (ALIVE(t)) {
                i64 start = (i64)m.row[c] * HIDDEN + m.unit;
                float out = h[c];
                cut[c] = HAS_RESETS && cut_next[c].bits, cut_next[c] = cut_after_next[c];
                if (cut[c]) out = start_h(l, true, start);
                if (scale) out *= widen(scale[start]);
                enter(entering[(t + 1) & 1], local_row(m.lane, c), m.unit, &out);
            }
            at[c] += step_stride;
        }
    }
    if (m.longest) store(m.longest - 1, -step_stride);
}
#endif

/* --- backward pass -------------------------------------------------------------------------------------- */
#if BACKWARD
struct Fetched { /* inputs of a step, from memory */
    EarlyLoad gates[GATES], dy, held;
    float old_c, old_h, dcells, gh[NORM ? GATES : 1];
    bool first;
};

#if NORM
struct Moments {
    float var_h[MOMENTS(GATES)], mean_c[MOMENTS(1)], var_c[MOMENTS(1)];
};
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward(const Loop given, const Norm n) {
    __shared__ __align__(16) u32 entering[2][ROWS * ROW_PITCH];
    __shared__ __align__(16) u32 thresholds[3][WARPS * 16];
    Loop l = given;
    simplify(l);
    Thread m = thread_of(l);
    const narrow *gates = (const narrow *)l.gates, *scale = (const narrow *)l.scale_h;
    const bool holds_gate = l.update.mode && l.update.hold;
    Weights w;
    load_weights(l, w, m.warp, m.lane);
    Seeds seeds;
    Rates rates = rates_of(l, m, seeds, thresholds);

#if NORM
    float *sums_h = norm_memory(), *sums_c = sums_h + NORM_BUFFERS * NORM_SUMS;
    float scale_h[GATES] = {}, scale_c = 0.0f, shift_c = 0.0f, bias = 0.0f;
    Moments moments_now = {}, moments_next = {};
    EACH_GATE if (m.in) scale_h[q] = n.scale_h[q * HIDDEN + m.unit];
    if (LSTM && m.in) scale_c = n.scale_c[m.unit], shift_c = n.shift_c[m.unit];
    if (GRU && m.in && l.b_h) bias = widen(((const narrow *)l.b_h)[2 * HIDDEN + m.unit]);
#endif
    for (int i = threadIdx.x; i < 2 * ROWS * ROW_PITCH; i += THREADS) ((u32 *)entering)[i] = 0;
    __syncthreads();
    float dh[ROWS_PER_THREAD], dc[ROWS_PER_THREAD], dreset_h[ROWS_PER_THREAD], dreset_c[ROWS_PER_THREAD],
        owed[ROWS_PER_THREAD];
    /* gradients of x's part, of h·Wh after norm and bias, and of h·Wh */
    float d[ROWS_PER_THREAD][4] = {}, e[ROWS_PER_THREAD][4] = {}, out[ROWS_PER_THREAD][4] = {};
    Fetched f[ROWS_PER_THREAD], next[ROWS_PER_THREAD]; /* of this step and of the next one to be processed */
    /* a reset before these steps; cut_fetched: before the step to be fetched next */
    EarlyLoad cut[ROWS_PER_THREAD] = {}, cut_next[ROWS_PER_THREAD] = {}, cut_fetched[ROWS_PER_THREAD];
    int at[ROWS_PER_THREAD]; /* row of this step; at · G · H stays below 2³¹ */
    const int step_stride = l.reverse ? -(int)l.batch : (int)l.batch;
    auto fetch = [&](int t, int offset) {
        EACH_ROW if (ALIVE(t)) {
            int row = at[c] + offset, unit = row * HIDDEN + m.unit, gate = row * (GATES * HIDDEN) + m.unit;
            int old = unit - step_stride * HIDDEN;
            i64 start = (i64)m.row[c] * HIDDEN + m.unit;
            /* Without resets this is false. The test remains because a GRU in TF32 otherwise spills 24 bytes more. */
            const bool cut = HAS_RESETS ? cut_fetched[c].bits : cut_at(l, t, m.row[c], m.length[c]);
            next[c].first = t == 0 || cut;
            EACH_GATE next[c].gates[q] = load_early(gates + gate + q * HIDDEN);
            next[c].dy = load_early((const narrow *)l.dy + unit);
            if (LSTM) {
                next[c].old_c = *(next[c].first ? (cut ? l.reset_c : l.c0) + start : l.c + old);
                next[c].dcells = l.dcells ? l.dcells[unit] : 0.0f;
                if (holds_gate && !next[c].first)
                    next[c].held = load_early(gates + gate + (GATES - 1) * HIDDEN - step_stride * (GATES * HIDDEN));
            }
            if (GRU) {
                next[c].old_h = next[c].first ? start_h(l, cut, start) : widen(((const narrow *)l.y)[old]);
                if (!NORM) next[c].gh[0] = l.gh[unit];
            }

#if NORM
            EACH_GATE {
                next[c].gh[q] = l.gh[gate + q * HIDDEN];
                moments_next.var_h[MOMENT] = n.var_h[moment_at<GATES>(m, t, row, q)];
            }
            EACH_INDEX(1) if (LSTM) {
                int from = moment_at<1>(m, t, row, q);
                moments_next.mean_c[MOMENT] = n.mean_c[from], moments_next.var_c[MOMENT] = n.var_c[from];
            }
#endif
        }
        EACH_ROW cut_next[c] = cut_fetched[c], cut_fetched[c] = CUT_AT(t - 1, at[c] + offset - step_stride);
    };
    auto store = [&](int t, int offset) { /* the results of step t, during the next product */
        EACH_ROW if (ALIVE(t)) {
            int gate = (at[c] + offset) * (GATES * HIDDEN) + m.unit;
            EACH_GATE {
                ((narrow *)l.dgx)[gate + q * HIDDEN] = narrowed(d[c][q]);
                if (GRU) ((narrow *)l.dsh)[gate + q * HIDDEN] = narrowed(e[c][q]);
                if (NORM) ((narrow *)n.dgh)[gate + q * HIDDEN] = narrowed(out[c][q]);
            }
        }
    };
    EACH_ROW {
        dh[c] = dc[c] = dreset_h[c] = dreset_c[c] = owed[c] = 0.0f;
        at[c] = (int)row_index(l, m.longest - 1, m.row[c], m.length[c]);
        cut_fetched[c] = CUT_AT(m.longest - 1, at[c]);
        if (m.in && m.row[c] < l.batch) {
            dh[c] = l.dh[(i64)m.row[c] * HIDDEN + m.unit];
            if (LSTM) dc[c] = l.dc[(i64)m.row[c] * HIDDEN + m.unit];
        }
    }

    L2Prefetch ahead = l2_prefetch_of(l, m, 0, gates, GATES * HIDDEN * sizeof(narrow));
    if (m.warp / ROWS == 1) ahead = l2_prefetch_of(l, m, 1, l.dy, HIDDEN * sizeof(narrow));
    if (LSTM && m.warp / ROWS == 2) ahead = l2_prefetch_of(l, m, 2, l.c, HIDDEN * sizeof(float));
    if (GRU && m.warp / ROWS == 2) ahead = l2_prefetch_of(l, m, 2, l.y, HIDDEN * sizeof(narrow));
    if ((NORM || GRU) && m.warp / ROWS == 3)
        ahead = l2_prefetch_of(l, m, 3, l.gh, (NORM ? GATES : 1) * HIDDEN * sizeof(float));
    MaskPipeline pipeline = {};
    if (any_drawn(l)) {
        EACH_ROW pipeline.next[c] = draw_masks(l, m, seeds, thresholds, c, 0);
    }
    if (m.longest) fetch(m.longest - 1, 0);

    /* Add the gradient that the product passes to step t; the last step receives none. */
    auto receive = [&](int t, int done) {
        __syncthreads();
        Sums sums = {};
        product(sums, w, entering[done & 1], m.lane);
        /* Before the sums are complete: masks, inputs of the next step, and stores. */
        if ((done & 3) == 0) {
            EACH_ROW pipeline.now[c] = pipeline.next[c];
        }
        advance_draw(pipeline, l, m, seeds, thresholds, done);
        EarlyLoad cut_above[ROWS_PER_THREAD]; /* a reset before step t + 1 */
        EACH_ROW cut_above[c] = cut[c], cut[c] = cut_next[c], f[c] = next[c];

#if NORM
        moments_now = moments_next;
#endif
        if (t > 0) fetch(t - 1, -step_stride);
        if (done) store(t + 1, step_stride);
        prefetch_l2(ahead, t - PREFETCH_STEPS);
        EACH_ROW if (ALIVE(t + 1)) {
            float rec = total(sums, 0, c, upper_half(m.lane));
            dh[c] += scale ? rec * widen(scale[(i64)m.row[c] * HIDDEN + m.unit]) : rec;
            if (HAS_RESETS && done && cut_above[c].bits)
                dreset_h[c] += dh[c], dreset_c[c] += dc[c], dh[c] = dc[c] = 0.0f;
        }
    };

#pragma unroll unrolled_steps
    for (int done = 0; done < m.longest; done++) {
        const int t = m.longest - 1 - done;
        receive(t, done);
        float dcandidate[ROWS_PER_THREAD][1], du[ROWS_PER_THREAD];
        Keep keep[ROWS_PER_THREAD];
        bool alive[ROWS_PER_THREAD];
        EACH_ROW {
            alive[c] = ALIVE(t);
            keep[c] = keep_at(l, pipeline.now[c], rates, m.unit, done);
            dcandidate[c][0] = du[c] = 0.0f;
            if (alive[c]) {
                dh[c] += widen(f[c].dy);
                du[c] = carried_h_back(l, dh[c], keep[c]);
            }
        }
#if LSTM

#if NORM
        float hat[ROWS_PER_THREAD][1] = {};
#endif
        EACH_ROW if (alive[c]) {
            float go = widen(f[c].gates[3]), gate = go;
            float shown = lstm_candidate(l, widen(f[c].gates[0]), widen(f[c].gates[1]), widen(f[c].gates[2]),
                f[c].old_c,
                                         keep[c]);

#if NORM
            EACH_INDEX(1) hat[c][0] = (shown - moments_now.mean_c[MOMENT]) * inverse(moments_now.var_c[MOMENT], n.eps);
            shown = hat[c][0] * scale_c + shift_c;
#endif
            float tc = tanh_approx(shown);
            if (holds_gate && !f[c].first) gate = mix(go, widen(f[c].held), keep[c].update);
            d[c][3] = lstm_output_back(l, du[c] * tc, go, f[c].first, owed[c], keep[c]);
            dcandidate[c][0] = du[c] * gate * (1 - tc * tc);
        }

#if NORM
        EACH_ROW {
            if (alive[c]) {
                int unit = at[c] * HIDDEN + m.unit;
                n.dnc[unit] = dcandidate[c][0], n.chat[unit] = hat[c][0];
            }
            dcandidate[c][0] *= scale_c;
        }
        moments_back<1>(dcandidate, hat, moments_now.var_c, alive, sums_c, n.eps, m);
#endif
        EACH_ROW if (alive[c]) {
            dc[c] += f[c].dcells;
            lstm_gates_back(l, d[c], widen(f[c].gates[0]), widen(f[c].gates[1]), widen(f[c].gates[2]), f[c].old_c,
                dcandidate[c][0],
                            dc[c], keep[c]);
        }
#elif GRU
        EACH_ROW if (alive[c]) {

#if NORM
            float v = f[c].gh[2] * scale_h[2] + bias;
#else
            float v = f[c].gh[0];
#endif
            gru_back(l, d[c], e[c], widen(f[c].gates[0]), widen(f[c].gates[1]), widen(f[c].gates[2]), v, f[c].old_h,
                du[c],
                     dh[c], keep[c]);
        }
#else
        EACH_ROW if (alive[c]) {
            float v = widen(f[c].gates[0]);
            d[c][0] = RELU ? (v > 0 ? du[c] : 0.0f) : du[c] * (1 - v * v);
        }
#endif
        EACH_ROW EACH_GATE out[c][q] = GRU ? e[c][q] : d[c][q];

#if NORM
        {
            float dh_w[ROWS_PER_THREAD][GATES], hat_h[ROWS_PER_THREAD][GATES];
            EACH_ROW EACH_GATE dh_w[c][q] = out[c][q] * scale_h[q], hat_h[c][q] = f[c].gh[q];
            moments_back<GATES>(dh_w, hat_h, moments_now.var_h, alive, sums_h + t % NORM_BUFFERS * NORM_SUMS, n.eps, m);
            EACH_ROW EACH_GATE out[c][q] = dh_w[c][q];
        }
#endif
        EACH_ROW {
            if (alive[c]) enter(entering[(done + 1) & 1], local_row(m.lane, c), m.unit, out[c]);
            at[c] -= step_stride;
        }
    }
    if (m.longest) receive(-1, m.longest);
    EACH_ROW if (m.in && m.row[c] < l.batch) {
        i64 at = (i64)m.row[c] * HIDDEN + m.unit;
        l.dh[at] = dh[c];
        if (LSTM) l.dc[at] = dc[c];
        if (l.resets) {
            l.dreset_h[at] = dreset_h[c];
            if (LSTM) l.dreset_c[at] = dreset_c[c];
        }
    }
}
#endif
