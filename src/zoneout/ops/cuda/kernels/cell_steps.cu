/* Any cell, one step at a time: what stands between the products.
 *
 * Compiled with V, the units of a thread. A step has one launch: it also settles what enters the next product (resets and
 * the variational mask forwards; forwards' adjoint backwards). With products inside the step it has one more for each level
 * of them.
 */

__device__ __forceinline__ void masks_at(Unit *u, const Loop &l, const Own &o, const Place &p, i64 t) {
    const u32 example = (u32)l.examples[p.row], step = step_of(l, t, p.length);
    Words w = {};
    Stream drawn = {}; /* the stream that `w` was drawn for */
    Noise of_drawn = {};
    EACH_STREAM {
        const Stream &s = k < STATES ? o.state[k] : o.update;
        if (s.mode == OFF) continue;
#if GIVEN_MASKS
        if (s.mode == GIVEN) {
            Units given = get(o.given[k < STATES ? k : 4] + p.at * l.hidden + p.j);
            EACH if (k < STATES) put_keep(u[e], k, s, given[e]);
            else put_update(u[e], s, given[e], p.first);
            continue;
        }
#endif
        Noise n = noise_of(s, p.j);
        if (s.mode == DRAWN && !(drawn.mode == DRAWN && same_words(drawn, of_drawn, s, n))) {
            w = words_of(s, n.seed, (u32)p.j, example, step);
            drawn = s, of_drawn = n;
        }
        EACH {
            float keep = keep_of(s, e && s.stride ? noise_of(s, p.j + e) : n, w.v[e]);
            if (k < STATES)
                put_keep(u[e], k, s, keep);
            else
                put_update(u[e], s, keep, p.first);
        }
    }
}

/* Set one field of V units. */
#define FILL(field, from)                 \
    {                                     \
        Units value_ = from;              \
        EACH u[e].field = value_[e];      \
    }
#define TAKEN(name, field) \
    Units name;            \
    EACH name[e] = u[e].field

__device__ __forceinline__ Units before(const Loop &l, const Own &o, const Place &p, int k) {
    const i64 at = p.row * l.hidden + p.j;
    if (k) return get(p.first ? start_of(o, k, p.cut, at) : o.states[k] + p.before * l.hidden + p.j);
    if (p.first) return get((const narrow *)(p.cut ? l.reset_h : l.h0) + at);
    return o.h ? get(o.h + at) : get((const narrow *)l.y + p.before * l.hidden + p.j);
}

__device__ __forceinline__ void shared_loads(Unit *u, const Loop &l, const Own &o, const Place &p, i64 t) {
    EACH_STATE FILL(old[k], before(l, o, p, k));
    EACH_PARAMETER FILL(parameter[k], get(o.parameter[k] + p.j));
    masks_at(u, l, o, p, t);
#if MASKS
    EACH_STATE {
        if (o.dropped[k]) FILL(drop[k], get(o.dropped[k] + p.at * l.hidden + p.j));
        if (o.added[k]) FILL(add[k], get(o.added[k] + p.at * l.hidden + p.j));
    }
#endif
#if HELD >= 0
    if (o.update.hold && !p.first) FILL(held, held_at(l, o, p.before, p.j));
#endif
}

/* V units among those of their head. */
struct Head {
    i64 number, j;
};

__device__ __forceinline__ Head head_of(const Own &o, i64 j) {
    u32 number = (u32)j / (u32)o.block;
    return {number, j - number * o.block};
}

/* --- forward -------------------------------------------------------------------------------------- */

/* h as it enters the product of step t: with resets and the variational mask. */
__device__ __forceinline__ void enter_product(const Loop &l, const Own &o, i64 row, i64 j, i64 t, i64 length, Units h) {
    const i64 at = row * l.hidden + j;
    if (t < length && cut_at(l, t, row, length)) h = get((const narrow *)l.reset_h + at);
    if (l.scale_h) {
        Units scale = get((const narrow *)l.scale_h + at);
        EACH h[e] *= scale[e];
    }
    put(o.h_in + row * o.h_pitch + j, h);
}

/* Before the first step. */
extern "C" __global__ void enter(Loop l, Own o, int t) {
    Place p = place(l, 0, l.hidden);
    if (p.in) enter_product(l, o, p.row, p.j, 0, p.length, get((const narrow *)l.h0 + p.row * l.hidden + p.j));
}

/* What step t computes its gates from. */
__device__ __forceinline__ void load_forward(Unit *u, const Loop &l, const Own &o, const Place &p, i64 t) {
    const i64 H = l.hidden;
    const narrow *gates = (const narrow *)l.gates + p.at * GATES * H + p.j;
    EACH_GATE {
        FILL(gate[q], get(gates + q * H));
        FILL(bias_x[q], get((const narrow *)l.b_x + q * H + p.j));
#if RECURRENT
        const Head head = head_of(o, p.j);
        Units r = get(o.product + (head.number * l.batch + p.row) * GATES * o.block + head.j + q * o.block);
#if APART
        EACH u[e].r[q] = r[e];
        if (l.b_h) FILL(bias_r[q], get((const narrow *)l.b_h + q * H + p.j));
#else
        EACH u[e].gate[q] += r[e];
#endif
#endif
    }
    shared_loads(u, l, o, p, t);
#if PRODUCTS
    EACH_PRODUCT EACH_PART {
        const i64 row = o.gathered ? p.row : p.at;
        const float *from = o.gathered ? o.part[k] : o.inner[k];
        FILL(inner[product_first(k) + q], get(from + (row * product_parts(k) + q) * H + p.j));
    }
#endif
}

#if PRODUCTS
/* What the products of a level are taken of. Those of this level and of higher ones have no results yet. */
extern "C" __global__ void enter_level(Loop l, Own o, int t, int level) {
    Place p = place(l, t, l.hidden);
    if (!p.in) return;
    Unit u[V] = {};
    load_forward(u, l, o, p, t);
    EACH step_enter(u[e], level);
    EACH_PRODUCT if (product_level(k) == level) {
        TAKEN(value, in[k]);
        put(o.in[k] + p.row * o.in_pitch + p.j, value);
    }
}
#endif

extern "C" __global__ void forward(Loop l, Own o, int t) {
    Place p = place(l, t, l.hidden);
    if (!p.in) return;
    const i64 H = l.hidden, here = p.row * H + p.j;
    narrow *gates = (narrow *)l.gates + p.at * GATES * H + p.j;
    Unit u[V] = {};
    load_forward(u, l, o, p, t);
#if PRODUCTS
    if (o.gathered) EACH_PRODUCT EACH_PART {
        TAKEN(value, inner[product_first(k) + q]);
        put(o.inner[k] + (p.at * product_parts(k) + q) * H + p.j, value);
    }
#endif
    EACH step_forward(u[e]);
    EACH_GATE {
        TAKEN(value, gate[q]);
        put(gates + q * H, value);
    }
    EACH_SLOT {
        TAKEN(value, slot[k]);
        put(o.slot[k] + p.at * H + p.j, value);
    }
#pragma unroll
    for (int k = 1; k < STATES; k++) {
        TAKEN(value, made[k]);
        put(o.states[k] + p.at * H + p.j, value);
    }
    TAKEN(h, made[0]);
    put((narrow *)l.y + p.at * H + p.j, h);
    if (o.h) put(o.h + here, h);
#if RECURRENT
    enter_product(l, o, p.row, p.j, t + 1, p.length, h);
#endif
}

/* --- backward ------------------------------------------------------------------------------------- */

/* The gradients of the states after step t, in `d`: what step t + 1 left, and what came through its product. At a reset they
 * go to the states after it, and no further. */
__device__ __forceinline__ void arrive(Units *d, const Loop &l, const Own &o, i64 row, i64 j, i64 t, i64 length) {
    const i64 at = row * l.hidden + j;
    EACH_STATE d[k] = get(o.dstate[k] + at);
    if (t + 1 >= length) return;
#if RECURRENT
    const Head head = head_of(o, j);
    Units sum = all_of(0.0f);
#pragma unroll 4
    for (i64 part = 0; part < o.sums; part++) {
        Units one = get(o.rec + ((head.number + part) * l.batch + row) * o.rec_pitch + head.j);
        EACH sum[e] += one[e];
    }
    if (l.scale_h) {
        Units scale = get((const narrow *)l.scale_h + at);
        EACH sum[e] *= scale[e];
    }
    EACH d[0][e] += sum[e];
#endif
    if (!cut_at(l, t + 1, row, length)) return;
    EACH_STATE {
        Units total = get(o.dreset[k] + at);
        EACH total[e] += d[k][e];
        put(o.dreset[k] + at, total);
        d[k] = all_of(0.0f);
    }
}

/* What the backward pass of step t computes its gradients from, but for those of the states. */
__device__ __forceinline__ void load_backward(Unit *u, const Loop &l, const Own &o, const Place &p, i64 t) {
    const i64 H = l.hidden;
    FILL(dy, get((const narrow *)l.dy + p.at * H + p.j));
    EACH_GATE FILL(gate[q], get((const narrow *)l.gates + (p.at * GATES + q) * H + p.j));
    EACH_SLOT FILL(slot[k], get(o.slot[k] + p.at * H + p.j));
    if (o.owed) FILL(owed, get(o.owed + p.row * H + p.j));
    shared_loads(u, l, o, p, t);
#if PRODUCTS
    EACH_PRODUCT {
        EACH_PART FILL(inner[product_first(k) + q], get(o.inner[k] + (p.at * product_parts(k) + q) * H + p.j));
        FILL(din[k], get(o.din[k] + p.row * o.din_pitch + p.j));
    }
#endif
}

/* The gradients of the states after step t, with those of the states that are returned at every step. */
__device__ __forceinline__ void arrive_at(Unit *u, const Loop &l, const Own &o, const Place &p, i64 t) {
    Units d[STATES];
    arrive(d, l, o, p.row, p.j, t, p.length);
    EACH_STATE {
        EACH u[e].dstate[k] = d[k][e];
        if (k && o.dseen[k]) {
            Units more = get(o.dseen[k] + p.at * l.hidden + p.j);
            EACH u[e].dstate[k] += more[e];
        }
    }
}

#if PRODUCTS
/* The gradients of the products of a level. The highest one comes first, and finds what all products were taken of. */
extern "C" __global__ void leave_level(Loop l, Own o, int t, int level) {
    Place p = place(l, t, l.hidden);
    if (!p.in) return; /* products read the row, but nobody their results */
    const i64 H = l.hidden, here = p.row * H + p.j;
    Unit u[V] = {};
    load_backward(u, l, o, p, t);
    if (level == LEVELS - 1) {
        arrive_at(u, l, o, p, t);
        EACH_STATE {
            TAKEN(value, dstate[k]);
            put(o.dstate[k] + here, value);
        }
        EACH step_inputs(u[e]);
        EACH_PRODUCT {
            TAKEN(value, in[k]);
            put(o.ins[k] + p.at * H + p.j, value);
        }
    } else {
        EACH_STATE FILL(dstate[k], get(o.dstate[k] + here));
    }
    EACH step_leave(u[e], level);
    EACH_PRODUCT if (product_level(k) == level) {
        EACH_PART {
            TAKEN(value, dinner[product_first(k) + q]);
            put(o.dinner[k] + (p.at * product_parts(k) + q) * H + p.j, value);
            if (o.gathered) put(o.d_part[k] + (p.row * product_parts(k) + q) * H + p.j, value);
        }
    }
}
#endif

extern "C" __global__ void backward(Loop l, Own o, int t) {
    Place p = place(l, t, l.hidden);
    if (!p.in) return; /* the product reads the row, but nobody its result */
    const i64 H = l.hidden, here = p.row * H + p.j;
    const i64 first = p.at * GATES * H + p.j;
    Unit u[V] = {};
    load_backward(u, l, o, p, t);
#if PRODUCTS
    EACH_STATE FILL(dstate[k], get(o.dstate[k] + here));
#else
    arrive_at(u, l, o, p, t);
#endif
    EACH step_backward(u[e]);
#if RECURRENT
    const Head head = head_of(o, p.j);
    narrow *enters = o.d_in ? o.d_in + (p.row * H + head.number * o.block) * GATES + head.j : nullptr;
#endif
    EACH_GATE {
        TAKEN(dx, dx[q]);
        put((narrow *)l.dgx + first + q * H, dx);
#if APART
        TAKEN(dr, dr[q]);
        put((narrow *)l.dsh + first + q * H, dr);
#else
        Units &dr = dx;
#endif
#if RECURRENT
        if (enters) put(enters + q * o.block, dr);
#endif
    }
    EACH_STATE {
        TAKEN(value, dstate[k]);
        put(o.dstate[k] + here, value);
    }
    if (o.owed) {
        TAKEN(value, owed);
        put(o.owed + here, value);
    }
#if MASKS
#define GRADIENT(to, field)                 \
    if (to) {                               \
        TAKEN(value, field);                \
        put((to) + p.at * H + p.j, value);  \
    }
    EACH_STATE {
        if (o.state[k].zero) {
            GRADIENT(o.dgiven[k], dzero[k])
        } else {
            GRADIENT(o.dgiven[k], dzone[k])
        }
        GRADIENT(o.ddropped[k], ddrop[k])
        GRADIENT(o.dadded[k], dadd[k])
    }
    GRADIENT(o.dgiven[4], dupdate)
#endif
    EACH_PARAMETER {
        Units sum = get(o.dparameter[k] + here);
        EACH sum[e] += u[e].dparameter[k];
        put(o.dparameter[k] + here, sum);
    }
}

/* After the first step: the gradients of the initial states. */
extern "C" __global__ void leave(Loop l, Own o, int t) {
    Place p = place(l, 0, l.hidden);
    if (!p.in) return;
    Units d[STATES];
    arrive(d, l, o, p.row, p.j, -1, p.length);
    EACH_STATE put(o.dstate[k] + p.row * l.hidden + p.j, d[k]);
}
