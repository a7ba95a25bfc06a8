/* Any cell: all steps in one launch, with the product of block.cuh and the generated step. */

/* Steps in the loop's body: what is done every fourth step is then known. */
constexpr int at_once = KNOWN_STREAMS && NC == 1 ? 4 : 1;

/* `n` counts the steps that are worked on; masks are drawn for four at a time, of which a step is the phase-th. */
#define EACH_STEP(n, phase)                                                  \
    for (int begun_ = 0; begun_ < m.longest; begun_ += at_once)              \
        _Pragma("unroll") for (int part_ = 0; part_ < at_once; part_++)      \
            if (const int n = begun_ + part_, phase = at_once == 4 ? part_ : n & 3; n < m.longest)

/* --- noise ------------------------------------------------------------------------------------------ */

struct Bits { /* of each stream: [step][unit], four of each */
    u32 of[STATES + 1];
};

typedef u32 Limits[STATES + 1][WARPS * 16]; /* thresholds of all units, in shared memory */

__device__ __forceinline__ void put_limits(Limits &limits, const Mine &m, const Streams &n) {
    EACH_STREAM if (m.lane % 2 == 0) limits[k][m.unit] = n.noise[k].threshold;
}

/* A stream's bits of four steps, from the words of one of them; all lanes of a warp must come here. */
__device__ __forceinline__ u32 bits_of_four(const u32 (&w)[4], const Stream &s, const u32 *limits, const Mine &m) {
    u32 own = 0;
#pragma unroll
    for (int i = 0; i < 4; i++)
        own |= (u32)(((s.sees_unit ? w[i] : w[0]) >> (s.high ? 16 : 0) & 0xFFFF) < limits[FOUR * 4 + i]) << i;
    own <<= 4 * WHICH;
    own |= __shfl_xor_sync(~0u, own, 4);
    return own | __shfl_xor_sync(~0u, own, 8);
}

/* The bits of four steps from the n-th on; all lanes of a warp must come here. */
__device__ __forceinline__ Bits draw_bits(const Loop &l, const Own &o, const Mine &m, const Streams &noises, const Limits &limits,
                                          int c, int n) {
    Bits bits = {};
    u32 step = step_of(l, step_at(m, n + WHICH), m.length[c]), w[4] = {};
    int drawn = -1; /* the stream of `w` */
    EACH_STREAM {
        const Stream &s = stream_of(o, k);
        if (s.mode != DRAWN) continue;
        if (!(k && drawn == k - 1 && shares_word(o, noises, k)))
            philox(w, noises.noise[k].seed, s.sees_unit ? FOUR : 0, s.sees_example ? m.example[c] : 0, s.sees_step ? step : 0,
                   s.plane);
        drawn = k;
        bits.of[k] = bits_of_four(w, s, limits[k], m);
    }
    return bits;
}

__device__ __forceinline__ bool draws(const Own &o) {
    bool any = false;
    EACH_STREAM any = any || stream_of(o, k).mode == DRAWN;
    return any;
}

/* Masks, drawn ahead. Where one draw serves all streams, its ten rounds are spread over the four steps before. */
struct Drawn {
    Bits now[NC], next[NC];
    u32 w[NC][4];
};

__device__ __forceinline__ constexpr bool one_draw() { /* at most states 0 and 1 are drawn, from the same words */
#if KNOWN_STREAMS
    return (STREAM2 & 3) != DRAWN && (STREAM3 & 3) != DRAWN &&
           ((STREAM0 & 3) != DRAWN || (STREAM1 & 3) != DRAWN || STREAM1 & 8);
#else
    return false;
#endif
}

/* `n`: the step that is worked on. */
__device__ __forceinline__ void draw_ahead(Drawn &d, const Loop &l, const Own &o, const Mine &m, const Streams &noises,
                                           const Limits &limits, int n, int phase) {
    if (!draws(o)) return;
    if (!one_draw()) {
        if (phase == 3) {
            EACH_ROW d.next[c] = draw_bits(l, o, m, noises, limits, c, n + 1);
        }
        return;
    }
    const int k = o.state[0].mode == DRAWN ? 0 : 1;
    EACH_ROW {
        if (phase == 0) begin_words(d.w[c], o.state[k], FOUR, m.example[c], step_of(l, step_at(m, n + 4 + WHICH), m.length[c]));
        if (phase < 2)
            rounds<3>(d.w[c], noises.noise[k].seed, phase * 3);
        else
            rounds<2>(d.w[c], noises.noise[k].seed, phase * 2 + 2);
        if (phase == 3) EACH_STATE {
            const Stream &s = o.state[k];
            if (s.mode == DRAWN) d.next[c].of[k] = bits_of_four(d.w[c], s, limits[k], m);
        }
    }
}

__device__ __forceinline__ Kept kept_of(const Own &o, const Bits &bits, const Streams &n, int unit, int phase) {
    Kept kept = {};
    EACH_STREAM {
        const Stream &s = stream_of(o, k);
        bool keeps = bits.of[k] >> (phase * 4 + unit % 4) & 1;
        kept.of[k] = s.mode == EXPECTED ? n.noise[k].rate : s.mode == DRAWN && keeps ? 1.0f : 0.0f;
    }
    return kept;
}

/* --- forward ---------------------------------------------------------------------------------------- */
#if !BACK
extern "C" __global__ void __launch_bounds__(THREADS, 1) forward(const Loop given, const Own given_own) {
    __shared__ __align__(16) u32 entering[2][R * PITCH];
    __shared__ __align__(16) Limits limits;
    Loop l = given;
    Own o = given_own;
    simplify(l), simplify(o);
    Mine m = mine(l);
    narrow *gates = (narrow *)l.gates;
    const narrow *scale = (const narrow *)l.scale_h;
    Weights w;
    load_weights(l, w, m.warp, m.lane);
    const int own = m.in ? m.unit : 0;
    const Streams noises = streams_of(o, own);
    const Unit constant = unit_of(l, o, own);
    put_limits(limits, m, noises);
    for (int i = threadIdx.x; i < 2 * R * PITCH; i += THREADS) ((u32 *)entering)[i] = 0;
    __syncthreads();

    float state[NC][STATES], stored[NC][G + SLOTS] = {}, held[NC];
    Late pre[NC][G], later[NC][G]; /* x's part of this step and of the next */
    bool cut[NC];                  /* off from the step before */
    Late soon[NC];                 /* whether the next step will be */
    int at[NC];                    /* row of this step; at · G · H stays below 2³¹ */
    const int forth = l.reverse ? -(int)l.batch : (int)l.batch;
    EACH_ROW {
        held[c] = 0.0f, cut[c] = false;
        EACH_STATE state[c][k] = 0.0f;
        at[c] = (int)at_of(l, 0, m.row[c], m.length[c]);
        soon[c] = CUT(1, at[c] + forth);
        if (ALIVE(0)) {
            i64 start = (i64)m.row[c] * HIDDEN + m.unit;
            cut[c] = cut_at(l, 0, m.row[c], m.length[c]);
            EACH_STATE state[c][k] = start_at(l, o, k, cut[c], start);
            float out = scale ? state[c][0] * widen(scale[start]) : state[c][0];
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
            ((narrow *)l.y)[unit] = narrowed(state[c][0]);
            EACH_STATE if (k) o.states[k][unit] = state[c][k];
            EACH_SLOT o.slot[k][unit] = stored[c][G + k];
            EACH_GATE gates[gate + q * HIDDEN] = narrowed(stored[c][q]);
        }
    };
    const Brings ahead = brings(l, m, 0, gates, G * HIDDEN * sizeof(narrow));
    Drawn drawn = {};
    if (draws(o)) {
        EACH_ROW drawn.next[c] = draw_bits(l, o, m, noises, limits, c, 0);
    }
    fetch(0, 0);

    EACH_STEP(t, phase) {
        __syncthreads();
        Sums sums = {};
        product(sums, w, entering[phase & 1], m.lane);
        /* Until the sums are there: masks, x's part and stores. */
        if (phase == 0) {
            EACH_ROW drawn.now[c] = drawn.next[c];
        }
        draw_ahead(drawn, l, o, m, noises, limits, t, phase);
        EACH_ROW EACH_GATE pre[c][q] = later[c][q];
        if (t + 1 < m.longest) fetch(t + 1, forth);
        if (t) store(t - 1, -forth);
        bring(ahead, t + AHEAD);
        Late later_still[NC]; /* read now, since memory takes longer than what is left of a step */
        EACH_ROW later_still[c] = CUT(t + 2, at[c] + 2 * forth);
        EACH_ROW {
            i64 start = (i64)m.row[c] * HIDDEN + m.unit;
            Unit u = constant;
            EACH_GATE {
                float v = total(sums, q, c, upper(m.lane));
                u.gate[q] = widen(pre[c][q]) + (APART ? 0.0f : v);
                u.r[q] = v;
            }
            EACH_STATE u.old[k] = cut[c] ? start_at(l, o, k, true, start) : state[c][k];
            u.held = held[c];
            put_kept(u, o, kept_of(o, drawn.now[c], noises, m.unit, phase), t == 0 || cut[c]);
            step_forward(u);
            EACH_STATE state[c][k] = u.made[k];
            EACH_GATE stored[c][q] = u.gate[q];
            EACH_SLOT stored[c][G + k] = u.slot[k];
            if (HELD >= 0) held[c] = stored[c][HELD < 0 ? 0 : HELD];
            if (ALIVE(t)) {
                float out = state[c][0];
                cut[c] = HAS_RESETS && soon[c].bits, soon[c] = later_still[c];
                if (cut[c]) out = start_h(l, true, start);
                if (scale) out *= widen(scale[start]);
                enter(entering[(phase + 1) & 1], local_row(m.lane, c), m.unit, &out);
            }
            at[c] += forth;
        }
    }
    if (m.longest) store(m.longest - 1, -forth);
}
#endif

/* --- backward --------------------------------------------------------------------------------------- */
#if BACK
struct Fetched { /* what a step needs that was there before */
    Late gates[G], dy;
    float held, slot[SLOTS + 1], old[STATES], dseen[STATES];
    bool first;
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward(const Loop given, const Own given_own) {
    __shared__ __align__(16) u32 entering[2][R * PITCH];
    __shared__ __align__(16) Limits limits;
    Loop l = given;
    Own o = given_own;
    simplify(l), simplify(o);
    Mine m = mine(l);
    const narrow *gates = (const narrow *)l.gates, *scale = (const narrow *)l.scale_h;
    Weights w;
    load_weights(l, w, m.warp, m.lane);
    const int own = m.in ? m.unit : 0;
    const Streams noises = streams_of(o, own);
    const Unit constant = unit_of(l, o, own);
    put_limits(limits, m, noises);
    for (int i = threadIdx.x; i < 2 * R * PITCH; i += THREADS) ((u32 *)entering)[i] = 0;
    __syncthreads();

    float d[NC][STATES], of_reset[NC][STATES], owed[NC], of_parameter[NC][PARAMETERS + 1];
    float dx[NC][G] = {}, out[NC][GE] = {}; /* out: of h·Wh */
    Fetched f[NC], later[NC];               /* of this step and of the next one back */
    Late cut[NC] = {}, later_cut[NC] = {}, coming[NC]; /* whether they are cut off, and the next that is fetched */
    int at[NC];                             /* row of this step; at · G · H stays below 2³¹ */
    const int forth = l.reverse ? -(int)l.batch : (int)l.batch;
    auto fetch = [&](int t, int further) {
        EACH_ROW if (ALIVE(t)) {
            int row = at[c] + further, unit = row * HIDDEN + m.unit, gate = row * (G * HIDDEN) + m.unit;
            int old = unit - forth * HIDDEN;
            i64 start = (i64)m.row[c] * HIDDEN + m.unit;
            const bool is_cut = HAS_RESETS && coming[c].bits;
            later[c].first = t == 0 || is_cut;
            EACH_GATE later[c].gates[q] = late(gates + gate + q * HIDDEN);
            later[c].dy = late((const narrow *)l.dy + unit);
            EACH_SLOT later[c].slot[k] = o.slot[k][unit];
            EACH_STATE {
                if (later[c].first)
                    later[c].old[k] = start_at(l, o, k, is_cut, start);
                else
                    later[c].old[k] = k ? o.states[k][old] : widen(((const narrow *)l.y)[old]);
                later[c].dseen[k] = k && o.dseen[k] ? o.dseen[k][unit] : 0.0f;
            }
#if HELD >= 0 && HELD < GATES
            if (o.update.hold && !later[c].first) later[c].held = widen(gates[gate + (HELD - forth * G) * HIDDEN]);
#elif HELD >= 0
            if (o.update.hold && !later[c].first) later[c].held = o.slot[HELD - GATES][old];
#endif
        }
        EACH_ROW later_cut[c] = coming[c], coming[c] = CUT(t - 1, at[c] + further - forth);
    };
    auto store = [&](int t, int further) { /* the results of step t, while the next product is under way */
        EACH_ROW if (ALIVE(t)) {
            int gate = (at[c] + further) * (G * HIDDEN) + m.unit;
            EACH_GATE {
                ((narrow *)l.dgx)[gate + q * HIDDEN] = narrowed(dx[c][q]);
                if (APART) ((narrow *)l.dsh)[gate + q * HIDDEN] = narrowed(out[c][q]);
            }
        }
    };
    EACH_ROW {
        const bool there = m.in && m.row[c] < l.batch;
        owed[c] = 0.0f;
        EACH_STATE d[c][k] = there ? o.dstate[k][(i64)m.row[c] * HIDDEN + m.unit] : 0.0f, of_reset[c][k] = 0.0f;
        EACH_PARAMETER of_parameter[c][k] = 0.0f;
        at[c] = (int)at_of(l, m.longest - 1, m.row[c], m.length[c]);
        coming[c] = CUT(m.longest - 1, at[c]);
    }
    Brings ahead = brings(l, m, 0, gates, G * HIDDEN * sizeof(narrow));
    if (m.warp / R == 1) ahead = brings(l, m, 1, l.dy, HIDDEN * sizeof(narrow));
#pragma unroll
    for (int k = 1; k < STATES; k++)
        if (m.warp / R == 1 + k) ahead = brings(l, m, 1 + k, o.states[k], HIDDEN * sizeof(float));
    Drawn drawn = {};
    if (draws(o)) {
        EACH_ROW drawn.next[c] = draw_bits(l, o, m, noises, limits, c, 0);
    }
    if (m.longest) fetch(m.longest - 1, 0);

    /* What has come back through the product to step t: to the last step nothing. */
    auto receive = [&](int t, int done, int phase) {
        __syncthreads();
        Sums sums = {};
        product(sums, w, entering[phase & 1], m.lane);
        /* Until the sums are there: masks, what the next step needs, and stores. */
        if (phase == 0) {
            EACH_ROW drawn.now[c] = drawn.next[c];
        }
        draw_ahead(drawn, l, o, m, noises, limits, done, phase);
        Late above[NC]; /* whether step t + 1 is cut off */
        EACH_ROW above[c] = cut[c], cut[c] = later_cut[c], f[c] = later[c];
        if (t > 0) fetch(t - 1, -forth);
        if (done) store(t + 1, forth);
        bring(ahead, t - AHEAD);
        EACH_ROW if (ALIVE(t + 1)) {
            float rec = total(sums, 0, c, upper(m.lane));
            d[c][0] += scale ? rec * widen(scale[(i64)m.row[c] * HIDDEN + m.unit]) : rec;
            if (HAS_RESETS && done && above[c].bits) EACH_STATE of_reset[c][k] += d[c][k], d[c][k] = 0.0f;
        }
    };

    EACH_STEP(done, phase) {
        const int t = m.longest - 1 - done;
        receive(t, done, phase);
        EACH_ROW {
            if (ALIVE(t)) {
                Unit u = constant;
                EACH_GATE u.gate[q] = widen(f[c].gates[q]);
                EACH_SLOT u.slot[k] = f[c].slot[k];
                EACH_STATE u.old[k] = f[c].old[k], u.dstate[k] = d[c][k] + f[c].dseen[k];
                u.dy = widen(f[c].dy), u.held = f[c].first ? 0.0f : f[c].held, u.owed = owed[c];
                put_kept(u, o, kept_of(o, drawn.now[c], noises, m.unit, phase), f[c].first);
                step_backward(u);
                owed[c] = u.owed;
                EACH_STATE d[c][k] = u.dstate[k];
                EACH_PARAMETER of_parameter[c][k] += u.dparameter[k];
                EACH_GATE dx[c][q] = u.dx[q], out[c][q % GE] = APART ? u.dr[q] : u.dx[q];
                enter(entering[(phase + 1) & 1], local_row(m.lane, c), m.unit, out[c]);
            }
            at[c] -= forth;
        }
    }
    if (m.longest) receive(-1, m.longest, m.longest & 3);
    EACH_ROW if (m.in && m.row[c] < l.batch) {
        const i64 at = (i64)m.row[c] * HIDDEN + m.unit;
        EACH_STATE {
            o.dstate[k][at] = d[c][k];
            if (l.resets) o.dreset[k][at] = of_reset[c][k];
        }
        EACH_PARAMETER o.dparameter[k][at] = of_parameter[c][k];
    }
}
#endif
