/* LSTM, GRU and RNN: all steps in one launch, with the exchange of exchange.cuh. */

/* --- forward pass ------------------------------------------------------------------------------------- */
#if !BACKWARD
extern "C" __global__ void __launch_bounds__(THREADS, 1) forward(Loop l, Exchange x) {
    simplify(l);
    Thread m = thread_of(l, x);
    const i64 H = m.H;
    const narrow *scale = (const narrow *)l.scale_h;
    narrow *gates = (narrow *)l.gates;
    Weights w;
    load_weights(l, 1.0f, w, (u32)m.unit0, m.warp, m.lane, m.weights);
    Noises noise = {};
    float bias[GATES] = {}, bias_x[GATES] = {};
    if (m.in) {
        noise = noises_of(l, m.unit);
        for (int q = 0; q < GATES; q++) {
            bias_x[q] = widen(((const narrow *)l.b_x)[q * H + m.unit]);
            if (l.b_h) bias[q] = widen(((const narrow *)l.b_h)[q * H + m.unit]);
        }
    }
    int length[ROWS_PER_THREAD];
    LOAD_LENGTHS(length);
    float h[ROWS_PER_THREAD], c[ROWS_PER_THREAD], o[ROWS_PER_THREAD];
    u32 example[ROWS_PER_THREAD];
    EarlyLoad x_part[ROWS_PER_THREAD][GATES], next[ROWS_PER_THREAD][GATES]; /* x's part of this step and of the next */
    bool cut[ROWS_PER_THREAD];

#define FETCH(t)                                                                                                   \
    EACH_ROW if ((t) < length[i]) {                                                                               \
        i64 at = row_index(l, t, row, length[i]);                                                                      \
        for (int q = 0; q < GATES; q++) next[i][q] = load_early(gates + (at * GATES + q) * H + m.unit);            \
    }
    EACH_ROW {
        h[i] = c[i] = o[i] = 0.0f, cut[i] = false;
        if (row < l.batch) {
            cut[i] = length[i] > 0 && cut_at(l, 0, row, length[i]);
            h[i] = start_h(l, cut[i], row * H + m.unit);
            if (LSTM) c[i] = start_c(l, cut[i], row * H + m.unit);
        }
        example[i] = row < l.batch ? (u32)l.examples[row] : 0;
    }
#pragma unroll
    for (int i = 0; i < ROWS_PER_THREAD; i++) {
        i64 r = threadIdx.x / ROUNDED_UNITS + i * ROWS_AT_ONCE, row = m.row0 + r;
        bool exists = m.in && r < ROWS && row < l.batch;
        float out = exists ? h[i] : 0.0f;
        if (scale && exists) out *= widen(scale[row * H + m.unit]);
        send(m, 0, (int)r, &out);
    }
    send_padding(m, 0);
    FETCH(0);
    for (i64 t = 0; t < l.steps; t++) {
        EACH_ROW {
            for (int q = 0; q < GATES; q++) x_part[i][q] = next[i][q];
        }
        FETCH(t + 1);
        Keep keep[ROWS_PER_THREAD];
        bool cut_next[ROWS_PER_THREAD];
        EACH_ROW if (t < length[i]) {
            keep[i] = keeps_of(l, noise, (u32)m.unit, example[i], mask_step(l, t, length[i]));
            cut_next[i] = t + 1 < length[i] && cut_at(l, t + 1, row, length[i]);
        }
        product(w, SUMS_OF_STEP(t), m.reader, buffer_offset(m, t), tag_of(t), m.warp, m.lane);
        __syncthreads();
        float a[ROWS_PER_THREAD][GATES], gh[ROWS_PER_THREAD];
        EACH_ROW if (t < length[i]) {
            float v[GATES];
            total_sums<GATES>(v, SUMS_OF_STEP(t) + r * SUM_PITCH + m.u * GATES);
            if (cut[i]) {
                h[i] = start_h(l, true, row * H + m.unit);
                if (LSTM) c[i] = start_c(l, true, row * H + m.unit);
            }
#if LSTM
            for (int q = 0; q < GATES; q++) {
                a[i][q] = widen(x_part[i][q]) + bias_x[q] + v[q];
                a[i][q] = q == 2 ? tanh_approx(a[i][q]) : sigmoid_approx(a[i][q]);
            }
            float raw = lstm_candidate(l, a[i][0], a[i][1], a[i][2], c[i], keep[i]), gate = a[i][3];
            if (l.update.mode && l.update.hold && t && !cut[i]) gate = mix(gate, o[i], keep[i].update);
            c[i] = carried_c(l, raw, c[i], keep[i]);
            o[i] = a[i][3];
            h[i] = carried_h(l, gate * tanh_approx(raw), h[i], keep[i]);
#elif GRU
            for (int q = 0; q < GATES; q++) v[q] += bias[q];
            gh[i] = v[2];
            float reset = sigmoid_approx(widen(x_part[i][0]) + bias_x[0] + v[0]),
                z = sigmoid_approx(widen(x_part[i][1]) + bias_x[1] + v[1]);
            float n = tanh_approx(fmaf(reset, v[2], widen(x_part[i][2]) + bias_x[2])), update = (1 - z) * n;
            a[i][0] = reset, a[i][1] = z, a[i][2] = n;
            if (l.update.mode) update = drop_out(update, keep[i].update);
            h[i] = carried_h(l, fmaf(z, h[i], update), h[i], keep[i]);
#else
            a[i][0] = widen(x_part[i][0]) + bias_x[0] + v[0];
            a[i][0] = RELU ? fmaxf(a[i][0], 0.0f) : tanh_approx(a[i][0]);
            h[i] = carried_h(l, a[i][0], h[i], keep[i]);
#endif
            cut[i] = cut_next[i];
        }
#pragma unroll
        for (int i = 0; i < ROWS_PER_THREAD; i++) {
            i64 r = threadIdx.x / ROUNDED_UNITS + i * ROWS_AT_ONCE, row = m.row0 + r;
            bool exists = m.in && r < ROWS && row < l.batch;
            float out = exists ? h[i] : 0.0f;
            if (l.resets && exists && cut[i]) out = start_h(l, true, row * H + m.unit);
            if (scale && exists) out *= widen(scale[row * H + m.unit]);
            send(m, t + 1, (int)r, &out);
        }
        send_padding(m, t + 1);
        EACH_ROW if (t < length[i]) {
            i64 at = row_index(l, t, row, length[i]);
            ((narrow *)l.y)[at * H + m.unit] = narrowed(h[i]);
            if (LSTM) l.c[at * H + m.unit] = c[i];
            if (GRU) l.gh[at * H + m.unit] = gh[i];
            for (int q = 0; q < GATES; q++) gates[(at * GATES + q) * H + m.unit] = narrowed(a[i][q]);
        }
    }
}
#endif

/* --- backward pass ------------------------------------------------------------------------------------ */
#if BACKWARD
struct Fetched { /* inputs of a step, from memory */
    EarlyLoad gates[GATES], dy, held;
    float old_c, old_h, dcells, gh;
    bool first;
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward(Loop l, Exchange x) {
    simplify(l);
    Thread m = thread_of(l, x);
    const i64 H = m.H;
    const narrow *gates = (const narrow *)l.gates, *scale = (const narrow *)l.scale_h;
    const bool holds = l.update.mode && l.update.hold;
    Weights w;
#if SCALED
    const Scale s = weight_scale(x.peak);
    load_weights(l, s.by, w, (u32)m.unit0, m.warp, m.lane, m.weights);
#else
    load_weights(l, 1.0f, w, (u32)m.unit0, m.warp, m.lane, m.weights);
#endif
    Noises noise = {};
    if (m.in) noise = noises_of(l, m.unit);
    float dh[ROWS_PER_THREAD], dc[ROWS_PER_THREAD], dreset_h[ROWS_PER_THREAD], dreset_c[ROWS_PER_THREAD],
        owed[ROWS_PER_THREAD];
    Fetched f[ROWS_PER_THREAD], next[ROWS_PER_THREAD]; /* of this step and of the next one to be processed */
    u32 example[ROWS_PER_THREAD];
    int length[ROWS_PER_THREAD];
    LOAD_LENGTHS(length);

    auto fetch = [&](i64 t) {
        EACH_ROW if (t < length[i]) {
            i64 at = row_index(l, t, row, length[i]), old = row_index(l, t - 1, row, length[i]);
            bool cut = cut_at(l, t, row, length[i]);
            next[i].first = t == 0 || cut;
            for (int q = 0; q < GATES; q++) next[i].gates[q] = load_early(gates + (at * GATES + q) * H + m.unit);
            next[i].dy = load_early((const narrow *)l.dy + at * H + m.unit);
            if (LSTM) {
                next[i].old_c = next[i].first ? start_c(l, cut, row * H + m.unit) : l.c[old * H + m.unit];
                next[i].dcells = l.dcells ? l.dcells[at * H + m.unit] : 0.0f;
                if (holds && !next[i].first) next[i].held = load_early(gates + (old * GATES + GATES - 1) * H + m.unit);
            }
            if (GRU) {
                next[i].gh = l.gh[at * H + m.unit];
                next[i].old_h = next[i].first ? start_h(l, cut, row * H + m.unit)
                    : widen(((const narrow *)l.y)[old * H + m.unit]);
            }
        }
    };
    EACH_ROW {
        dh[i] = dc[i] = dreset_h[i] = dreset_c[i] = owed[i] = 0.0f;
        example[i] = row < l.batch ? (u32)l.examples[row] : 0;
        if (row < l.batch) {
            dh[i] = l.dh[row * H + m.unit];
            if (LSTM) dc[i] = l.dc[row * H + m.unit];
        }
    }
    fetch(l.steps - 1);
    i64 t = l.steps - 1;
    for (u32 done = 0; t >= -1; t--, done++) {
        EACH_ROW f[i] = next[i];
        if (t > 0) fetch(t - 1);
        Keep keep[ROWS_PER_THREAD];
        bool cut[ROWS_PER_THREAD]; /* a reset lies between this step and the one after */
        EACH_ROW {
            cut[i] = t + 1 < length[i] && cut_at(l, t + 1, row, length[i]);
            if (t >= 0 && t < length[i])
                keep[i] = keeps_of(l, noise, (u32)m.unit, example[i], mask_step(l, t, length[i]));
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
                dh[i] += scale ? rec * widen(scale[row * H + m.unit]) : rec;
                if (cut[i]) dreset_h[i] += dh[i], dreset_c[i] += dc[i], dh[i] = dc[i] = 0.0f;
            }
        }
        if (t < 0) break;
        narrow dx[ROWS_PER_THREAD][GATES], ds[ROWS_PER_THREAD][GATES];
        float out[ROWS_PER_THREAD][VALUES_PER_UNIT] = {};
        EACH_ROW if (t < length[i]) {
            float d[GATES], e[GATES];
            dh[i] += widen(f[i].dy);
            float du = carried_h_back(l, dh[i], keep[i]);
#if LSTM
            float gi = widen(f[i].gates[0]), gf = widen(f[i].gates[1]), gg = widen(f[i].gates[2]),
                go = widen(f[i].gates[3]);
            float tc = tanh_approx(lstm_candidate(l, gi, gf, gg, f[i].old_c, keep[i])), gate = go;
            if (holds && !f[i].first) gate = mix(go, widen(f[i].held), keep[i].update);
            d[3] = lstm_output_back(l, du * tc, go, f[i].first, owed[i], keep[i]);
            dc[i] += f[i].dcells;
            lstm_gates_back(l, d, gi, gf, gg, f[i].old_c, du * gate * (1 - tc * tc), dc[i], keep[i]);
#elif GRU
            gru_back(l, d, e, widen(f[i].gates[0]), widen(f[i].gates[1]), widen(f[i].gates[2]), f[i].gh, f[i].old_h,
                     du, dh[i], keep[i]);
#else
            float v = widen(f[i].gates[0]);
            d[0] = RELU ? (v > 0 ? du : 0.0f) : du * (1 - v * v);
#endif
            for (int q = 0; q < GATES; q++) {
                dx[i][q] = narrowed(d[q]), ds[i][q] = GRU ? narrowed(e[q]) : dx[i][q];
                out[i][q % VALUES_PER_UNIT] = GRU ? e[q] : d[q];
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
            for (int q = 0; q < GATES; q++) {
                ((narrow *)l.dgx)[(at * GATES + q) * H + m.unit] = dx[i][q];
                if (GRU) ((narrow *)l.dsh)[(at * GATES + q) * H + m.unit] = ds[i][q];
            }
        }
    }
    EACH_ROW if (row < l.batch) {
        l.dh[row * H + m.unit] = dh[i];
        if (LSTM) l.dc[row * H + m.unit] = dc[i];
        if (l.resets) {
            l.dreset_h[row * H + m.unit] = dreset_h[i];
            if (LSTM) l.dreset_c[row * H + m.unit] = dreset_c[i];
        }
    }
}
#endif
