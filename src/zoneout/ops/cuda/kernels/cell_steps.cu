/* Any cell, one step at a time: the kernels between the products.
 *
 * Compiled with VECTOR, the units of a thread, and GIVEN_MASKS. A step is one launch. It also applies resets and
 * the variational mask: to h before the next product in the forward pass, to the gradient from the product in the
 * backward pass. With products inside the step there is one more launch for each level of products.
 */

__device__ __forceinline__ void fill_masks(Unit *u, const Loop &l, const CellArguments &o, const Place &p, i64 t) {
    const u32 example = (u32)l.examples[p.row], step = mask_step(l, t, p.length);
    Words w = {};
    Stream drawn = {}; /* the stream whose words are in `w` */
    Noise of_drawn = {};
    EACH_STREAM {
        const Stream &s = k < STATES ? o.state[k] : o.update;
        if (s.mode == OFF) continue;
#if GIVEN_MASKS
        if (s.mode == GIVEN) {
            Units given = load(o.given[k < STATES ? k : 4] + p.at * l.hidden + p.j);
            EACH_UNIT if (k < STATES) set_state_mask(u[e], k, s, given[e]);
            else set_update_mask(u[e], s, given[e], p.first);
            continue;
        }
#endif
        Noise n = noise_of(s, p.j);
        if (s.mode == DRAWN && !(drawn.mode == DRAWN && same_words(drawn, of_drawn, s, n))) {
            w = words_of(s, n.seed, (u32)p.j, example, step);
            drawn = s, of_drawn = n;
        }
        EACH_UNIT {
            float keep = keep_of(s, e && s.stride ? noise_of(s, p.j + e) : n, w.v[e]);
            if (k < STATES)
                set_state_mask(u[e], k, s, keep);
            else
                set_update_mask(u[e], s, keep, p.first);
        }
    }
}

/* Set one field of VECTOR units. */
#define SET_FIELD(field, from)                 \
    {                                     \
        Units value_ = from;              \
        EACH_UNIT u[e].field = value_[e];      \
    }
#define GET_FIELD(name, field) \
    Units name;            \
    EACH_UNIT name[e] = u[e].field

__device__ __forceinline__ Units old_state(const Loop &l, const CellArguments &o, const Place &p, int k) {
    const i64 at = p.row * l.hidden + p.j;
    if (k) return load(p.first ? start_of(o, k, p.cut, at) : o.states[k] + p.before * l.hidden + p.j);
    if (p.first) return load((const narrow *)(p.cut ? l.reset_h : l.h0) + at);
    return o.h ? load(o.h + at) : load((const narrow *)l.y + p.before * l.hidden + p.j);
}

__device__ __forceinline__ void shared_loads(Unit *u, const Loop &l, const CellArguments &o, const Place &p, i64 t) {
    EACH_STATE SET_FIELD(old[k], old_state(l, o, p, k));
    EACH_PARAMETER SET_FIELD(parameter[k], load(o.parameter[k] + p.j));
    fill_masks(u, l, o, p, t);
#if MASKS
    EACH_STATE {
        if (o.dropped[k]) SET_FIELD(drop[k], load(o.dropped[k] + p.at * l.hidden + p.j));
        if (o.added[k]) SET_FIELD(add[k], load(o.added[k] + p.at * l.hidden + p.j));
    }
#endif
#if HELD >= 0
    if (o.update.hold && !p.first) SET_FIELD(held, held_at(l, o, p.before, p.j));
#endif
}

/* the head of a unit, and the unit's index in it */
struct Head {
    i64 number, j;
};

__device__ __forceinline__ Head head_of(const CellArguments &o, i64 j) {
    u32 number = (u32)j / (u32)o.head_units;
    return {number, j - number * o.head_units};
}

/* --- forward ---------------------------------------------------------------------------------- */

/* Write h as the product of step t reads it: with resets and the variational mask. */
__device__ __forceinline__ void enter_product(const Loop &l, const CellArguments &o, i64 row, i64 j, i64 t, i64 length,
                                              Units h) {
    const i64 at = row * l.hidden + j;
    if (t < length && cut_at(l, t, row, length)) h = load((const narrow *)l.reset_h + at);
    if (l.scale_h) {
        Units scale = load((const narrow *)l.scale_h + at);
        EACH_UNIT h[e] *= scale[e];
    }
    store(o.h_in + row * o.h_pitch + j, h);
}

/* Before the first step. */
extern "C" __global__ void enter(Loop l, CellArguments o, int t) {
    Place p = place(l, 0, l.hidden);
    if (p.in) enter_product(l, o, p.row, p.j, 0, p.length, load((const narrow *)l.h0 + p.row * l.hidden + p.j));
}

/* Load the inputs of step t. */
__device__ __forceinline__ void load_forward(Unit *u, const Loop &l, const CellArguments &o, const Place &p, i64 t) {
    const i64 H = l.hidden;
    const narrow *gates = (const narrow *)l.gates + p.at * GATES * H + p.j;
    EACH_GATE {
        SET_FIELD(gate[q], load(gates + q * H));
        SET_FIELD(bias_x[q], load((const narrow *)l.b_x + q * H + p.j));
#if RECURRENT
        const Head head = head_of(o, p.j);
        Units r = load(o.product + (head.number * l.batch + p.row) * GATES * o.head_units + head.j + q * o.head_units);
#if APART
        EACH_UNIT u[e].r[q] = r[e];
        if (l.b_h) SET_FIELD(bias_r[q], load((const narrow *)l.b_h + q * H + p.j));
#else
        EACH_UNIT u[e].gate[q] += r[e];
#endif
#endif
    }
    shared_loads(u, l, o, p, t);

#if PRODUCTS
    EACH_PRODUCT EACH_PART {
        const i64 row = o.gathered ? p.row : p.at;
        const float *from = o.gathered ? o.part[k] : o.inner[k];
        SET_FIELD(inner[product_first(k) + q], load(from + (row * product_parts(k) + q) * H + p.j));
    }
#endif
}

#if PRODUCTS
/* Compute the inputs of the products of a level. The products of this and of higher levels have no results yet. */
extern "C" __global__ void enter_level(Loop l, CellArguments o, int t, int level) {
    Place p = place(l, t, l.hidden);
    if (!p.in) return;
    Unit u[VECTOR] = {};
    load_forward(u, l, o, p, t);
    EACH_UNIT step_enter(u[e], level);
    EACH_PRODUCT if (product_level(k) == level) {
        GET_FIELD(value, in[k]);
        store(o.in[k] + p.row * o.in_pitch + p.j, value);
    }
}
#endif

extern "C" __global__ void forward(Loop l, CellArguments o, int t) {
    Place p = place(l, t, l.hidden);
    if (!p.in) return;
    const i64 H = l.hidden, here = p.row * H + p.j;
    narrow *gates = (narrow *)l.gates + p.at * GATES * H + p.j;
    Unit u[VECTOR] = {};
    load_forward(u, l, o, p, t);

#if PRODUCTS
    if (o.gathered) EACH_PRODUCT EACH_PART {
        GET_FIELD(value, inner[product_first(k) + q]);
        store(o.inner[k] + (p.at * product_parts(k) + q) * H + p.j, value);
    }
#endif
    EACH_UNIT step_forward(u[e]);
    EACH_GATE {
        GET_FIELD(value, gate[q]);
        store(gates + q * H, value);
    }
    EACH_SLOT {
        GET_FIELD(value, slot[k]);
        store(o.slot[k] + p.at * H + p.j, value);
    }
#pragma unroll
    for (int k = 1; k < STATES; k++) {
        GET_FIELD(value, made[k]);
        store(o.states[k] + p.at * H + p.j, value);
    }
    GET_FIELD(h, made[0]);
    store((narrow *)l.y + p.at * H + p.j, h);
    if (o.h) store(o.h + here, h);
#if RECURRENT
    if (t + 1 < l.steps) enter_product(l, o, p.row, p.j, t + 1, p.length, h);
#endif
}

/* --- backward ------------------------------------------------------------------------------------- */

/* Compute the gradients of the states after step t, from step t + 1 and from its product. At a reset they go to the
 * states after the reset, and no further. */
__device__ __forceinline__ void final_state_grads(Units *d, const Loop &l, const CellArguments &o, i64 row, i64 j,
                                                  i64 t, i64 length) {
    const i64 at = row * l.hidden + j;
    EACH_STATE d[k] = load(o.dstate[k] + at);
    if (t + 1 >= length) return;
#if RECURRENT
    const Head head = head_of(o, j);
    Units sum = all_of(0.0f);
#pragma unroll 4
    for (i64 split = 0; split < o.splits; split++) {
        Units one = load(o.rec + ((head.number + split) * l.batch + row) * o.rec_pitch + head.j);
        EACH_UNIT sum[e] += one[e];
    }
    if (l.scale_h) {
        Units scale = load((const narrow *)l.scale_h + at);
        EACH_UNIT sum[e] *= scale[e];
    }
    EACH_UNIT d[0][e] += sum[e];
#endif
    if (!cut_at(l, t + 1, row, length)) return;
    EACH_STATE {
        Units total = load(o.dreset[k] + at);
        EACH_UNIT total[e] += d[k][e];
        store(o.dreset[k] + at, total);
        d[k] = all_of(0.0f);
    }
}

/* Load the inputs of the backward pass of step t, except the gradients of the states. */
__device__ __forceinline__ void load_backward(Unit *u, const Loop &l, const CellArguments &o, const Place &p, i64 t) {
    const i64 H = l.hidden;
    SET_FIELD(dy, load((const narrow *)l.dy + p.at * H + p.j));
    EACH_GATE SET_FIELD(gate[q], load((const narrow *)l.gates + (p.at * GATES + q) * H + p.j));
    EACH_SLOT SET_FIELD(slot[k], load(o.slot[k] + p.at * H + p.j));
    if (o.owed) SET_FIELD(owed, load(o.owed + p.row * H + p.j));
    shared_loads(u, l, o, p, t);

#if PRODUCTS
    EACH_PRODUCT {
        EACH_PART SET_FIELD(inner[product_first(k) + q], load(o.inner[k] + (p.at * product_parts(k) + q) * H + p.j));
        SET_FIELD(din[k], load(o.din[k] + p.row * o.din_pitch + p.j));
    }
#endif
}

/* The gradients of the states after step t, with those of the states that are returned at every step. */
__device__ __forceinline__ void state_grads(Unit *u, const Loop &l, const CellArguments &o, const Place &p, i64 t) {
    Units d[STATES];
    final_state_grads(d, l, o, p.row, p.j, t, p.length);
    EACH_STATE {
        EACH_UNIT u[e].dstate[k] = d[k][e];
        if (k && o.dseen[k]) {
            Units more = load(o.dseen[k] + p.at * l.hidden + p.j);
            EACH_UNIT u[e].dstate[k] += more[e];
        }
    }
}

#if PRODUCTS
/* Compute the gradients of the products of a level. The highest level is first, and also computes the inputs of all
 * products. */
extern "C" __global__ void leave_level(Loop l, CellArguments o, int t, int level) {
    Place p = place(l, t, l.hidden);
    if (!p.in) return; /* products read this row, but their results are not used */
    const i64 H = l.hidden, here = p.row * H + p.j;
    Unit u[VECTOR] = {};
    load_backward(u, l, o, p, t);
    if (level == LEVELS - 1) {
        state_grads(u, l, o, p, t);
        EACH_STATE {
            GET_FIELD(value, dstate[k]);
            store(o.dstate[k] + here, value);
        }
        EACH_UNIT step_inputs(u[e]);
        EACH_PRODUCT {
            GET_FIELD(value, in[k]);
            store(o.ins[k] + p.at * H + p.j, value);
        }
    } else {
        EACH_STATE SET_FIELD(dstate[k], load(o.dstate[k] + here));
    }
    EACH_UNIT step_leave(u[e], level);
    EACH_PRODUCT if (product_level(k) == level) {
        EACH_PART {
            GET_FIELD(value, dinner[product_first(k) + q]);
            store(o.dinner[k] + (p.at * product_parts(k) + q) * H + p.j, value);
            if (o.gathered) store(o.d_part[k] + (p.row * product_parts(k) + q) * H + p.j, value);
        }
    }
}
#endif

extern "C" __global__ void backward(Loop l, CellArguments o, int t) {
    Place p = place(l, t, l.hidden);
    if (!p.in) return; /* the product reads this row, but its result is not used */
    const i64 H = l.hidden, here = p.row * H + p.j;
    const i64 first = p.at * GATES * H + p.j;
    Unit u[VECTOR] = {};
    load_backward(u, l, o, p, t);

#if PRODUCTS
    EACH_STATE SET_FIELD(dstate[k], load(o.dstate[k] + here));
#else
    state_grads(u, l, o, p, t);
#endif
    EACH_UNIT step_backward(u[e]);
#if RECURRENT
    const Head head = head_of(o, p.j);
    narrow *enters = o.d_in ? o.d_in + (p.row * H + head.number * o.head_units) * GATES + head.j : nullptr;
#endif
    EACH_GATE {
        GET_FIELD(dx, dx[q]);
        store((narrow *)l.dgx + first + q * H, dx);
#if APART
        GET_FIELD(dr, dr[q]);
        store((narrow *)l.dsh + first + q * H, dr);
#else
        Units &dr = dx;
#endif
#if RECURRENT
        if (enters) store(enters + q * o.head_units, dr);
#endif
    }
    EACH_STATE {
        GET_FIELD(value, dstate[k]);
        store(o.dstate[k] + here, value);
    }
    if (o.owed) {
        GET_FIELD(value, owed);
        store(o.owed + here, value);
    }
#if MASKS
#define STORE_GRADIENT(to, field)                 \
    if (to) {                               \
        GET_FIELD(value, field);                \
        store((to) + p.at * H + p.j, value);  \
    }
    EACH_STATE {
        if (o.state[k].zero) {
            STORE_GRADIENT(o.dgiven[k], dzero[k])
        } else {
            STORE_GRADIENT(o.dgiven[k], dzone[k])
        }
        STORE_GRADIENT(o.ddropped[k], ddrop[k])
        STORE_GRADIENT(o.dadded[k], dadd[k])
    }
    STORE_GRADIENT(o.dgiven[4], dupdate)
#endif
    EACH_PARAMETER {
        Units sum = load(o.dparameter[k] + here);
        EACH_UNIT sum[e] += u[e].dparameter[k];
        store(o.dparameter[k] + here, sum);
    }
}

/* After the first step: the gradients of the initial states. */
extern "C" __global__ void leave(Loop l, CellArguments o, int t) {
    Place p = place(l, 0, l.hidden);
    if (!p.in) return;
    Units d[STATES];
    final_state_grads(d, l, o, p.row, p.j, -1, p.length);
    EACH_STATE store(o.dstate[k] + p.row * l.hidden + p.j, d[k]);
}
