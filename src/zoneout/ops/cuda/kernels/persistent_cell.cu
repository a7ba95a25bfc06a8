/* Any cell: all steps in one launch, with the exchange of exchange.cuh and the generated step. */

/* --- forward -------------------------------------------------------------------------------------- */
#if !BACKWARD
extern "C" __global__ void __launch_bounds__(THREADS, 1) forward(Loop l, CellArguments o, Exchange x) {
    simplify(l), simplify(o);
    Thread m = thread_of(l, x);
    const i64 H = m.H;
    const narrow *scale = (const narrow *)l.scale_h;
    narrow *gates = (narrow *)l.gates;
    Weights w;
    load_weights(l, 1.0f, w, (u32)m.unit0, m.warp, m.lane, m.weights);
    const i64 unit = m.in ? m.unit : 0;
    const Streams noise = streams_of(o, unit);
    const Unit constant = unit_of(l, o, unit);
    int length[ROWS_PER_THREAD];
    LOAD_LENGTHS(length);
    float state[ROWS_PER_THREAD][STATES], held[ROWS_PER_THREAD];
    u32 example[ROWS_PER_THREAD];
    EarlyLoad x_part[ROWS_PER_THREAD][GATES], next[ROWS_PER_THREAD][GATES]; /* x's part of this step and of the next */
    bool cut[ROWS_PER_THREAD];

    auto fetch = [&](i64 t) {
        EACH_ROW if (t < length[i]) {
            i64 at = row_index(l, t, row, length[i]);
            EACH_GATE next[i][q] = load_early(gates + (at * GATES + q) * H + m.unit);
        }
    };
    /* Send h, as it enters the product of the next step, to all blocks. */
    auto send_h = [&](i64 generation) {
#pragma unroll
        for (int i = 0; i < ROWS_PER_THREAD; i++) {
            i64 r = threadIdx.x / ROUNDED_UNITS + i * ROWS_AT_ONCE, row = m.row0 + r;
            bool exists = m.in && r < ROWS && row < l.batch;
            float out = exists ? state[i][0] : 0.0f;
            if (l.resets && exists && cut[i]) out = start_h(l, true, row * H + m.unit);
            if (scale && exists) out *= widen(scale[row * H + m.unit]);
            send(m, generation, (int)r, &out);
        }
        send_padding(m, generation);
    };
    EACH_ROW {
        bool exists = row < l.batch;
        held[i] = 0.0f, cut[i] = exists && length[i] > 0 && cut_at(l, 0, row, length[i]);
        EACH_STATE state[i][k] = exists ? start_at(l, o, k, cut[i], row * H + m.unit) : 0.0f;
        example[i] = exists ? (u32)l.examples[row] : 0;
    }
    send_h(0);
    fetch(0);
    for (i64 t = 0; t < l.steps; t++) {
        EACH_ROW EACH_GATE x_part[i][q] = next[i][q];
        fetch(t + 1);
        Masks masks[ROWS_PER_THREAD];
        bool cut_next[ROWS_PER_THREAD];
        EACH_ROW if (t < length[i]) {
            masks[i] = draw_masks(o, noise, (u32)m.unit, example[i], mask_step(l, t, length[i]));
            cut_next[i] = t + 1 < length[i] && cut_at(l, t + 1, row, length[i]);
        }
        product(w, SUMS_OF_STEP(t), m.reader, buffer_offset(m, t), tag_of(t), m.warp, m.lane);
        __syncthreads();
        float stored[ROWS_PER_THREAD][GATES + SLOTS];
        EACH_ROW if (t < length[i]) {
            float v[GATES];
            total_sums<GATES>(v, SUMS_OF_STEP(t) + r * SUM_PITCH + m.u * GATES);
            Unit u = constant;
            EACH_GATE {
                u.gate[q] = widen(x_part[i][q]) + (APART ? 0.0f : v[q]);
                u.r[q] = v[q];
            }
            EACH_STATE u.old[k] = cut[i] ? start_at(l, o, k, true, row * H + m.unit) : state[i][k];
            u.held = held[i];
            set_masks(u, o, masks[i], t == 0 || cut[i]);
            step_forward(u);
            EACH_STATE state[i][k] = u.made[k];
            EACH_GATE stored[i][q] = u.gate[q];
            EACH_SLOT stored[i][GATES + k] = u.slot[k];
            if (HELD >= 0) held[i] = stored[i][HELD < 0 ? 0 : HELD];
            cut[i] = cut_next[i];
        }
        send_h(t + 1);
        EACH_ROW if (t < length[i]) {
            i64 at = row_index(l, t, row, length[i]);
            ((narrow *)l.y)[at * H + m.unit] = narrowed(state[i][0]);
            EACH_STATE if (k) o.states[k][at * H + m.unit] = state[i][k];
            EACH_GATE gates[(at * GATES + q) * H + m.unit] = narrowed(stored[i][q]);
            EACH_SLOT o.slot[k][at * H + m.unit] = stored[i][GATES + k];
        }
    }
}
#endif

/* --- backward ------------------------------------------------------------------------------------- */
#if BACKWARD
struct Fetched { /* inputs of a step, from memory */
    EarlyLoad gates[GATES], dy;
    float held, slot[SLOTS + 1], old[STATES], dseen[STATES];
    bool first;
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward(Loop l, CellArguments o, Exchange x) {
    simplify(l), simplify(o);
    Thread m = thread_of(l, x);
    const i64 H = m.H;
    const narrow *gates = (const narrow *)l.gates, *scale = (const narrow *)l.scale_h;
    Weights w;
#if SCALED
    const Scale s = weight_scale(x.peak);
    load_weights(l, s.by, w, (u32)m.unit0, m.warp, m.lane, m.weights);
#else
    load_weights(l, 1.0f, w, (u32)m.unit0, m.warp, m.lane, m.weights);
#endif
    const i64 unit = m.in ? m.unit : 0;
    const Streams noise = streams_of(o, unit);
    const Unit constant = unit_of(l, o, unit);
    float d[ROWS_PER_THREAD][STATES], dreset[ROWS_PER_THREAD][STATES], owed[ROWS_PER_THREAD],
        dparameter[ROWS_PER_THREAD][PARAMETERS + 1];
    Fetched f[ROWS_PER_THREAD], next[ROWS_PER_THREAD]; /* of this step and of the next one to be processed */
    u32 example[ROWS_PER_THREAD];
    int length[ROWS_PER_THREAD];
    LOAD_LENGTHS(length);

    auto fetch = [&](i64 t) {
        EACH_ROW if (t < length[i]) {
            i64 at = row_index(l, t, row, length[i]), before = row_index(l, t - 1, row, length[i]) * H + m.unit;
            i64 here = at * H + m.unit, start = row * H + m.unit;
            bool cut = cut_at(l, t, row, length[i]), first = t == 0 || cut;
            next[i].first = first;
            EACH_GATE next[i].gates[q] = load_early(gates + (at * GATES + q) * H + m.unit);
            next[i].dy = load_early((const narrow *)l.dy + here);
            EACH_SLOT next[i].slot[k] = o.slot[k][here];
            EACH_STATE {
                if (first)
                    next[i].old[k] = start_at(l, o, k, cut, start);
                else
                    next[i].old[k] = k ? o.states[k][before] : widen(((const narrow *)l.y)[before]);
                next[i].dseen[k] = k && o.dseen[k] ? o.dseen[k][here] : 0.0f;
            }
#if HELD >= 0 && HELD < GATES
            if (o.update.hold && !first)
                next[i].held = widen(gates[(row_index(l, t - 1, row, length[i]) * GATES + HELD) * H + m.unit]);
#elif HELD >= 0
            if (o.update.hold && !first) next[i].held = o.slot[HELD - GATES][before];
#endif
        }
    };
    EACH_ROW {
        bool exists = row < l.batch;
        owed[i] = 0.0f, example[i] = exists ? (u32)l.examples[row] : 0;
        EACH_STATE d[i][k] = exists ? o.dstate[k][row * H + m.unit] : 0.0f, dreset[i][k] = 0.0f;
        EACH_PARAMETER dparameter[i][k] = 0.0f;
    }
    fetch(l.steps - 1);
    i64 t = l.steps - 1;
    for (u32 done = 0; t >= -1; t--, done++) {
        EACH_ROW f[i] = next[i];
        if (t > 0) fetch(t - 1);
        Masks masks[ROWS_PER_THREAD];
        bool cut[ROWS_PER_THREAD]; /* a reset lies between this step and the one after */
        EACH_ROW {
            cut[i] = t + 1 < length[i] && cut_at(l, t + 1, row, length[i]);
            if (t >= 0 && t < length[i])
                masks[i] = draw_masks(o, noise, (u32)m.unit, example[i], mask_step(l, t, length[i]));
        }
        if (done) {
            product(w, SUMS_OF_STEP(done), m.reader, buffer_offset(m, done - 1), tag_of(done - 1), m.warp, m.lane);
            __syncthreads();
            EACH_ROW if (t + 1 < length[i]) {
                float rec;
                total_sums<1>(&rec, SUMS_OF_STEP(done) + r * SUM_PITCH + m.u);
#if SCALED
                rec *= s.leftover;
#endif
                d[i][0] += scale ? rec * widen(scale[row * H + m.unit]) : rec;
                if (cut[i]) EACH_STATE dreset[i][k] += d[i][k], d[i][k] = 0.0f;
            }
        }
        if (t < 0) break;
        narrow dx[ROWS_PER_THREAD][GATES], dr[ROWS_PER_THREAD][GATES];
        float out[ROWS_PER_THREAD][VALUES_PER_UNIT] = {};
        EACH_ROW if (t < length[i]) {
            Unit u = constant;
            EACH_GATE u.gate[q] = widen(f[i].gates[q]);
            EACH_SLOT u.slot[k] = f[i].slot[k];
            EACH_STATE u.old[k] = f[i].old[k], u.dstate[k] = d[i][k] + f[i].dseen[k];
            u.dy = widen(f[i].dy), u.held = f[i].first ? 0.0f : f[i].held, u.owed = owed[i];
            set_masks(u, o, masks[i], f[i].first);
            step_backward(u);
            owed[i] = u.owed;
            EACH_STATE d[i][k] = u.dstate[k];
            EACH_PARAMETER dparameter[i][k] += u.dparameter[k];
            EACH_GATE {
                out[i][q % VALUES_PER_UNIT] = APART ? u.dr[q] : u.dx[q];
                dx[i][q] = narrowed(u.dx[q]);
                if (APART) dr[i][q] = narrowed(u.dr[q]);
            }
        }
#if SCALED
        scale_rows(m, s, done, out);
#endif
#pragma unroll
        for (int i = 0; i < ROWS_PER_THREAD; i++) send(m, done, threadIdx.x / ROUNDED_UNITS + i * ROWS_AT_ONCE, out[i]);
        send_padding(m, done);
        EACH_ROW if (t < length[i]) {
            i64 at = row_index(l, t, row, length[i]);
            EACH_GATE {
                ((narrow *)l.dgx)[(at * GATES + q) * H + m.unit] = dx[i][q];
                if (APART) ((narrow *)l.dsh)[(at * GATES + q) * H + m.unit] = dr[i][q];
            }
        }
    }
    EACH_ROW if (row < l.batch) {
        const i64 at = row * H + m.unit;
        EACH_STATE {
            o.dstate[k][at] = d[i][k];
            if (l.resets) o.dreset[k][at] = dreset[i][k];
        }
        EACH_PARAMETER o.dparameter[k][at] = dparameter[i][k];
    }
}
#endif
