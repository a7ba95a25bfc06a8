/* Any cell in which no unit sees another: one thread computes a unit of a row over all steps.
 *
 * Nothing is exchanged, so a step waits only for its own loads. Masks that see step and unit are drawn four steps
 * at a time: the four threads of a draw take one step each and exchange words. A block has THREADS units of one
 * row. Macros:
 *
 *   VECTOR    1
 *   BACKWARD  0: forward pass; 1: backward pass
 *   AHEAD     steps between a load into a register and its use, a multiple of 4
 *   FULL      1: the number of units is a multiple of THREADS
 */

__device__ __forceinline__ float load_early_float(const float *from) {
    u32 out;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(out) : "l"(from));
    return __uint_as_float(out);
}

struct Thread {        /* the position of a thread */
    i64 row, j, index; /* index: in arrays [B, H] */
    int length;
    u32 example, step_bytes; /* step_bytes: of one step of [N, H] in float32 */
    bool in;
    i64 unit; /* j; for threads past the end the last unit, whose results they do not store */
};

__device__ __forceinline__ Thread thread_of(const Loop &l) {
    const u32 across = ((u32)l.hidden + THREADS - 1) / THREADS, row = blockIdx.x / across;
    Thread h;
    h.row = row;
    h.j = (i64)(blockIdx.x - row * across) * THREADS + threadIdx.x;
    h.in = FULL || h.j < l.hidden;
    h.unit = h.in ? h.j : l.hidden - 1;
    h.length = (int)length_of(l, row);
    h.index = row * l.hidden + h.unit;
    h.example = (u32)l.examples[row];
    h.step_bytes = (u32)(l.batch * l.hidden * sizeof(float));
    return h;
}

/* --- masks ------------------------------------------------------------------------------------ */

/* The element of step t of a row, in an array whose steps are `bytes` apart; `first`: the element of position 0. */
template <typename T>
__device__ __forceinline__ T *at_step(T *first, u32 bytes, const Loop &l, const Thread &h, int t) {
    return (T *)((char *)first + (u64)(u32)(l.reverse ? h.length - 1 - t : t) * bytes);
}
#define FLOAT_AT(array, t) at_step((array) + h.index, h.step_bytes, l, h, t)
#define NARROW_AT(array, t) at_step((narrow *)(array) + h.index, h.step_bytes / (4 / (u32)sizeof(narrow)), l, h, t)
#define GATE_AT(array, q, t)                                                                                   \
    at_step((narrow *)(array) + (h.row * GATES + (q)) * l.hidden + h.unit,                                     \
            GATES * (h.step_bytes / (4 / (u32)sizeof(narrow))), l, h, t)

struct Words4 {
    u32 at[STATES + 1][4]; /* by stream: the words of four steps */
};

__device__ __forceinline__ void exchange(u32 &a, u32 &b, bool high, int far) {
    u32 got = __shfl_xor_sync(~0u, high ? a : b, far);
    if (high)
        a = got;
    else
        b = got;
}

/* Draw the words of this unit at the steps t, t + d, t + 2·d and t + 3·d, d: `direction`. All threads of a warp
 * call this. */
__device__ __forceinline__ void draw_four(u32 *w, const Loop &l, const Stream &s, u64 seed, const Thread &h, i64 t,
                                          int direction) {
    if (s.sees_unit && s.sees_step) {
        const int lane = threadIdx.x & 3;
        philox(w, seed, (u32)h.j >> 2, s.sees_example ? h.example : 0, mask_step(l, t + direction * lane, h.length),
            s.plane);
        /* Thread s has the words of four units at step s. Exchange them: each thread needs its own unit at four
         * steps. */
        exchange(w[0], w[1], lane & 1, 1), exchange(w[2], w[3], lane & 1, 1);
        exchange(w[0], w[2], lane & 2, 2), exchange(w[1], w[3], lane & 2, 2);
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++)
            w[i] = i && !s.sees_step ? w[0] : word_of(s, seed, (u32)h.j, h.example,
                mask_step(l, t + direction * i, h.length));
    }
}

__device__ __forceinline__ void draw_streams(Words4 &w, const Loop &l, const CellArguments &o, const Streams &n,
                                             const Thread &h, i64 t, int direction) {
    int drawn = -1; /* the stream that was drawn last */
    EACH_STREAM {
        const Stream &s = stream_of(o, k);
        if (s.mode != DRAWN) continue;
        if (k && drawn == k - 1 && shares_word(o, n, k)) {
#pragma unroll
            for (int i = 0; i < 4; i++) w.at[k][i] = w.at[k - 1][i];
        } else {
            draw_four(w.at[k], l, s, n.noise[k].seed, h, t, direction);
        }
        drawn = k;
    }
}

__device__ __forceinline__ void fill_masks(Unit &u, const CellArguments &o, const Streams &n, const Words4 &w, int i,
                                           bool first) {
    Masks masks = {};
    EACH_STREAM if (stream_of(o, k).mode != OFF) masks.of[k] = keep_of(stream_of(o, k), n.noise[k], w.at[k][i]);
    set_masks(u, o, masks, first);
}

/* Groups of AHEAD steps. All groups but the last are complete. Without a branch between the steps the compiler
 * overlaps several of them. */
#define EACH_GROUP                                                       \
    _Pragma("unroll") for (int rest = 0, start = 0; rest < 2; rest++)    \
        for (; rest ? start < h.length : start + AHEAD <= h.length; start += AHEAD)
#define EACH_STAGE _Pragma("unroll") for (int i = 0; i < AHEAD; i++)

/* --- forward -------------------------------------------------------------------------------------- */

#if !BACKWARD
extern "C" __global__ void __launch_bounds__(THREADS) forward(Loop l, CellArguments o) {
    simplify(l), simplify(o);
    const Thread h = thread_of(l);
    if (h.length <= 0) return;
    const Streams n = streams_of(o, h.unit);
    Unit u = unit_of(l, o, h.unit);
    EarlyLoad ring[AHEAD][GATES];
    float state[STATES], held = 0.0f;
    const int last = h.length - 1;
    EACH_STATE state[k] = start_at(l, o, k, false, h.index);
    EACH_STAGE EACH_GATE ring[i][q] = load_early(GATE_AT(l.gates, q, min(i, last)));
    Words4 words;
    EACH_GROUP {
        EACH_STAGE {
            const int t = start + i;
            if (rest && t >= h.length) break;
            if (i % 4 == 0) draw_streams(words, l, o, n, h, t, 1);
            const bool cut = cut_at(l, t, h.row, h.length), first = cut || t == 0;
            if (cut) EACH_STATE state[k] = start_at(l, o, k, true, h.index);
            EACH_STATE u.old[k] = state[k];
            u.held = held;
            fill_masks(u, o, n, words, i % 4, first);
            EACH_GATE {
                u.gate[q] = widen(ring[i][q]);
                ring[i][q] = load_early(GATE_AT(l.gates, q, min(t + AHEAD, last)));
            }
            step_forward(u);
            EACH_STATE state[k] = u.made[k];
#if HELD >= 0
            held = HELD < GATES ? u.gate[HELD < GATES ? HELD : 0] : u.slot[HELD < GATES ? 0 : HELD - GATES];
#endif
            if (h.in) {
                EACH_GATE *GATE_AT(l.gates, q, t) = narrowed(u.gate[q]);
                EACH_SLOT *FLOAT_AT(o.slot[k], t) = u.slot[k];
                *NARROW_AT(l.y, t) = narrowed(u.made[0]);
                EACH_STATE if (k) *FLOAT_AT(o.states[k], t) = u.made[k];
            }
        }
    }
}

#else
/* --- backward ------------------------------------------------------------------------------------- */

struct Loads { /* inputs of one step */
    EarlyLoad gate[GATES], dy, h;
    float slot[SLOTS + 1], old[STATES], dseen[STATES];
};

/* At the first step, the states before it are read from the row itself: they are not used. */
__device__ __forceinline__ void load_step(Loads &to, const Loop &l, const CellArguments &o, const Thread &h, int t) {
    const int before = max(t - 1, 0);
    EACH_GATE to.gate[q] = load_early(GATE_AT(l.gates, q, t));
    to.dy = load_early(NARROW_AT(l.dy, t));
    to.h = load_early(NARROW_AT(l.y, before));
    EACH_SLOT to.slot[k] = load_early_float(FLOAT_AT(o.slot[k], t));
#pragma unroll
    for (int k = 1; k < STATES; k++) {
        to.old[k] = load_early_float(FLOAT_AT(o.states[k], before));
        to.dseen[k] = o.dseen[k] ? load_early_float(FLOAT_AT(o.dseen[k], t)) : 0.0f;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) backward(Loop l, CellArguments o) {
    simplify(l), simplify(o);
    const Thread h = thread_of(l);
    if (h.length <= 0) return;
    const Streams n = streams_of(o, h.unit);
    Unit u = unit_of(l, o, h.unit);
    Loads ring[AHEAD];
    float initial[STATES];
    const int last = h.length - 1;
    EACH_STATE u.dstate[k] = o.dstate[k][h.index], initial[k] = start_at(l, o, k, false, h.index);
    EACH_STAGE load_step(ring[i], l, o, h, max(last - i, 0));
    Words4 words;
    EACH_GROUP {
        EACH_STAGE {
            const int t = last - start - i;
            if (rest && t < 0) break;
            if (i % 4 == 0) draw_streams(words, l, o, n, h, t, -1);
            const bool cut = cut_at(l, t, h.row, h.length), first = cut || t == 0;
            Loads &now = ring[i];
            EACH_GATE u.gate[q] = widen(now.gate[q]);
            EACH_SLOT u.slot[k] = now.slot[k];
            EACH_STATE {
                u.old[k] = t == 0 ? initial[k] : k ? now.old[k] : widen(now.h);
                if (cut) u.old[k] = start_at(l, o, k, true, h.index);
                if (k) u.dstate[k] += now.dseen[k];
            }
            u.dy = widen(now.dy);
#if HELD >= 0
            if (!first) u.held = held_at(l, o, row_index(l, t - 1, h.row, h.length), h.unit)[0];
#endif
            fill_masks(u, o, n, words, i % 4, first);
            step_backward(u);
            load_step(ring[i], l, o, h, max(t - AHEAD, 0));
            if (h.in) EACH_GATE *GATE_AT(l.dgx, q, t) = narrowed(u.dx[q]);
            if (cut) {
                EACH_STATE {
                    if (h.in) o.dreset[k][h.index] += u.dstate[k];
                    u.dstate[k] = 0.0f;
                }
            }
        }
    }
    if (!h.in) return;
    EACH_STATE o.dstate[k][h.index] = u.dstate[k];
    EACH_PARAMETER o.dparameter[k][h.index] = u.dparameter[k];
}
#endif
