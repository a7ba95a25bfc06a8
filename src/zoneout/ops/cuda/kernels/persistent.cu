/* LSTM, GRU and RNN: all steps in one launch, with the exchange of exchange.cuh. */

/* --- forwards ------------------------------------------------------------------------------------- */
#if !BACK
extern "C" __global__ void __launch_bounds__(THREADS, 1) forward(Loop l, Exchange x) {
    simplify(l);
    Mine m = mine(l, x);
    const i64 H = m.H;
    const narrow *scale = (const narrow *)l.scale_h;
    narrow *gates = (narrow *)l.gates;
    Weights w;
    load_weights(l, 1.0f, w, (u32)m.unit0, m.warp, m.lane, m.weights);
    Noises noises = {};
    float bias[G] = {}, bias_x[G] = {};
    if (m.in) {
        noises = noises_of(l, m.unit);
        for (int q = 0; q < G; q++) {
            bias_x[q] = widen(((const narrow *)l.b_x)[q * H + m.unit]);
            if (l.b_h) bias[q] = widen(((const narrow *)l.b_h)[q * H + m.unit]);
        }
    }
    int length[ITEMS];
    LENGTHS(length);
    float h[ITEMS], c[ITEMS], o[ITEMS];
    u32 example[ITEMS];
    Late pre[ITEMS][G], later[ITEMS][G]; /* x's part of this step and of the next */
    bool cut[ITEMS];

#define FETCH(t)                                                                                                   \
    EACH_ITEM if ((t) < length[i]) {                                                                               \
        i64 at = at_of(l, t, row, length[i]);                                                                      \
        for (int q = 0; q < G; q++) later[i][q] = late(gates + (at * G + q) * H + m.unit);                         \
    }
    EACH_ITEM {
        h[i] = c[i] = o[i] = 0.0f, cut[i] = false;
        if (row < l.batch) {
            cut[i] = length[i] > 0 && cut_at(l, 0, row, length[i]);
            h[i] = start_h(l, cut[i], row * H + m.unit);
            if (LSTM) c[i] = start_c(l, cut[i], row * H + m.unit);
        }
        example[i] = row < l.batch ? (u32)l.examples[row] : 0;
    }
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        i64 r = threadIdx.x / UP + i * ROWS_AT_ONCE, row = m.row0 + r;
        bool there = m.in && r < R && row < l.batch;
        float out = there ? h[i] : 0.0f;
        if (scale && there) out *= widen(scale[row * H + m.unit]);
        send(m, 0, (int)r, &out);
    }
    send_rest(m, 0);
    FETCH(0);
    for (i64 t = 0; t < l.steps; t++) {
        EACH_ITEM {
            for (int q = 0; q < G; q++) pre[i][q] = later[i][q];
        }
        FETCH(t + 1);
        Keep keep[ITEMS];
        bool cut_next[ITEMS];
        EACH_ITEM if (t < length[i]) {
            keep[i] = keeps_of(l, noises, (u32)m.unit, example[i], step_of(l, t, length[i]));
            cut_next[i] = t + 1 < length[i] && cut_at(l, t + 1, row, length[i]);
        }
        product(w, PART(t), m.reads, buffer_of(m, t), tag_of(t), m.warp, m.lane);
        __syncthreads();
        float a[ITEMS][G], extra[ITEMS];
        EACH_ITEM if (t < length[i]) {
            float v[G];
            total<G>(v, PART(t) + r * NP + m.u * G);
            if (cut[i]) {
                h[i] = start_h(l, true, row * H + m.unit);
                if (LSTM) c[i] = start_c(l, true, row * H + m.unit);
            }
#if LSTM
            for (int q = 0; q < G; q++) {
                a[i][q] = widen(pre[i][q]) + bias_x[q] + v[q];
                a[i][q] = q == 2 ? tanh_at(a[i][q]) : sigmoid_at(a[i][q]);
            }
            float raw = lstm_candidate(l, a[i][0], a[i][1], a[i][2], c[i], keep[i]), gate = a[i][3];
            if (l.update.mode && l.update.hold && t && !cut[i]) gate = mix(gate, o[i], keep[i].update);
            c[i] = carried_c(l, raw, c[i], keep[i]);
            o[i] = a[i][3];
            h[i] = carried_h(l, gate * tanh_at(raw), h[i], keep[i]);
#elif GRU
            for (int q = 0; q < G; q++) v[q] += bias[q];
            extra[i] = v[2];
            float reset = sigmoid_at(widen(pre[i][0]) + bias_x[0] + v[0]), z = sigmoid_at(widen(pre[i][1]) + bias_x[1] + v[1]);
            float n = tanh_at(fmaf(reset, v[2], widen(pre[i][2]) + bias_x[2])), update = (1 - z) * n;
            a[i][0] = reset, a[i][1] = z, a[i][2] = n;
            if (l.update.mode) update = less(update, keep[i].update);
            h[i] = carried_h(l, fmaf(z, h[i], update), h[i], keep[i]);
#else
            a[i][0] = widen(pre[i][0]) + bias_x[0] + v[0];
            a[i][0] = RELU ? fmaxf(a[i][0], 0.0f) : tanh_at(a[i][0]);
            h[i] = carried_h(l, a[i][0], h[i], keep[i]);
#endif
            cut[i] = cut_next[i];
        }
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            i64 r = threadIdx.x / UP + i * ROWS_AT_ONCE, row = m.row0 + r;
            bool there = m.in && r < R && row < l.batch;
            float out = there ? h[i] : 0.0f;
            if (l.resets && there && cut[i]) out = start_h(l, true, row * H + m.unit);
            if (scale && there) out *= widen(scale[row * H + m.unit]);
            send(m, t + 1, (int)r, &out);
        }
        send_rest(m, t + 1);
        EACH_ITEM if (t < length[i]) {
            i64 at = at_of(l, t, row, length[i]);
            ((narrow *)l.y)[at * H + m.unit] = narrowed(h[i]);
            if (LSTM) l.c[at * H + m.unit] = c[i];
            if (GRU) l.gh[at * H + m.unit] = extra[i];
            for (int q = 0; q < G; q++) gates[(at * G + q) * H + m.unit] = narrowed(a[i][q]);
        }
    }
}
#endif

/* --- backwards ------------------------------------------------------------------------------------ */
#if BACK
struct Fetched { /* what a step needs that was there before */
    Late gates[G], dy, held;
    float old_c, old_h, dcells, gh;
    bool first;
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward(Loop l, Exchange x) {
    simplify(l);
    Mine m = mine(l, x);
    const i64 H = m.H;
    const narrow *gates = (const narrow *)l.gates, *scale = (const narrow *)l.scale_h;
    const bool holds = l.update.mode && l.update.hold;
    Weights w;
#if SCALED
    const Scale s = scale_of(x.peak);
    load_weights(l, s.by, w, (u32)m.unit0, m.warp, m.lane, m.weights);
#else
    load_weights(l, 1.0f, w, (u32)m.unit0, m.warp, m.lane, m.weights);
#endif
    Noises noises = {};
    if (m.in) noises = noises_of(l, m.unit);
    float dh[ITEMS], dc[ITEMS], back_h[ITEMS], back_c[ITEMS], owed[ITEMS];
    Fetched f[ITEMS], later[ITEMS]; /* of this step and of the next one back */
    u32 example[ITEMS];
    int length[ITEMS];
    LENGTHS(length);

    auto fetch = [&](i64 t) {
        EACH_ITEM if (t < length[i]) {
            i64 at = at_of(l, t, row, length[i]), old = at_of(l, t - 1, row, length[i]);
            bool cut = cut_at(l, t, row, length[i]);
            later[i].first = t == 0 || cut;
            for (int q = 0; q < G; q++) later[i].gates[q] = late(gates + (at * G + q) * H + m.unit);
            later[i].dy = late((const narrow *)l.dy + at * H + m.unit);
            if (LSTM) {
                later[i].old_c = later[i].first ? start_c(l, cut, row * H + m.unit) : l.c[old * H + m.unit];
                later[i].dcells = l.dcells ? l.dcells[at * H + m.unit] : 0.0f;
                if (holds && !later[i].first) later[i].held = late(gates + (old * G + G - 1) * H + m.unit);
            }
            if (GRU) {
                later[i].gh = l.gh[at * H + m.unit];
                later[i].old_h = later[i].first ? start_h(l, cut, row * H + m.unit) : widen(((const narrow *)l.y)[old * H + m.unit]);
            }
        }
    };
    EACH_ITEM {
        dh[i] = dc[i] = back_h[i] = back_c[i] = owed[i] = 0.0f;
        example[i] = row < l.batch ? (u32)l.examples[row] : 0;
        if (row < l.batch) {
            dh[i] = l.dh[row * H + m.unit];
            if (LSTM) dc[i] = l.dc[row * H + m.unit];
        }
    }
    fetch(l.steps - 1);
    i64 t = l.steps - 1;
    for (u32 done = 0; t >= -1; t--, done++) {
        EACH_ITEM f[i] = later[i];
        if (t > 0) fetch(t - 1);
        Keep keep[ITEMS];
        bool cut[ITEMS]; /* whether the step after was cut off from this one */
        EACH_ITEM {
            cut[i] = t + 1 < length[i] && cut_at(l, t + 1, row, length[i]);
            if (t >= 0 && t < length[i]) keep[i] = keeps_of(l, noises, (u32)m.unit, example[i], step_of(l, t, length[i]));
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
                dh[i] += scale ? rec * widen(scale[row * H + m.unit]) : rec;
                if (cut[i]) back_h[i] += dh[i], back_c[i] += dc[i], dh[i] = dc[i] = 0.0f;
            }
        }
        if (t < 0) break;
        narrow dx[ITEMS][G], ds[ITEMS][G];
        float out[ITEMS][GE] = {};
        EACH_ITEM if (t < length[i]) {
            float d[G], e[G];
            dh[i] += widen(f[i].dy);
            float du = carried_h_back(l, dh[i], keep[i]);
#if LSTM
            float gi = widen(f[i].gates[0]), gf = widen(f[i].gates[1]), gg = widen(f[i].gates[2]), go = widen(f[i].gates[3]);
            float tc = tanh_at(lstm_candidate(l, gi, gf, gg, f[i].old_c, keep[i])), gate = go;
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
            for (int q = 0; q < G; q++) {
                dx[i][q] = narrowed(d[q]), ds[i][q] = GRU ? narrowed(e[q]) : dx[i][q];
                out[i][q % GE] = GRU ? e[q] : d[q];
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
            for (int q = 0; q < G; q++) {
                ((narrow *)l.dgx)[(at * G + q) * H + m.unit] = dx[i][q];
                if (GRU) ((narrow *)l.dsh)[(at * G + q) * H + m.unit] = ds[i][q];
            }
        }
    }
    EACH_ITEM if (row < l.batch) {
        l.dh[row * H + m.unit] = dh[i];
        if (LSTM) l.dc[row * H + m.unit] = dc[i];
        if (l.resets) {
            l.dreset_h[row * H + m.unit] = back_h[i];
            if (LSTM) l.dreset_c[row * H + m.unit] = back_c[i];
        }
    }
}
#endif
