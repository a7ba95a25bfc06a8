/* Any cell in which no unit sees another: one thread has a unit of a row, over all steps.
 *
 * Nothing is exchanged, so a step waits only for its own loads. These are issued AHEAD steps early, into registers. Masks that
 * see step and unit are drawn four steps at a time: the four threads of a draw take one step each and exchange words.
 *
 * A block has THREADS units of one row. Compiled with V = 1, and BACK: the pass.
 */

__device__ __forceinline__ float late_wide(const float *from) {
    u32 out;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(out) : "l"(from));
    return __uint_as_float(out);
}

struct Here { /* a thread's place */
    i64 row, j, length, own; /* own: of arrays [B, H] */
    u32 example;
    bool in;
};

__device__ __forceinline__ Here here_of(const Loop &l) {
    const u32 across = ((u32)l.hidden + THREADS - 1) / THREADS, row = blockIdx.x / across;
    Here h;
    h.row = row;
    h.j = (i64)(blockIdx.x - row * across) * THREADS + threadIdx.x;
    h.in = h.j < l.hidden;
    h.length = length_of(l, row);
    h.own = row * l.hidden + h.j;
    h.example = (u32)l.examples[row];
    return h;
}

/* --- masks ---------------------------------------------------------------------------------------- */

struct Words4 {
    u32 at[STATES + 1][4]; /* of each stream, at four steps */
};

__device__ __forceinline__ void exchange(u32 &a, u32 &b, bool high, int far) {
    u32 got = __shfl_xor_sync(~0u, high ? a : b, far);
    if (high)
        a = got;
    else
        b = got;
}

/* The words of this unit at the steps t, t + way, t + 2·way and t + 3·way. All threads of a warp call it. */
__device__ __forceinline__ void draw_four(u32 *w, const Loop &l, const Stream &s, u64 seed, const Here &h, i64 t, int way) {
    if (s.sees_unit && s.sees_step) {
        const int lane = threadIdx.x & 3;
        philox(w, seed, (u32)h.j >> 2, s.sees_example ? h.example : 0, step_of(l, t + way * lane, h.length), s.plane);
        /* Thread s has the words of four units at step s; it wants its own unit's at four steps. */
        exchange(w[0], w[1], lane & 1, 1), exchange(w[2], w[3], lane & 1, 1);
        exchange(w[0], w[2], lane & 2, 2), exchange(w[1], w[3], lane & 2, 2);
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++)
            w[i] = i && !s.sees_step ? w[0] : word_of(s, seed, (u32)h.j, h.example, step_of(l, t + way * i, h.length));
    }
}

__device__ __forceinline__ void draw_all(Words4 &w, const Loop &l, const Own &o, const Streams &n, const Here &h, i64 t,
                                         int way) {
    int drawn = -1; /* the stream that was drawn last */
    EACH_STREAM {
        const Stream &s = stream_of(o, k);
        if (s.mode != DRAWN) continue;
        if (k && drawn == k - 1 && same_words(stream_of(o, k - 1), n.noise[k ? k - 1 : 0], s, n.noise[k])) {
#pragma unroll
            for (int i = 0; i < 4; i++) w.at[k][i] = w.at[k - 1][i];
        } else {
            draw_four(w.at[k], l, s, n.noise[k].seed, h, t, way);
        }
        drawn = k;
    }
}

__device__ __forceinline__ void masks_of(Unit &u, const Own &o, const Streams &n, const Words4 &w, int i, bool first) {
    Kept kept = {};
    EACH_STREAM if (stream_of(o, k).mode != OFF) kept.of[k] = keep_of(stream_of(o, k), n.noise[k], w.at[k][i]);
    put_kept(u, o, kept, first);
}

/* --- forward -------------------------------------------------------------------------------------- */

#define RING _Pragma("unroll") for (int i = 0; i < AHEAD; i++)

#if !BACK
extern "C" __global__ void __launch_bounds__(THREADS) forward(Loop l, Own o) {
    simplify(l), simplify(o);
    const Here h = here_of(l);
    const i64 H = l.hidden;
    const i64 own = h.in ? h.j : 0;
    const Streams n = streams_of(o, own);
    Unit u = unit_of(l, o, own);
    Late ring[AHEAD][GATES];
    float state[STATES] = {}, held = 0.0f;
    const narrow *from = (const narrow *)l.gates + h.j;
    if (h.in) {
        state[0] = widen(((const narrow *)l.h0)[h.own]);
#pragma unroll
        for (int k = 1; k < STATES; k++) state[k] = o.initial[k][h.own];
        RING if (i < h.length)
            EACH_GATE ring[i][q] = late(from + (at_of(l, i, h.row, h.length) * GATES + q) * H);
    }
    Words4 words;
    for (i64 start = 0; start < h.length; start += AHEAD) {
        RING {
            const i64 t = start + i;
            if (t >= h.length) break;
            if (i % 4 == 0) draw_all(words, l, o, n, h, t, 1);
            if (!h.in) continue;
            const i64 at = at_of(l, t, h.row, h.length), here = at * H + h.j;
            const bool cut = cut_at(l, t, h.row, h.length), first = cut || t == 0;
            if (cut) {
                state[0] = widen(((const narrow *)l.reset_h)[h.own]);
#pragma unroll
                for (int k = 1; k < STATES; k++) state[k] = o.reset[k][h.own];
            }
            EACH_STATE u.old[k] = state[k];
            u.held = held;
            masks_of(u, o, n, words, i % 4, first);
            narrow *gates = (narrow *)l.gates + at * GATES * H + h.j;
            EACH_GATE {
                u.gate[q] = widen(ring[i][q]);
                if (t + AHEAD < h.length)
                    ring[i][q] = late(from + (at_of(l, t + AHEAD, h.row, h.length) * GATES + q) * H);
            }
            step_forward(u);
            EACH_GATE gates[q * H] = narrowed(u.gate[q]);
            EACH_SLOT o.slot[k][here] = u.slot[k];
            ((narrow *)l.y)[here] = narrowed(u.made[0]);
            EACH_STATE {
                if (k) o.states[k][here] = u.made[k];
                state[k] = u.made[k];
            }
#if HELD >= 0
            held = HELD < GATES ? u.gate[HELD < GATES ? HELD : 0] : u.slot[HELD < GATES ? 0 : HELD - GATES];
#endif
        }
    }
}

#else
/* --- backward ------------------------------------------------------------------------------------- */

struct Loads { /* of one step */
    Late gate[GATES], dy;
    float slot[SLOTS + 1], old[STATES], dseen[STATES];
};

__device__ __forceinline__ void load_step(Loads &to, const Loop &l, const Own &o, const Here &h, i64 t) {
    const i64 H = l.hidden, at = at_of(l, t, h.row, h.length), here = at * H + h.j;
    const i64 before = at_of(l, t - 1, h.row, h.length) * H + h.j;
    EACH_GATE to.gate[q] = late((const narrow *)l.gates + (at * GATES + q) * H + h.j);
    to.dy = late((const narrow *)l.dy + here);
    EACH_SLOT to.slot[k] = late_wide(o.slot[k] + here);
    to.old[0] = widen(late(t ? (const narrow *)l.y + before : (const narrow *)l.h0 + h.own));
#pragma unroll
    for (int k = 1; k < STATES; k++) {
        to.old[k] = late_wide(t ? o.states[k] + before : o.initial[k] + h.own);
        to.dseen[k] = o.dseen[k] ? late_wide(o.dseen[k] + here) : 0.0f;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) backward(Loop l, Own o) {
    simplify(l), simplify(o);
    const Here h = here_of(l);
    const i64 H = l.hidden;
    const i64 own = h.in ? h.j : 0;
    const Streams n = streams_of(o, own);
    Unit u = unit_of(l, o, own);
    Loads ring[AHEAD];
    if (h.in) {
        EACH_STATE u.dstate[k] = o.dstate[k][h.own];
        RING if (i < h.length) load_step(ring[i], l, o, h, h.length - 1 - i);
    }
    Words4 words;
    for (i64 start = 0; start < h.length; start += AHEAD) {
        RING {
            const i64 t = h.length - 1 - start - i;
            if (t < 0) break;
            if (i % 4 == 0) draw_all(words, l, o, n, h, t, -1);
            if (!h.in) continue;
            const i64 at = at_of(l, t, h.row, h.length);
            const bool cut = cut_at(l, t, h.row, h.length), first = cut || t == 0;
            Loads &now = ring[i];
            EACH_GATE u.gate[q] = widen(now.gate[q]);
            EACH_SLOT u.slot[k] = now.slot[k];
            EACH_STATE {
                u.old[k] = now.old[k];
                if (k) u.dstate[k] += now.dseen[k];
            }
            u.dy = widen(now.dy);
            if (cut) {
                u.old[0] = widen(((const narrow *)l.reset_h)[h.own]);
#pragma unroll
                for (int k = 1; k < STATES; k++) u.old[k] = o.reset[k][h.own];
            }
#if HELD >= 0
            if (!first) u.held = held_at(l, o, at_of(l, t - 1, h.row, h.length), h.j)[0];
#endif
            masks_of(u, o, n, words, i % 4, first);
            if (t >= AHEAD) load_step(ring[i], l, o, h, t - AHEAD);
            step_backward(u);
            narrow *dgx = (narrow *)l.dgx + at * GATES * H + h.j;
            EACH_GATE dgx[q * H] = narrowed(u.dx[q]);
            if (cut) {
                EACH_STATE {
                    o.dreset[k][h.own] += u.dstate[k];
                    u.dstate[k] = 0.0f;
                }
            }
        }
    }
    if (!h.in) return;
    EACH_STATE o.dstate[k][h.own] = u.dstate[k];
    EACH_PARAMETER o.dparameter[k][h.own] = u.dparameter[k];
}
#endif
