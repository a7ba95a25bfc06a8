/* LSTM, GRU and RNN: all steps in one launch, with the product of block.cuh; norms too. */

/* Steps in the loop's body: what is done every fourth step is then known, and nothing has to be moved along. */
constexpr int at_once = KNOWN && (NC == 1 || !NORM) ? 4 : 1;

/* --- noise ------------------------------------------------------------------------------------------ */

/* Four units and four steps are drawn at a time: one word for each unit comes from one draw, and of four lanes with
 * neighbouring units each draws for another step. */
struct Kept {
    u32 states, update; /* bits [step][unit][cell, hidden] and [step][unit][update, none] */
};
struct Chances { /* of a thread's unit */
    float cell, hidden, update;
};
struct Seeds {
    u64 cell, hidden, update;
    bool same; /* one word serves cell and hidden state */
};

/* Every second bit: whether a unit keeps its old value. A draw that does not see the unit is that of the first. */
__device__ __forceinline__ u32 below(const u32 (&w)[4], const Stream &s, const u32 *limits) {
    uint4 limit = *(const uint4 *)limits;
    int low = s.high ? 16 : 0;
    u32 v[4];
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = (s.sees_unit ? w[i] : w[0]) >> low & 0xFFFF;
    return (u32)(v[0] < limit.x) | (u32)(v[1] < limit.y) << 2 | (u32)(v[2] < limit.z) << 4 | (u32)(v[3] < limit.w) << 6;
}

__device__ __forceinline__ u32 gather(u32 own, int which) {
    own <<= 8 * which;
    own |= __shfl_xor_sync(~0u, own, 4);
    return own | __shfl_xor_sync(~0u, own, 8);
}

/* The bits of four steps from the n-th on; all lanes of a warp must come here. */
__device__ __forceinline__ Kept draw(const Loop &l, const Mine &m, const Seeds &seeds, const u32 (*limits)[WARPS * 16], int c,
                                     int n) {
    Kept k = {0, 0};
    u32 step = step_of(l, step_at(m, n + WHICH), m.length[c]), w[4];
    if (l.cell.mode == DRAWN) {
        begin_words(w, l.cell, FOUR, m.example[c], step);
        rounds<10>(w, seeds.cell, 0);
        k.states = below(w, l.cell, limits[0] + FOUR * 4);
    }
    if (l.hidden_state.mode == DRAWN) {
        if (!seeds.same) {
            begin_words(w, l.hidden_state, FOUR, m.example[c], step);
            rounds<10>(w, seeds.hidden, 0);
        }
        k.states |= below(w, l.hidden_state, limits[1] + FOUR * 4) << 1;
    }
    k.states = gather(k.states, WHICH);
    if (l.update.mode == DRAWN) {
        begin_words(w, l.update, FOUR, m.example[c], step);
        rounds<10>(w, seeds.update, 0);
        k.update = gather(below(w, l.update, limits[2] + FOUR * 4), WHICH);
    }
    return k;
}

/* What is drawn ahead: with nothing but zoneout the ten rounds are spread over the four steps before. */
struct Drawn {
    Kept now[NC], next[NC];
    u32 w[NC][4];
};

__device__ __forceinline__ bool draws(const Loop &l) {
    return l.cell.mode == DRAWN || l.hidden_state.mode == DRAWN || l.update.mode == DRAWN;
}

__device__ __forceinline__ void draw_ahead(Drawn &d, const Loop &l, const Mine &m, const Seeds &seeds,
                                           const u32 (*limits)[WARPS * 16], int n) {
    if (!draws(l)) return;
    int phase = n & 3;
#if KNOWN
    const Stream &s = l.cell.mode == DRAWN ? l.cell : l.hidden_state;
    u64 seed = l.cell.mode == DRAWN ? seeds.cell : seeds.hidden;
    EACH_ROW {
        if (phase == 0) {
            u32 step = step_of(l, step_at(m, n + 4 + WHICH), m.length[c]);
            begin_words(d.w[c], s, FOUR, m.example[c], step);
        }
        if (phase < 2) {
            rounds<3>(d.w[c], seed, phase * 3);
        } else {
            rounds<2>(d.w[c], seed, phase * 2 + 2);
        }
        if (phase == 3) {
            u32 bits = l.cell.mode == DRAWN ? below(d.w[c], l.cell, limits[0] + FOUR * 4) : 0;
            if (l.hidden_state.mode == DRAWN) bits |= below(d.w[c], l.hidden_state, limits[1] + FOUR * 4) << 1;
            d.next[c].states = gather(bits, WHICH);
        }
    }
#else
    if (phase == 3) {
        EACH_ROW d.next[c] = draw(l, m, seeds, limits, c, n + 1);
    }
#endif
}

__device__ __forceinline__ Keep keep_at(const Loop &l, const Kept &k, const Chances &chances, int unit, int n) {
    int at = (n & 3) * 8 + unit % 4 * 2;
    return {l.cell.mode == EXPECTED ? chances.cell : k.states >> at & 1 ? 1.0f : 0.0f,
            l.hidden_state.mode == EXPECTED ? chances.hidden : k.states >> (at + 1) & 1 ? 1.0f : 0.0f,
            l.update.mode == EXPECTED ? chances.update : k.update >> at & 1 ? 1.0f : 0.0f};
}

/* The new value or the old: with bits a choice and no more. */
__device__ __forceinline__ float choose(const Stream &s, float value, float old, float keep) {
    return s.mode == DRAWN ? (keep > 0.0f ? old : value) : mix(value, old, keep);
}

/* Chances of a thread's unit, and the limits of all units in shared memory. */
__device__ __forceinline__ Chances chances_of(const Loop &l, const Mine &m, Seeds &seeds, u32 (*limits)[WARPS * 16]) {
    Noises n = {};
    if (m.in) n = noises_of(l, m.unit);
    if (m.lane % 2 == 0) {
        limits[0][m.unit] = n.cell.threshold;
        limits[1][m.unit] = n.hidden.threshold;
        limits[2][m.unit] = n.update.threshold;
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
#define GIVEN (NORM == 2)
#define PAIRS(K) (NORM == 1 ? NC : (K)) /* moments that a thread has: of each row, or of each number of its unit */
#define PAIR (NORM == 1 ? c : q)
#define EACH_PAIR(K) _Pragma("unroll") for (int p = 0; p < PAIRS(K); p++)
#define EACH_OF(K) _Pragma("unroll") for (int q = 0; q < (K); q++)
/* Numbers in shared memory for the sums of h·Wh and of c. Where only one of them is taken a step, two sets take turns. */
#define SUMS (R * WARPS * 2)
#define SETS (LSTM ? 1 : 2)

__device__ __forceinline__ float inverse(float var, double eps) { return rsqrtf(var + (float)eps); }

__device__ __forceinline__ float *parts_of_norm() {
    extern __shared__ __align__(16) uint4 rest[];
    return (float *)(rest + WARPS * (KS - KR) * TILES * 32);
}

/* Where the moments of a step lie. */
template <int K>
__device__ __forceinline__ int moment_at(const Mine &m, int t, int row, int q) {
    return NORM == 1 ? row : (t * K + q) * HIDDEN + m.unit;
}

/* The sums over all units of a row; all threads must come here. */
__device__ __forceinline__ void sum_up(float (&one)[NC], float (&two)[NC], float *parts, const Mine &m) {
    float2 *part = (float2 *)parts; /* [R][WARPS] */
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

/* Mean and variance; what `mean` was the step before is taken off first, so that little is lost. */
template <int K>
__device__ __forceinline__ void moments(float (&mean)[NC], float (&var)[NC], const float (&v)[NC][K], const bool (&alive)[NC],
                                        float *parts, const Mine &m) {
    const float share = 1.0f / (K * HIDDEN);
    float one[NC] = {}, two[NC] = {};
    EACH_ROW EACH_OF(K) if (alive[c]) {
        float d = v[c][q] - mean[c];
        one[c] += d, two[c] += d * d;
    }
    sum_up(one, two, parts, m);
    EACH_ROW {
        float d = one[c] * share;
        var[c] = fmaxf(two[c] * share - d * d, 0.0f);
        mean[c] += d;
    }
}

/* From the derivatives of what was normalised and scaled, times the scale, to those of what it was before. */
template <int K>
__device__ __forceinline__ void moments_back(float (&d)[NC][K], const float (&hat)[NC][K], const float (&var)[PAIRS(K)],
                                             const bool (&alive)[NC], float *parts, double eps, const Mine &m) {
    const float share = 1.0f / (K * HIDDEN);
    float one[NC] = {}, two[NC] = {};
    if (!GIVEN) {
        EACH_ROW EACH_OF(K) if (alive[c]) one[c] += d[c][q], two[c] += d[c][q] * hat[c][q];
        sum_up(one, two, parts, m);
    }
    EACH_ROW EACH_OF(K) d[c][q] = inverse(var[PAIR], eps) * (d[c][q] - one[c] * share - hat[c][q] * (two[c] * share));
}
#endif

/* --- forwards --------------------------------------------------------------------------------------- */
#if !BACK
extern "C" __global__ void __launch_bounds__(THREADS, 1) forward(const Loop given, const Norm n) {
    __shared__ __align__(16) u32 entering[2][R * PITCH];
    __shared__ __align__(16) u32 limits[3][WARPS * 16];
    Loop l = given;
    simplify(l);
    Mine m = mine(l);
    narrow *gates = (narrow *)l.gates;
    const narrow *scale = (const narrow *)l.scale_h;
    Weights w;
    load_weights(l, w, m.warp, m.lane);
    Seeds seeds;
    Chances chances = chances_of(l, m, seeds, limits);
    float bias_x[G] = {}, bias_h[G] = {}; /* with a norm x's part comes with its bias */
    EACH_GATE {
        if (m.in && l.b_x && !NORM) bias_x[q] = widen(((const narrow *)l.b_x)[q * HIDDEN + m.unit]);
        if (m.in && l.b_h) bias_h[q] = widen(((const narrow *)l.b_h)[q * HIDDEN + m.unit]);
    }
#if NORM
    float *parts_h = parts_of_norm(), *parts_c = parts_h + SETS * SUMS;
    float scale_h[G] = {}, scale_c = 0.0f, shift_c = 0.0f;
    float mean_h[PAIRS(G)] = {}, var_h[PAIRS(G)], mean_c[PAIRS(1)] = {}, var_c[PAIRS(1)];
    EACH_GATE if (m.in) scale_h[q] = n.scale_h[q * HIDDEN + m.unit];
    if (LSTM && m.in) scale_c = n.scale_c[m.unit], shift_c = n.shift_c[m.unit];
#endif
    for (int i = threadIdx.x; i < 2 * R * PITCH; i += THREADS) ((u32 *)entering)[i] = 0;
    __syncthreads();

    float h[NC], state[NC], o[NC];
    float a[NC][G], gh[NC];
    Late pre[NC][G], later[NC][G]; /* x's part of this step and of the next */
    bool cut[NC]; /* off from the step before */
    Late soon[NC]; /* whether the next step will be */
    int at[NC]; /* row of this step; at · G · H stays below 2³¹ */
    const int forth = l.reverse ? -(int)l.batch : (int)l.batch;
    EACH_ROW {
        h[c] = state[c] = o[c] = 0.0f, cut[c] = false;
        at[c] = (int)at_of(l, 0, m.row[c], m.length[c]);
        soon[c] = CUT(1, at[c] + forth);
        if (ALIVE(0)) {
            i64 start = (i64)m.row[c] * HIDDEN + m.unit;
            cut[c] = cut_at(l, 0, m.row[c], m.length[c]);
            h[c] = start_h(l, cut[c], start);
            if (LSTM) state[c] = start_c(l, cut[c], start);
            float out = scale ? h[c] * widen(scale[start]) : h[c];
            enter(entering[0], local_row(m.lane, c), m.unit, &out);
        }
    }
    auto fetch = [&](int t, int further) {
        EACH_ROW if (ALIVE(t)) {
            int gate = (at[c] + further) * (G * HIDDEN) + m.unit;
            EACH_GATE later[c][q] = late(gates + gate + q * HIDDEN);
        }
    };
    auto store = [&](int t, int further) { /* the results of step t, while the next product is under way */
        EACH_ROW if (ALIVE(t)) {
            int unit = (at[c] + further) * HIDDEN + m.unit, gate = (at[c] + further) * (G * HIDDEN) + m.unit;
            ((narrow *)l.y)[unit] = narrowed(h[c]);
            if (LSTM) l.c[unit] = state[c];
            if (GRU && !NORM) l.gh[unit] = gh[c];
            EACH_GATE gates[gate + q * HIDDEN] = narrowed(a[c][q]);
        }
    };
    const Brings ahead = brings(l, m, 0, gates, G * HIDDEN * sizeof(narrow));
    Drawn drawn = {};
    if (draws(l)) {
        EACH_ROW drawn.next[c] = draw(l, m, seeds, limits, c, 0);
    }
    fetch(0, 0);

#pragma unroll at_once
    for (int t = 0; t < m.longest; t++) {
        __syncthreads();
        Sums sums = {};
        product(sums, w, entering[t & 1], m.lane);
        /* Until the sums are there: masks, x's part and stores. */
        if ((t & 3) == 0) {
            EACH_ROW drawn.now[c] = drawn.next[c];
        }
        draw_ahead(drawn, l, m, seeds, limits, t);
        EACH_ROW EACH_GATE pre[c][q] = later[c][q];
        if (t + 1 < m.longest) fetch(t + 1, forth);
        if (t) store(t - 1, -forth);
        bring(ahead, t + AHEAD);
        Late later_still[NC]; /* read now, since memory takes longer than what is left of a step */
        EACH_ROW later_still[c] = CUT(t + 2, at[c] + 2 * forth);
        float v[NC][G];
        EACH_ROW EACH_GATE v[c][q] = total(sums, q, c, upper(m.lane)) + (NORM ? 0.0f : GRU ? bias_h[q] : bias_x[q]);

#if NORM
        bool alive[NC];
        EACH_ROW alive[c] = ALIVE(t);
        const bool writes = !GIVEN && m.in && m.unit == 0;
#if GIVEN
        EACH_PAIR(G) {
            int from = moment_at<G>(m, t, 0, p);
            mean_h[p] = m.in ? n.mean_h[from] : 0.0f, var_h[p] = m.in ? n.var_h[from] : 0.0f;
        }
#else
        moments<G>(mean_h, var_h, v, alive, parts_h + t % SETS * SUMS, m);
#endif
        EACH_ROW EACH_GATE {
            float hat = (v[c][q] - mean_h[PAIR]) * inverse(var_h[PAIR], n.eps);
            v[c][q] = hat * scale_h[q] + bias_h[q];
            if (alive[c]) l.gh[(at[c] * G + q) * HIDDEN + m.unit] = hat;
            if (writes && alive[c] && q == 0) n.mean_h[at[c]] = mean_h[PAIR], n.var_h[at[c]] = var_h[PAIR];
        }
#endif
        float shows[NC][1];
        Keep keep[NC];
        EACH_ROW {
            i64 start = (i64)m.row[c] * HIDDEN + m.unit;
            keep[c] = keep_at(l, drawn.now[c], chances, m.unit, t);
            if (cut[c]) {
                h[c] = start_h(l, true, start);
                if (LSTM) state[c] = start_c(l, true, start);
            }
#if LSTM
            EACH_GATE {
                a[c][q] = widen(pre[c][q]) + v[c][q];
                a[c][q] = q == 2 ? tanh_at(a[c][q]) : sigmoid_at(a[c][q]);
            }
            shows[c][0] = lstm_candidate(l, a[c][0], a[c][1], a[c][2], state[c], keep[c]);
            state[c] = KNOWN && l.cell.mode ? choose(l.cell, shows[c][0], state[c], keep[c].cell)
                                           : carried_c(l, shows[c][0], state[c], keep[c]);
#endif
        }
#if NORM && LSTM
#if GIVEN
        int from = moment_at<1>(m, t, 0, 0);
        mean_c[0] = m.in ? n.mean_c[from] : 0.0f, var_c[0] = m.in ? n.var_c[from] : 0.0f;
#else
        moments<1>(mean_c, var_c, shows, alive, parts_c, m);
#endif
        EACH_ROW EACH_OF(1) {
            shows[c][0] = (shows[c][0] - mean_c[PAIR]) * inverse(var_c[PAIR], n.eps) * scale_c + shift_c;
            if (writes && alive[c]) n.mean_c[at[c]] = mean_c[PAIR], n.var_c[at[c]] = var_c[PAIR];
        }
#endif
        EACH_ROW {
#if LSTM
            float gate = a[c][3];
            if (l.update.mode && l.update.hold && t && !cut[c]) gate = mix(gate, o[c], keep[c].update);
            o[c] = a[c][3];
            float candidate = gate * tanh_at(shows[c][0]);
#elif GRU
            float reset = sigmoid_at(widen(pre[c][0]) + bias_x[0] + v[c][0]);
            float z = sigmoid_at(widen(pre[c][1]) + bias_x[1] + v[c][1]);
            float new_h = tanh_at(fmaf(reset, v[c][2], widen(pre[c][2]) + bias_x[2])), update = (1 - z) * new_h;
            a[c][0] = reset, a[c][1] = z, a[c][2] = new_h, gh[c] = v[c][2];
            if (l.update.mode) update = less(update, keep[c].update);
            float candidate = fmaf(z, h[c], update);
#else
            a[c][0] = widen(pre[c][0]) + v[c][0];
            a[c][0] = RELU ? fmaxf(a[c][0], 0.0f) : tanh_at(a[c][0]);
            float candidate = a[c][0];
#endif
            h[c] = KNOWN && l.hidden_state.mode ? choose(l.hidden_state, candidate, h[c], keep[c].hidden)
                                                : carried_h(l, candidate, h[c], keep[c]);
            if (ALIVE(t)) {
                i64 start = (i64)m.row[c] * HIDDEN + m.unit;
                float out = h[c];
                cut[c] = HAS_RESETS && soon[c].bits, soon[c] = later_still[c];
                if (cut[c]) out = start_h(l, true, start);
                if (scale) out *= widen(scale[start]);
                enter(entering[(t + 1) & 1], local_row(m.lane, c), m.unit, &out);
            }
            at[c] += forth;
        }
    }
    if (m.longest) store(m.longest - 1, -forth);
}
#endif

/* --- backwards -------------------------------------------------------------------------------------- */
#if BACK
struct Fetched { /* what a step needs that was there before */
    Late gates[G], dy, held;
    float old_c, old_h, dcells, gh[NORM ? G : 1];
    bool first;
};
#if NORM
struct Moments {
    float var_h[PAIRS(G)], mean_c[PAIRS(1)], var_c[PAIRS(1)];
};
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward(const Loop given, const Norm n) {
    __shared__ __align__(16) u32 entering[2][R * PITCH];
    __shared__ __align__(16) u32 limits[3][WARPS * 16];
    Loop l = given;
    simplify(l);
    Mine m = mine(l);
    const narrow *gates = (const narrow *)l.gates, *scale = (const narrow *)l.scale_h;
    const bool holds = l.update.mode && l.update.hold;
    Weights w;
    load_weights(l, w, m.warp, m.lane);
    Seeds seeds;
    Chances chances = chances_of(l, m, seeds, limits);
#if NORM
    float *parts_h = parts_of_norm(), *parts_c = parts_h + SETS * SUMS;
    float scale_h[G] = {}, scale_c = 0.0f, shift_c = 0.0f, bias = 0.0f;
    Moments of_step = {}, of_later = {};
    EACH_GATE if (m.in) scale_h[q] = n.scale_h[q * HIDDEN + m.unit];
    if (LSTM && m.in) scale_c = n.scale_c[m.unit], shift_c = n.shift_c[m.unit];
    if (GRU && m.in && l.b_h) bias = widen(((const narrow *)l.b_h)[2 * HIDDEN + m.unit]);
#endif
    for (int i = threadIdx.x; i < 2 * R * PITCH; i += THREADS) ((u32 *)entering)[i] = 0;
    __syncthreads();

    float dh[NC], dc[NC], back_h[NC], back_c[NC], owed[NC];
    float d[NC][4] = {}, e[NC][4] = {}, out[NC][4] = {}; /* of x's part, of h·Wh with norm and bias, and of h·Wh */
    Fetched f[NC], later[NC]; /* of this step and of the next one back */
    Late cut[NC] = {}, later_cut[NC] = {}, coming[NC]; /* whether they are cut off, and the next that is fetched */
    int at[NC]; /* row of this step; at · G · H stays below 2³¹ */
    const int forth = l.reverse ? -(int)l.batch : (int)l.batch;
    auto fetch = [&](int t, int further) {
        EACH_ROW if (ALIVE(t)) {
            int row = at[c] + further, unit = row * HIDDEN + m.unit, gate = row * (G * HIDDEN) + m.unit;
            int old = unit - forth * HIDDEN;
            i64 start = (i64)m.row[c] * HIDDEN + m.unit;
            /* Without resets never; asked all the same, since then a GRU in TF32 keeps 24 bytes more in registers. */
            const bool cut = HAS_RESETS ? coming[c].bits : cut_at(l, t, m.row[c], m.length[c]);
            later[c].first = t == 0 || cut;
            EACH_GATE later[c].gates[q] = late(gates + gate + q * HIDDEN);
            later[c].dy = late((const narrow *)l.dy + unit);
            if (LSTM) {
                later[c].old_c = *(later[c].first ? (cut ? l.reset_c : l.c0) + start : l.c + old);
                later[c].dcells = l.dcells ? l.dcells[unit] : 0.0f;
                if (holds && !later[c].first) later[c].held = late(gates + gate + (G - 1) * HIDDEN - forth * (G * HIDDEN));
            }
            if (GRU) {
                later[c].old_h = later[c].first ? start_h(l, cut, start) : widen(((const narrow *)l.y)[old]);
                if (!NORM) later[c].gh[0] = l.gh[unit];
            }
#if NORM
            EACH_GATE {
                later[c].gh[q] = l.gh[gate + q * HIDDEN];
                of_later.var_h[PAIR] = n.var_h[moment_at<G>(m, t, row, q)];
            }
            EACH_OF(1) if (LSTM) {
                int from = moment_at<1>(m, t, row, q);
                of_later.mean_c[PAIR] = n.mean_c[from], of_later.var_c[PAIR] = n.var_c[from];
            }
#endif
        }
        EACH_ROW later_cut[c] = coming[c], coming[c] = CUT(t - 1, at[c] + further - forth);
    };
    auto store = [&](int t, int further) { /* the results of step t, while the next product is under way */
        EACH_ROW if (ALIVE(t)) {
            int gate = (at[c] + further) * (G * HIDDEN) + m.unit;
            EACH_GATE {
                ((narrow *)l.dgx)[gate + q * HIDDEN] = narrowed(d[c][q]);
                if (GRU) ((narrow *)l.dsh)[gate + q * HIDDEN] = narrowed(e[c][q]);
                if (NORM) ((narrow *)n.dgh)[gate + q * HIDDEN] = narrowed(out[c][q]);
            }
        }
    };
    EACH_ROW {
        dh[c] = dc[c] = back_h[c] = back_c[c] = owed[c] = 0.0f;
        at[c] = (int)at_of(l, m.longest - 1, m.row[c], m.length[c]);
        coming[c] = CUT(m.longest - 1, at[c]);
        if (m.in && m.row[c] < l.batch) {
            dh[c] = l.dh[(i64)m.row[c] * HIDDEN + m.unit];
            if (LSTM) dc[c] = l.dc[(i64)m.row[c] * HIDDEN + m.unit];
        }
    }

    Brings ahead = brings(l, m, 0, gates, G * HIDDEN * sizeof(narrow));
    if (m.warp / R == 1) ahead = brings(l, m, 1, l.dy, HIDDEN * sizeof(narrow));
    if (LSTM && m.warp / R == 2) ahead = brings(l, m, 2, l.c, HIDDEN * sizeof(float));
    if (GRU && m.warp / R == 2) ahead = brings(l, m, 2, l.y, HIDDEN * sizeof(narrow));
    if ((NORM || GRU) && m.warp / R == 3) ahead = brings(l, m, 3, l.gh, (NORM ? G : 1) * HIDDEN * sizeof(float));
    Drawn drawn = {};
    if (draws(l)) {
        EACH_ROW drawn.next[c] = draw(l, m, seeds, limits, c, 0);
    }
    if (m.longest) fetch(m.longest - 1, 0);

    /* What has come back through the product to step t: to the last step nothing. */
    auto receive = [&](int t, int done) {
        __syncthreads();
        Sums sums = {};
        product(sums, w, entering[done & 1], m.lane);
        /* Until the sums are there: masks, what the next step needs, and stores. */
        if ((done & 3) == 0) {
            EACH_ROW drawn.now[c] = drawn.next[c];
        }
        draw_ahead(drawn, l, m, seeds, limits, done);
        Late above[NC]; /* whether step t + 1 is cut off */
        EACH_ROW above[c] = cut[c], cut[c] = later_cut[c], f[c] = later[c];
#if NORM
        of_step = of_later;
#endif
        if (t > 0) fetch(t - 1, -forth);
        if (done) store(t + 1, forth);
        bring(ahead, t - AHEAD);
        EACH_ROW if (ALIVE(t + 1)) {
            float rec = total(sums, 0, c, upper(m.lane));
            dh[c] += scale ? rec * widen(scale[(i64)m.row[c] * HIDDEN + m.unit]) : rec;
            if (HAS_RESETS && done && above[c].bits)
                back_h[c] += dh[c], back_c[c] += dc[c], dh[c] = dc[c] = 0.0f;
        }
    };

#pragma unroll at_once
    for (int done = 0; done < m.longest; done++) {
        const int t = m.longest - 1 - done;
        receive(t, done);
        float of_c[NC][1], du[NC];
        Keep keep[NC];
        bool alive[NC];
        EACH_ROW {
            alive[c] = ALIVE(t);
            keep[c] = keep_at(l, drawn.now[c], chances, m.unit, done);
            of_c[c][0] = du[c] = 0.0f;
            if (alive[c]) {
                dh[c] += widen(f[c].dy);
                du[c] = carried_h_back(l, dh[c], keep[c]);
            }
        }
#if LSTM
#if NORM
        float hat[NC][1] = {};
#endif
        EACH_ROW if (alive[c]) {
            float go = widen(f[c].gates[3]), gate = go;
            float shows = lstm_candidate(l, widen(f[c].gates[0]), widen(f[c].gates[1]), widen(f[c].gates[2]), f[c].old_c,
                                         keep[c]);
#if NORM
            EACH_OF(1) hat[c][0] = (shows - of_step.mean_c[PAIR]) * inverse(of_step.var_c[PAIR], n.eps);
            shows = hat[c][0] * scale_c + shift_c;
#endif
            float tc = tanh_at(shows);
            if (holds && !f[c].first) gate = mix(go, widen(f[c].held), keep[c].update);
            d[c][3] = lstm_output_back(l, du[c] * tc, go, f[c].first, owed[c], keep[c]);
            of_c[c][0] = du[c] * gate * (1 - tc * tc);
        }
#if NORM
        EACH_ROW {
            if (alive[c]) {
                int unit = at[c] * HIDDEN + m.unit;
                n.dnc[unit] = of_c[c][0], n.chat[unit] = hat[c][0];
            }
            of_c[c][0] *= scale_c;
        }
        moments_back<1>(of_c, hat, of_step.var_c, alive, parts_c, n.eps, m);
#endif
        EACH_ROW if (alive[c]) {
            dc[c] += f[c].dcells;
            lstm_gates_back(l, d[c], widen(f[c].gates[0]), widen(f[c].gates[1]), widen(f[c].gates[2]), f[c].old_c, of_c[c][0],
                            dc[c], keep[c]);
        }
#elif GRU
        EACH_ROW if (alive[c]) {
#if NORM
            float v = f[c].gh[2] * scale_h[2] + bias;
#else
            float v = f[c].gh[0];
#endif
            gru_back(l, d[c], e[c], widen(f[c].gates[0]), widen(f[c].gates[1]), widen(f[c].gates[2]), v, f[c].old_h, du[c],
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
            float of_h[NC][G], hat_h[NC][G];
            EACH_ROW EACH_GATE of_h[c][q] = out[c][q] * scale_h[q], hat_h[c][q] = f[c].gh[q];
            moments_back<G>(of_h, hat_h, of_step.var_h, alive, parts_h + t % SETS * SUMS, n.eps, m);
            EACH_ROW EACH_GATE out[c][q] = of_h[c][q];
        }
#endif
        EACH_ROW {
            if (alive[c]) enter(entering[(done + 1) & 1], local_row(m.lane, c), m.unit, out[c]);
            at[c] -= forth;
        }
    }
    if (m.longest) receive(-1, m.longest);
    EACH_ROW if (m.in && m.row[c] < l.batch) {
        i64 at = (i64)m.row[c] * HIDDEN + m.unit;
        l.dh[at] = dh[c];
        if (LSTM) l.dc[at] = dc[c];
        if (l.resets) {
            l.dreset_h[at] = back_h[c];
            if (LSTM) l.dreset_c[at] = back_c[c];
        }
    }
}
#endif
