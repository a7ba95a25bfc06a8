/* Any cell: all steps in one launch, with the exchange of exchange.cuh and the generated step. */

/* --- forward -------------------------------------------------------------------------------------- */
#if !BACK
extern "C" __global__ void __launch_bounds__(THREADS, 1) forward(Loop l, Own o, Exchange x) {
    simplify(l), simplify(o);
    Mine m = mine(l, x);
    const i64 H = m.H;
    const narrow *scale = (const narrow *)l.scale_h;
    narrow *gates = (narrow *)l.gates;
    Weights w;
    load_weights(l, 1.0f, w, (u32)m.unit0, m.warp, m.lane, m.weights);
    const i64 unit = m.in ? m.unit : 0;
    const Streams noises = streams_of(o, unit);
    const Unit constant = unit_of(l, o, unit);
    int length[ITEMS];
    LENGTHS(length);
    float state[ITEMS][STATES], held[ITEMS];
    u32 example[ITEMS];
    Late pre[ITEMS][G], later[ITEMS][G]; /* x's part of this step and of the next */
    bool cut[ITEMS];

    auto fetch = [&](i64 t) {
        EACH_ITEM if (t < length[i]) {
            i64 at = at_of(l, t, row, length[i]);
            EACH_GATE later[i][q] = late(gates + (at * G + q) * H + m.unit);
        }
    };
    /* h as it enters the product of the next step, to all blocks. */
    auto send_h = [&](i64 turn) {
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            i64 r = threadIdx.x / UP + i * ROWS_AT_ONCE, row = m.row0 + r;
            bool there = m.in && r < R && row < l.batch;
            float out = there ? state[i][0] : 0.0f;
            if (l.resets && there && cut[i]) out = start_h(l, true, row * H + m.unit);
            if (scale && there) out *= widen(scale[row * H + m.unit]);
            send(m, turn, (int)r, &out);
        }
        send_rest(m, turn);
    };
    EACH_ITEM {
        bool there = row < l.batch;
        held[i] = 0.0f, cut[i] = there && length[i] > 0 && cut_at(l, 0, row, length[i]);
        EACH_STATE state[i][k] = there ? start_at(l, o, k, cut[i], row * H + m.unit) : 0.0f;
        example[i] = there ? (u32)l.examples[row] : 0;
    }
    send_h(0);
    fetch(0);
    for (i64 t = 0; t < l.steps; t++) {
        EACH_ITEM EACH_GATE pre[i][q] = later[i][q];
        fetch(t + 1);
        Kept kept[ITEMS];
        bool cut_next[ITEMS];
        EACH_ITEM if (t < length[i]) {
            kept[i] = kept_at(o, noises, (u32)m.unit, example[i], step_of(l, t, length[i]));
            cut_next[i] = t + 1 < length[i] && cut_at(l, t + 1, row, length[i]);
        }
        product(w, PART(t), m.reads, buffer_of(m, t), tag_of(t), m.warp, m.lane);
        __syncthreads();
        float stored[ITEMS][G + SLOTS];
        EACH_ITEM if (t < length[i]) {
            float v[G];
            total<G>(v, PART(t) + r * NP + m.u * G);
            Unit u = constant;
            EACH_GATE {
                u.gate[q] = widen(pre[i][q]) + (APART ? 0.0f : v[q]);
                u.r[q] = v[q];
            }
            EACH_STATE u.old[k] = cut[i] ? start_at(l, o, k, true, row * H + m.unit) : state[i][k];
            u.held = held[i];
            put_kept(u, o, kept[i], t == 0 || cut[i]);
            step_forward(u);
            EACH_STATE state[i][k] = u.made[k];
            EACH_GATE stored[i][q] = u.gate[q];
            EACH_SLOT stored[i][G + k] = u.slot[k];
            if (HELD >= 0) held[i] = stored[i][HELD < 0 ? 0 : HELD];
            cut[i] = cut_next[i];
        }
        send_h(t + 1);
        EACH_ITEM if (t < length[i]) {
            i64 at = at_of(l, t, row, length[i]);
            ((narrow *)l.y)[at * H + m.unit] = narrowed(state[i][0]);
            EACH_STATE if (k) o.states[k][at * H + m.unit] = state[i][k];
            EACH_GATE gates[(at * G + q) * H + m.unit] = narrowed(stored[i][q]);
            EACH_SLOT o.slot[k][at * H + m.unit] = stored[i][G + k];
        }
    }
}
#endif

/* --- backward ------------------------------------------------------------------------------------- */
#if BACK
struct Fetched { /* what a step needs that was there before */
    Late gates[G], dy;
    float held, slot[SLOTS + 1], old[STATES], dseen[STATES];
    bool first;
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward(Loop l, Own o, Exchange x) {
    simplify(l), simplify(o);
    Mine m = mine(l, x);
    const i64 H = m.H;
    const narrow *gates = (const narrow *)l.gates, *scale = (const narrow *)l.scale_h;
    Weights w;
#if SCALED
    const Scale s = scale_of(x.peak);
    load_weights(l, s.by, w, (u32)m.unit0, m.warp, m.lane, m.weights);
#else
    load_weights(l, 1.0f, w, (u32)m.unit0, m.warp, m.lane, m.weights);
#endif
    const i64 unit = m.in ? m.unit : 0;
    const Streams noises = streams_of(o, unit);
    const Unit constant = unit_of(l, o, unit);
    float d[ITEMS][STATES], of_reset[ITEMS][STATES], owed[ITEMS], of_parameter[ITEMS][PARAMETERS + 1];
    Fetched f[ITEMS], later[ITEMS]; /* of this step and of the next one back */
    u32 example[ITEMS];
    int length[ITEMS];
    LENGTHS(length);

    auto fetch = [&](i64 t) {
        EACH_ITEM if (t < length[i]) {
            i64 at = at_of(l, t, row, length[i]), before = at_of(l, t - 1, row, length[i]) * H + m.unit;
            i64 here = at * H + m.unit, start = row * H + m.unit;
            bool cut = cut_at(l, t, row, length[i]), first = t == 0 || cut;
            later[i].first = first;
            EACH_GATE later[i].gates[q] = late(gates + (at * G + q) * H + m.unit);
            later[i].dy = late((const narrow *)l.dy + here);
            EACH_SLOT later[i].slot[k] = o.slot[k][here];
            EACH_STATE {
                if (first)
                    later[i].old[k] = start_at(l, o, k, cut, start);
                else
                    later[i].old[k] = k ? o.states[k][before] : widen(((const narrow *)l.y)[before]);
                later[i].dseen[k] = k && o.dseen[k] ? o.dseen[k][here] : 0.0f;
            }
#if HELD >= 0 && HELD < GATES
            if (o.update.hold && !first) later[i].held = widen(gates[(at_of(l, t - 1, row, length[i]) * G + HELD) * H + m.unit]);
#elif HELD >= 0
            if (o.update.hold && !first) later[i].held = o.slot[HELD - GATES][before];
#endif
        }
    };
    EACH_ITEM {
        bool there = row < l.batch;
        owed[i] = 0.0f, example[i] = there ? (u32)l.examples[row] : 0;
        EACH_STATE d[i][k] = there ? o.dstate[k][row * H + m.unit] : 0.0f, of_reset[i][k] = 0.0f;
        EACH_PARAMETER of_parameter[i][k] = 0.0f;
    }
    fetch(l.steps - 1);
    i64 t = l.steps - 1;
    for (u32 done = 0; t >= -1; t--, done++) {
        EACH_ITEM f[i] = later[i];
        if (t > 0) fetch(t - 1);
        Kept kept[ITEMS];
        bool cut[ITEMS]; /* whether the step after was cut off from this one */
        EACH_ITEM {
            cut[i] = t + 1 < length[i] && cut_at(l, t + 1, row, length[i]);
            if (t >= 0 && t < length[i]) kept[i] = kept_at(o, noises, (u32)m.unit, example[i], step_of(l, t, length[i]));
        }
        if (done) {
            product(w, PART(done), m.reads, buffer_of(m, done - 1), tag_of(done - 1), m.warp, m.lane);
            __syncthreads();
            EACH_ITEM if (t + 1 < length[i]) {
                float rec;
                total<1>(&rec, PART(done) + r * NP + m.u);
#if SCALED
                rec *= s.after;
#endif
                d[i][0] += scale ? rec * widen(scale[row * H + m.unit]) : rec;
                if (cut[i]) EACH_STATE of_reset[i][k] += d[i][k], d[i][k] = 0.0f;
            }
        }
        if (t < 0) break;
        narrow dx[ITEMS][G], dr[ITEMS][G];
        float out[ITEMS][GE] = {};
        EACH_ITEM if (t < length[i]) {
            Unit u = constant;
            EACH_GATE u.gate[q] = widen(f[i].gates[q]);
            EACH_SLOT u.slot[k] = f[i].slot[k];
            EACH_STATE u.old[k] = f[i].old[k], u.dstate[k] = d[i][k] + f[i].dseen[k];
            u.dy = widen(f[i].dy), u.held = f[i].first ? 0.0f : f[i].held, u.owed = owed[i];
            put_kept(u, o, kept[i], f[i].first);
            step_backward(u);
            owed[i] = u.owed;
            EACH_STATE d[i][k] = u.dstate[k];
            EACH_PARAMETER of_parameter[i][k] += u.dparameter[k];
            EACH_GATE {
                out[i][q % GE] = APART ? u.dr[q] : u.dx[q];
                dx[i][q] = narrowed(u.dx[q]);
                if (APART) dr[i][q] = narrowed(u.dr[q]);
            }
        }
#if SCALED
        scale_rows(m, s, done, out);
#endif
#pragma unroll
        for (int i = 0; i < ITEMS; i++) send(m, done, threadIdx.x / UP + i * ROWS_AT_ONCE, out[i]);
        send_rest(m, done);
        EACH_ITEM if (t < length[i]) {
            i64 at = at_of(l, t, row, length[i]);
            EACH_GATE {
                ((narrow *)l.dgx)[(at * G + q) * H + m.unit] = dx[i][q];
                if (APART) ((narrow *)l.dsh)[(at * G + q) * H + m.unit] = dr[i][q];
            }
        }
    }
    EACH_ITEM if (row < l.batch) {
        const i64 own = row * H + m.unit;
        EACH_STATE {
            o.dstate[k][own] = d[i][k];
            if (l.resets) o.dreset[k][own] = of_reset[i][k];
        }
        EACH_PARAMETER o.dparameter[k][own] = of_parameter[i][k];
    }
}
#endif
