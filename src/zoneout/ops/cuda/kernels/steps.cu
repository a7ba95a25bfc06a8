/* One step at a time: the kernels between the products. Macros:
 *
 *   VECTOR        units of a thread: 4 if sizes and addresses allow it, else 1
 *   PLAIN         1: only zoneout, no norm, no projection, rows of full length; only the kernels forward and backward
 *   HALF          1, with PLAIN: operands of the product are in half precision, which has as many mantissa bits as TF32
 *   MOST_THREADS  HALF, backward pass: maximum threads of a block, which processes one row
 *   ONE_RATE      1: all units of a stream have the same rate
 *
 * With HALF, h is converted as it is. Gradients are scaled by a power of two, a different one for each row.
 *
 * A step is a few loads with a long latency and some 500 instructions. All loads come first; noise is drawn during
 * the wait.
 */

struct Scratch {
    const float *product; /* [B, G·H]: h·Wh; NULL: the product was added to x's part in place */
    narrow *h_in;         /* [B, pitch]: h as the product reads it */
    /* the same for the next step, if the product cannot read y, or NULL; HALF: in half precision */
    narrow *h_next;
    float *h;               /* [B, P]: the carried h in float32; NULL: y is exact enough */
    float *candidate_c;     /* [B, H]: the candidate c; backward pass: its gradient */
    narrow *u;              /* projection: its input, [B, H]; backward pass: [N, H] */
    const float *projected; /* projection: its result, [B, P]; backward pass: the gradient of its input, [B, H] */
    /* backward pass: [splits, B, pitch]: gradient from the recurrent product, as sums that are not yet added */
    float *rec;
    float *owed; /* [B, H]: gradient of the held output gate, for the step before */
    narrow *du;
    float *dnc, *chat;
    i64 norm, project;          /* norm: 0 none; 1 over the units; 2 over the examples */
    i64 pitch, splits, settled; /* settled: rec was already added to dh */
    double eps;
    const float *norm_h, *norm_c, *norm_c_shift;
    float *mean_c, *var_c;
    u16 *d_half;            /* HALF, backward pass: [B, G·H]: operands of the product, */
    float *unscale;         /* [B]: the factors that undo their scale, */
    const float *unscale_w; /* and that of W_h */
};
enum { PART_GATES = 1, PART_SHOWN = 2, PART_CARRY = 4 };

/* With PLAIN, set what is absent to constants. */
__device__ __forceinline__ void simplify(Loop &l, Scratch &s, int &work) {
    simplify(l);
#if PLAIN
    s.norm = s.project = s.settled = 0;
    s.owed = nullptr;
    work = PART_GATES | PART_SHOWN | PART_CARRY;
#endif
}

/* --- adjacent units, in addition to units.cuh ------------------------------------------------------ */

#if HALF
__device__ __forceinline__ void put_half(u16 *to, const Units &u) {
#if VECTOR == 4
    u32 low = pair_as<2>(u[0], u[1]), high = pair_as<2>(u[2], u[3]);
    *(uint2 *)to = make_uint2(low, high);
#else
    *to = (u16)pair_as<2>(u[0], 0.0f);
#endif
}
#endif

__device__ __forceinline__ void keep(Keep *k, float Keep::*of, const Stream &s, const Noise &first, i64 j,
                                     const Words &w) {
    EACH_UNIT k[e].*of = keep_of(s, e && s.stride ? noise_of(s, j + e) : first, w.v[e]);
}

struct DrawInputs { /* inputs of a draw */
    RawNoise cell, hidden, update;
    u32 example, step;
};

__device__ __forceinline__ DrawInputs draw_inputs_at(const Loop &l, const Place &p, i64 t) {
    return {raw_noise_of(l.cell, p.j), raw_noise_of(l.hidden_state, p.j), raw_noise_of(l.update, p.j),
            (u32)l.examples[p.row], mask_step(l, t, p.length)};
}

/* As `keeps_of`, for VECTOR units. */
__device__ __forceinline__ void keeps_at(Keep *k, const Loop &l, const Place &p, const DrawInputs &d) {
    Noises n = {noise_of(d.cell), noise_of(d.hidden), noise_of(d.update)};
    u32 example = d.example, step = d.step;
    Words w = {};
    EACH_UNIT k[e] = {0.0f, 0.0f, 0.0f};
    if (l.cell.mode) {
        if (l.cell.mode == DRAWN) w = words_of(l.cell, n.cell.seed, (u32)p.j, example, step);
        keep(k, &Keep::cell, l.cell, n.cell, p.j, w);
    }
    if (l.hidden_state.mode) {
        bool have = l.cell.mode == DRAWN && same_words(l.cell, n.cell, l.hidden_state, n.hidden);
        if (l.hidden_state.mode == DRAWN && !have) w = words_of(l.hidden_state, n.hidden.seed, (u32)p.j, example, step);
        keep(k, &Keep::hidden, l.hidden_state, n.hidden, p.j, w);
    }
    if (l.update.mode) {
        if (l.update.mode == DRAWN) w = words_of(l.update, n.update.seed, (u32)p.j, example, step);
        keep(k, &Keep::update, l.update, n.update, p.j, w);
    }
}

__device__ __forceinline__ Units old_h(const Loop &l, const Scratch &s, const Place &p) {
    i64 at = p.row * l.outputs + p.j;
    if (p.first) return load((const narrow *)(p.cut ? l.reset_h : l.h0) + at);
    return s.h ? load(s.h + at) : load((const narrow *)l.y + p.before * l.outputs + p.j);
}

__device__ __forceinline__ Units old_c(const Loop &l, const Place &p) {
    i64 at = p.row * l.hidden + p.j;
    return load(p.first ? (p.cut ? l.reset_c : l.c0) + at : l.c + p.before * l.hidden + p.j);
}

/* The bias of x's part; a norm has already added it. */
__device__ __forceinline__ Units bias_of(const Loop &l, const Scratch &s, i64 gate) {
    return s.norm ? all_of(0.0f) : load((const narrow *)l.b_x + gate);
}

__device__ __forceinline__ float inverse(float var, double eps) { return 1.0f / sqrtf(var + (float)eps); }

/* A moment of c, over the units or over the examples. */
__device__ __forceinline__ Units moment(const Loop &l, const Scratch &s, const Place &p, i64 t, const float *of) {
    return s.norm == 1 ? all_of(of[p.at]) : load(of + t * l.hidden + p.j);
}

/* --- forward pass ------------------------------------------------------------------------------------ */

/* The h before, if the step uses it: loaded early, long before its use. */
__device__ __forceinline__ Units old_h_if_used(const Loop &l, const Scratch &s, const Place &p) {
    return GRU || (l.hidden_state.mode && !l.hidden_state.zero) ? old_h(l, s, p) : all_of(0.0f);
}

__device__ __forceinline__ void carry_h(const Loop &l, const Scratch &s, const Place &p, const Units &value,
                                        const Units &old, const Keep *k) {
    Units h;
    EACH_UNIT h[e] = carried_h(l, value[e], old[e], k[e]);
    if (s.h) store(s.h + p.row * l.outputs + p.j, h);

#if HALF /* clamp: h0 may be of any size, if it is kept; NaN stays NaN */
    Units clamped;
    EACH_UNIT clamped[e] = h[e] > 65504.0f ? 65504.0f : h[e] < -65504.0f ? -65504.0f : h[e];
    put_half((u16 *)s.h_next + p.row * s.pitch + p.j, clamped);
#else
    if (s.h_next) store(s.h_next + p.row * s.pitch + p.j, h);
#endif
    store((narrow *)l.y + p.at * l.outputs + p.j, h);
}

__device__ __forceinline__ void lstm(const Loop &l, const Scratch &s, const Place &p, int t, int work) {
    i64 H = l.hidden, here = p.row * H + p.j;
    narrow *gates = (narrow *)l.gates + p.at * 4 * H + p.j;
    Units a[4], b[4], c, u;
    DrawInputs draw_inputs = draw_inputs_at(l, p, t);
    Units old = old_c(l, p), held = work & PART_CARRY ? old_h_if_used(l, s, p) : all_of(0.0f);
    if (work & PART_GATES)
        for (int q = 0; q < 4; q++) b[q] = bias_of(l, s, q * H + p.j);
    for (int q = 0; q < 4; q++) a[q] = load(gates + q * H);
    Keep k[VECTOR];
    keeps_at(k, l, p, draw_inputs);
    if (work & PART_GATES) {
        for (int q = 0; q < 4; q++) {
            Units v = s.product ? load(s.product + p.row * 4 * H + q * H + p.j) : all_of(0.0f);
            EACH_UNIT v[e] += a[q][e] + b[q][e];
            EACH_UNIT a[q][e] = q == 2 ? tanh_of(v[e]) : sigmoid(v[e]);
            store(gates + q * H, a[q]);
        }
        EACH_UNIT c[e] = lstm_candidate(l, a[0][e], a[1][e], a[2][e], old[e], k[e]);
    } else {
        c = load(s.candidate_c + here);
    }
    if (!(work & PART_SHOWN)) {
        store(s.candidate_c + here, c);
        return;
    }
    Units shown = c, gate = a[3];
    if (s.norm) {
        Units mean = moment(l, s, p, t, s.mean_c), var = moment(l, s, p, t, s.var_c);
        Units scale = load(s.norm_c + p.j), shift = load(s.norm_c_shift + p.j);
        EACH_UNIT shown[e] = (c[e] - mean[e]) * inverse(var[e], s.eps) * scale[e] + shift[e];
    }
    if (l.update.mode && l.update.hold && !p.first) {
        Units before = load((const narrow *)l.gates + p.before * 4 * H + 3 * H + p.j);
        EACH_UNIT gate[e] = mix(gate[e], before[e], k[e].update);
    }
    EACH_UNIT u[e] = gate[e] * tanh_of(shown[e]);
    EACH_UNIT c[e] = carried_c(l, c[e], old[e], k[e]);
    store(l.c + p.at * H + p.j, c);
    if (work & PART_CARRY)
        carry_h(l, s, p, u, held, k);
    else
        store(s.u + here, u);
}

__device__ __forceinline__ void gru(const Loop &l, const Scratch &s, const Place &p, int t) {
    i64 H = l.hidden;
    narrow *gates = (narrow *)l.gates + p.at * 3 * H + p.j;
    const narrow *bias = (const narrow *)l.b_h;
    Units v[3], x[3], h;
    DrawInputs draw_inputs = draw_inputs_at(l, p, t);
    for (int q = 0; q < 3; q++) {
        Units b = bias_of(l, s, q * H + p.j);
        x[q] = load(gates + q * H);
        v[q] = bias && !s.norm ? load(bias + q * H + p.j) : all_of(0.0f);
        EACH_UNIT x[q][e] += b[e];
    }
    Units old = old_h_if_used(l, s, p), product[3];
    for (int q = 0; q < 3; q++) product[q] = load(s.product + p.row * 3 * H + q * H + p.j);
    Keep k[VECTOR];
    keeps_at(k, l, p, draw_inputs);
    for (int q = 0; q < 3; q++) EACH_UNIT v[q][e] += product[q][e];
    if (!s.norm) store(l.gh + p.at * H + p.j, v[2]);
    EACH_UNIT {
        float r = sigmoid(x[0][e] + v[0][e]), z = sigmoid(x[1][e] + v[1][e]);
        float n = tanh_of(fmaf(r, v[2][e], x[2][e])), update = (1 - z) * n;
        x[0][e] = r, x[1][e] = z, x[2][e] = n;
        if (l.update.mode) update = drop_out(update, k[e].update);
        h[e] = fmaf(z, old[e], update);
    }
    for (int q = 0; q < 3; q++) store(gates + q * H, x[q]);
    carry_h(l, s, p, h, old, k);
}

__device__ __forceinline__ void rnn(const Loop &l, const Scratch &s, const Place &p, int t) {
    narrow *gate = (narrow *)l.gates + p.at * l.hidden + p.j;
    DrawInputs draw_inputs = draw_inputs_at(l, p, t);
    Units old = old_h_if_used(l, s, p), b = bias_of(l, s, p.j);
    Units v = load(gate), product = s.product ? load(s.product + p.row * l.hidden + p.j) : all_of(0.0f);
    Keep k[VECTOR];
    keeps_at(k, l, p, draw_inputs);
    EACH_UNIT v[e] += b[e] + product[e];
    EACH_UNIT v[e] = RELU ? fmaxf(v[e], 0.0f) : tanh_of(v[e]);
    store(gate, v);
    carry_h(l, s, p, v, old, k);
}

extern "C" __global__ void forward(Loop l, Scratch s, int t, int work) {
    simplify(l, s, work);
    Place p = place(l, t, l.hidden);
    if (!p.in) return;
    if (LSTM)
        lstm(l, s, p, t, work);
    else if (GRU)
        gru(l, s, p, t);
    else
        rnn(l, s, p, t);
}

#if !PLAIN
/* Write h as the product reads it: with resets and the variational mask. */
extern "C" __global__ void enter(Loop l, Scratch s, int t, int) {
    Place p = place(l, t, l.outputs);
    if (!p.in) return;
    i64 at = p.row * l.outputs + p.j;
    Units h = old_h(l, s, p), scale = l.scale_h ? load((const narrow *)l.scale_h + at) : all_of(1.0f);
    EACH_UNIT h[e] *= scale[e];
    store(s.h_in + p.row * s.pitch + p.j, h);
}

/* Projection: the carried h, from the result of W_hr. */
extern "C" __global__ void carry(Loop l, Scratch s, int t, int) {
    Place p = place(l, t, l.outputs);
    if (!p.in) return;
    Keep k[VECTOR];
    keeps_at(k, l, p, draw_inputs_at(l, p, t));
    carry_h(l, s, p, load(s.projected + p.row * l.outputs + p.j), old_h_if_used(l, s, p), k);
}
#endif

/* --- backward pass ----------------------------------------------------------------------------------- */

struct CandidateGrad { /* gradients */
    Units d;           /* of the candidate h */
    Units rest;        /* that go directly to the h before */
};

/* The gradient from the product of the step after: loaded first, and added later. */
/* splits that are loaded before noise is drawn: with many threads there are registers for one */
#define EARLY_SPLITS (HALF && MOST_THREADS > 512 ? 1 : 4)
struct RecurrentGrad {
    const float *from;
    i64 split_stride;
    int splits;
    Units first[EARLY_SPLITS];
    float unscale_w, unscale;
};

__device__ __forceinline__ RecurrentGrad recurrent_grad_at(const Loop &l, const Scratch &s, const Place &p,
                                                           int splits) {
    RecurrentGrad v = {s.rec + p.row * s.pitch + p.j, l.batch * s.pitch, splits};
#pragma unroll
    for (int split = 0; split < EARLY_SPLITS; split++)
        v.first[split] = split < splits ? load(v.from + split * v.split_stride) : all_of(0.0f);

#if HALF
    v.unscale_w = *s.unscale_w, v.unscale = s.unscale[p.row];
#endif
    return v;
}

__device__ __forceinline__ Units total(const RecurrentGrad &v) {
    Units sum = v.first[0];
#pragma unroll
    for (int split = 1; split < EARLY_SPLITS; split++) EACH_UNIT sum[e] += v.first[split][e];
#pragma unroll 4
    for (int split = EARLY_SPLITS; split < v.splits; split++) {
        Units one = load(v.from + split * v.split_stride);
        EACH_UNIT sum[e] += one[e];
    }

#if HALF /* W_h's factor first: with the row's factor first, the product could overflow */
    if (v.splits) EACH_UNIT sum[e] = sum[e] * v.unscale_w * v.unscale;
#endif
    return sum;
}

/* All gradients of the carried h: loaded first, and added later. */
struct StateGrad {
    Units dh, dy;
    RecurrentGrad recurrent;
};

__device__ __forceinline__ StateGrad state_grad_at(const Loop &l, const Scratch &s, const Place &p, i64 t) {
    const i64 row = p.row * l.outputs + p.j, at = p.at * l.outputs + p.j;
    return {load(l.dh + row), load((const narrow *)l.dy + at),
            recurrent_grad_at(l, s, p, s.settled || t == l.steps - 1 ? 0 : (int)s.splits)};
}

__device__ __forceinline__ Units total(const StateGrad &w) {
    Units dh = w.dh, recurrent = total(w.recurrent);
    EACH_UNIT dh[e] += w.dy[e] + recurrent[e];
    return dh;
}

__device__ __forceinline__ CandidateGrad split_dh(const Loop &l, const Units &dh, const Keep *k) {
    CandidateGrad in = {dh, dh};
    EACH_UNIT in.d[e] = carried_h_back(l, in.rest[e], k[e]);
    return in;
}

/* `enters`: gradients of the gates, for the product. */
__device__ __forceinline__ void lstm_back(const Loop &l, const Scratch &s, const Place &p, int t, int work,
                                          Units *enters) {
    i64 H = l.hidden, here = p.row * H + p.j;
    const narrow *gates = (const narrow *)l.gates + p.at * 4 * H + p.j;
    narrow *out = (narrow *)l.dgx + p.at * 4 * H + p.j;
    Units i = load(gates), f = load(gates + H), g = load(gates + 2 * H), o = load(gates + 3 * H);
    Units old = old_c(l, p), dc = load(l.dc + here), dcandidate;
    DrawInputs draw_inputs = draw_inputs_at(l, p, t);
    StateGrad state_grad;
    if (!s.project && work & PART_SHOWN) state_grad = state_grad_at(l, s, p, t);
    Keep k[VECTOR];
    keeps_at(k, l, p, draw_inputs);
    if (work & PART_SHOWN) {
        Units c, gate = o, owed = s.owed ? load(s.owed + here) : all_of(0.0f), d, u;
        EACH_UNIT c[e] = lstm_candidate(l, i[e], f[e], g[e], old[e], k[e]);
        if (s.norm) {
            Units mean = moment(l, s, p, t, s.mean_c), var = moment(l, s, p, t, s.var_c);
            Units scale = load(s.norm_c + p.j), shift = load(s.norm_c_shift + p.j);
            EACH_UNIT c[e] = (c[e] - mean[e]) * inverse(var[e], s.eps);
            store(s.chat + p.at * H + p.j, c);
            EACH_UNIT c[e] = c[e] * scale[e] + shift[e];
        }
        if (l.update.mode && l.update.hold && !p.first) {
            Units before = load((const narrow *)l.gates + p.before * 4 * H + 3 * H + p.j);
            EACH_UNIT gate[e] = mix(gate[e], before[e], k[e].update);
        }
        EACH_UNIT c[e] = tanh_of(c[e]);
        if (s.project) {
            d = load(s.projected + here);
            EACH_UNIT u[e] = gate[e] * c[e];
            store(s.u + p.at * H + p.j, u);
        } else {
            CandidateGrad in = split_dh(l, total(state_grad), k);
            d = in.d;
            store(l.dh + here, in.rest);
        }
        EACH_UNIT dcandidate[e] = d[e] * gate[e] * (1 - c[e] * c[e]);
        EACH_UNIT d[e] = lstm_output_back(l, d[e] * c[e], o[e], p.first, owed[e], k[e]);
        store(out + 3 * H, d);
        enters[3] = d;
        if (s.owed) store(s.owed + here, owed);
        if (s.norm) store(s.dnc + p.at * H + p.j, dcandidate);
    } else {
        dcandidate = load(s.candidate_c + here);
    }
    if (!(work & PART_GATES)) return;
    Units di, df, dg;
    if (l.dcells) {
        Units more = load(l.dcells + p.at * H + p.j);
        EACH_UNIT dc[e] += more[e];
    }
    EACH_UNIT {
        float d[3];
        lstm_gates_back(l, d, i[e], f[e], g[e], old[e], dcandidate[e], dc[e], k[e]);
        di[e] = d[0], df[e] = d[1], dg[e] = d[2];
    }
    store(out, di), store(out + H, df), store(out + 2 * H, dg), store(l.dc + here, dc);
    enters[0] = di, enters[1] = df, enters[2] = dg;
}

__device__ __forceinline__ void gru_back_at(const Loop &l, const Scratch &s, const Place &p, int t, Units *enters) {
    i64 H = l.hidden, first = p.at * 3 * H + p.j;
    const narrow *gates = (const narrow *)l.gates + first;
    Units r = load(gates), z = load(gates + H), n = load(gates + 2 * H), v, dx[3], ds[3];
    if (s.norm) {
        Units scale = load(s.norm_h + 2 * H + p.j);
        Units bias = l.b_h ? load((const narrow *)l.b_h + 2 * H + p.j) : all_of(0.0f);
        v = load(l.gh + first + 2 * H);
        EACH_UNIT v[e] = v[e] * scale[e] + bias[e];
    } else {
        v = load(l.gh + p.at * H + p.j);
    }
    Units old = old_h(l, s, p);
    DrawInputs draw_inputs = draw_inputs_at(l, p, t);
    StateGrad state_grad = state_grad_at(l, s, p, t);
    Keep k[VECTOR];
    keeps_at(k, l, p, draw_inputs);
    CandidateGrad in = split_dh(l, total(state_grad), k);
    EACH_UNIT {
        float of_x[3], of_s[3];
        gru_back(l, of_x, of_s, r[e], z[e], n[e], v[e], old[e], in.d[e], in.rest[e], k[e]);
        for (int q = 0; q < 3; q++) dx[q][e] = of_x[q], ds[q][e] = of_s[q];
    }
    store(l.dh + p.row * H + p.j, in.rest);
    for (int q = 0; q < 3; q++) {
        store((narrow *)l.dgx + first + q * H, dx[q]);
        store((narrow *)l.dsh + first + q * H, ds[q]);
        enters[q] = ds[q];
    }
}

__device__ __forceinline__ void rnn_back(const Loop &l, const Scratch &s, const Place &p, int t) {
    i64 at = p.at * l.hidden + p.j;
    Units v = load((const narrow *)l.gates + at);
    DrawInputs draw_inputs = draw_inputs_at(l, p, t);
    StateGrad state_grad = state_grad_at(l, s, p, t);
    Keep k[VECTOR];
    keeps_at(k, l, p, draw_inputs);
    CandidateGrad in = split_dh(l, total(state_grad), k);
    EACH_UNIT v[e] = RELU ? (v[e] > 0 ? in.d[e] : 0.0f) : in.d[e] * (1 - v[e] * v[e]);
    store(l.dh + p.row * l.hidden + p.j, in.rest);
    store((narrow *)l.dgx + at, v);
}

#if !HALF
extern "C" __global__ void backward(Loop l, Scratch s, int t, int work) {
    simplify(l, s, work);
    Place p = place(l, t, l.hidden);
    if (!p.in) return;
    Units enters[4];
    if (LSTM)
        lstm_back(l, s, p, t, work, enters);
    else if (GRU)
        gru_back_at(l, s, p, t, enters);
    else
        rnn_back(l, s, p, t);
}
#elif LSTM || GRU
/* Write the gradients of a row in half precision. They can have any size, so they are scaled by the power of two
 * that brings the largest to between 2^14 and 2^15. Values down to 2^-28 of the largest keep all their bits. A
 * value that is not finite makes the gradient of this row not finite, and of no other row. */
__device__ __forceinline__ void enter_row(const Loop &l, const Scratch &s, const Place &p, const Units *d) {
    __shared__ u32 most[32]; /* the largest value of each warp */
    u32 top = 0;
    for (int q = 0; q < GATES; q++) EACH_UNIT top = max(top, magnitude_bits(d[q][e]));
    top = warp_max(top);
    if (threadIdx.x % 32 == 0) most[threadIdx.x / 32] = top;
    __syncthreads(); /* … and all threads have read s.unscale of the step after: no other block uses that of this row */
    top = warp_max(threadIdx.x % 32 < blockDim.x / 32 ? most[threadIdx.x % 32] : 0);
    const int up = min(scale_exponent(top), 126); /* 2^up and 2^-up are normal floats */
    const float scale = power_of_two(up);
    if (threadIdx.x == 0) s.unscale[p.row] = power_of_two(-up);
    if (!p.in) return;
    for (int q = 0; q < GATES; q++) {
        Units scaled;
        EACH_UNIT scaled[e] = d[q][e] * scale;
        put_half(s.d_half + (p.row * GATES + q) * l.hidden + p.j, scaled);
    }
}

extern "C" __global__ void __launch_bounds__(MOST_THREADS) backward(Loop l, Scratch s, int t, int work) {
    simplify(l, s, work);
    Place p = place_in_row(l, t);
    Units enters[GATES];
    for (int q = 0; q < GATES; q++) enters[q] = all_of(0.0f);
    if (p.in) {
        if (LSTM)
            lstm_back(l, s, p, t, work, enters);
        else
            gru_back_at(l, s, p, t, enters);
    }
    enter_row(l, s, p, enters);
}
#endif

#if !PLAIN
/* Projection: the gradient of its result. */
extern "C" __global__ void carry_back(Loop l, Scratch s, int t, int) {
    Place p = place(l, t, l.outputs);
    if (!p.in) return;
    StateGrad state_grad = state_grad_at(l, s, p, t);
    Keep k[VECTOR];
    keeps_at(k, l, p, draw_inputs_at(l, p, t));
    CandidateGrad in = split_dh(l, total(state_grad), k);
    store(l.dh + p.row * l.outputs + p.j, in.rest);
    store(s.du + p.at * l.outputs + p.j, in.d);
}

/* With batch norm, the gradient from the product sums to zero over the rows of a step: see Loop.balanced. */
extern "C" __global__ void centre(Loop l, Scratch s, int t) {
    __shared__ float sums[8][32], counts[8][32];
    const i64 j = blockIdx.x * 32 + threadIdx.x, split_stride = l.batch * s.pitch;
    float *rec = s.rec + j, sum = 0.0f, count = 0.0f;
    for (i64 row = threadIdx.y; row < l.batch; row += 8)
        if (t < length_of(l, row)) {
            count++;
            for (i64 i = 0; j < l.outputs && i < s.splits; i++) sum += rec[i * split_stride + row * s.pitch];
        }
    sums[threadIdx.y][threadIdx.x] = sum, counts[threadIdx.y][threadIdx.x] = count;
    __syncthreads();
    sum = count = 0.0f;
    for (int i = 0; i < 8; i++) sum += sums[i][threadIdx.x], count += counts[i][threadIdx.x];
    for (i64 row = threadIdx.y; j < l.outputs && row < l.batch; row += 8)
        if (t < length_of(l, row)) rec[row * s.pitch] -= sum / count;
}

/* Add the gradient from the product, with the variational mask. At a reset it goes to the state after the reset,
 * and no further. */
extern "C" __global__ void settle(Loop l, Scratch s, int t, int) {
    i64 P = l.outputs, H = l.hidden;
    Place p = place(l, t, P > H ? P : H);
    if (!p.in) return;
    if (p.j < P) {
        i64 at = p.row * P + p.j;
        Units dh = load(l.dh + at), rec = total(recurrent_grad_at(l, s, p, (int)s.splits));
        Units scale = l.scale_h ? load((const narrow *)l.scale_h + at) : all_of(1.0f);
        EACH_UNIT dh[e] += rec[e] * scale[e];
        if (p.cut) {
            Units sum = load(l.dreset_h + at);
            EACH_UNIT sum[e] += dh[e];
            store(l.dreset_h + at, sum);
        }
        store(l.dh + at, p.cut ? all_of(0.0f) : dh);
    }
    if (LSTM && p.cut && p.j < H) {
        i64 at = p.row * H + p.j;
        Units dc = load(l.dc + at), sum = load(l.dreset_c + at);
        EACH_UNIT sum[e] += dc[e];
        store(l.dreset_c + at, sum);
        store(l.dc + at, all_of(0.0f));
    }
}

/* Copy the rows of one step, if they are not adjacent, to adjacent ones; zeros for rows that have ended. */
extern "C" __global__ void gather(Loop l, const narrow *from, narrow *to, i64 width, int t) {
    i64 row = blockIdx.x, j = (i64)blockIdx.y * blockDim.x + threadIdx.x, length = length_of(l, row);
    if (j < width) to[row * width + j] = t < length ? from[row_index(l, t, row, length) * width + j] : narrowed(0.0f);
}

/* --- norms --------------------------------------------------------------------------------------- */

/* Sum two values over a block, for all its threads. */
__device__ float2 block_sums(float one, float two) {
    __shared__ float2 part[32];
    for (int far = 16; far; far /= 2) {
        one += __shfl_xor_sync(~0u, one, far);
        two += __shfl_xor_sync(~0u, two, far);
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = make_float2(one, two);
    __syncthreads();
    float2 all = make_float2(0.0f, 0.0f);
    for (int w = 0; w < (blockDim.x + 31) / 32; w++) all.x += part[w].x, all.y += part[w].y;
    return all;
}

struct NormStep { /* one normalisation, `width` values per row */
    float *v;     /* [B, width]: of this step */
    float *hat;   /* [N, width]: normalised values; NULL: only the moments are computed */
    const float *scale;
    const narrow *bias;
    float *mean, *var;        /* [N] or [T, width] */
    void *dv;                 /* backward pass: gradient of v */
    const void *d;            /* [N, width]: gradient of the scaled and shifted values */
    i64 width, given, by_row; /* by_row: dv is [B, width], of this step only */
    double eps;
};

/* Compute the moments of each row, one block per row. With `hat` also normalise, and scale and shift in place. */
extern "C" __global__ void norm_rows(Loop l, NormStep n, int t) {
    i64 row = blockIdx.x, length = length_of(l, row), width = n.width;
    if (t >= length) return;
    i64 at = row_index(l, t, row, length);
    float *v = n.v + row * width, sum = 0, square = 0;
    for (i64 j = threadIdx.x; j < width; j += blockDim.x) sum += v[j];
    float m = block_sums(sum, 0).x / width;
    for (i64 j = threadIdx.x; j < width; j += blockDim.x) square += (v[j] - m) * (v[j] - m);
    float variance = block_sums(square, 0).x / width, rstd = inverse(variance, n.eps);
    if (threadIdx.x == 0) n.mean[at] = m, n.var[at] = variance;
    if (!n.hat) return;
    for (i64 j = threadIdx.x; j < width; j += blockDim.x) {
        float one = (v[j] - m) * rstd;
        n.hat[at * width + j] = one;
        v[j] = one * n.scale[j] + (n.bias ? widen(n.bias[j]) : 0.0f);
    }
}

/* Sum two values over the second dimension of a block of 32 × 8, for all its threads. */
__device__ float2 column_sums(float one, float two) {
    __shared__ float2 part[8][33];
    __syncthreads();
    part[threadIdx.y][threadIdx.x] = make_float2(one, two);
    __syncthreads();
    float2 all = make_float2(0.0f, 0.0f);
    for (int w = 0; w < 8; w++) all.x += part[w][threadIdx.x].x, all.y += part[w][threadIdx.x].y;
    return all;
}

/* The same for columns, over the rows that have not ended: a block of 32 × 8 threads has 32 columns. */
extern "C" __global__ void norm_columns(Loop l, NormStep n, int t) {
    i64 j = (i64)blockIdx.x * 32 + threadIdx.x, width = n.width;
    bool in = j < width;
    float m, variance;
    if (n.given) {
        m = in ? n.mean[t * width + j] : 0.0f, variance = in ? n.var[t * width + j] : 1.0f;
    } else {
        float sum = 0, square = 0, alive = 0, off = 0;
        for (i64 b = threadIdx.y; in && b < l.batch; b += 8)
            if (t < length_of(l, b)) sum += n.v[b * width + j], alive += 1;
        float2 all = column_sums(sum, alive);
        float rows = fmaxf(all.y, 1.0f);
        m = all.x / rows;
        for (i64 b = threadIdx.y; in && b < l.batch; b += 8)
            if (t < length_of(l, b)) {
                float d = n.v[b * width + j] - m;
                square += d * d, off += d;
            }
        all = column_sums(square, off);
        /* the rounding error of the mean: if all rows are equal, the mean must be exactly that row */
        off = all.y / rows;
        m += off, variance = fmaxf(all.x / rows - off * off, 0.0f);
        if (in && threadIdx.y == 0) n.mean[t * width + j] = m, n.var[t * width + j] = variance;
    }
    float rstd = inverse(variance, n.eps);
    for (i64 b = threadIdx.y; n.hat && in && b < l.batch; b += 8) {
        i64 length = length_of(l, b);
        if (t >= length) continue;
        float one = (n.v[b * width + j] - m) * rstd;
        n.hat[row_index(l, t, b, length) * width + j] = one;
        n.v[b * width + j] = one * n.scale[j] + (n.bias ? widen(n.bias[j]) : 0.0f);
    }
}

__device__ __forceinline__ float as_float(float v) { return v; }
#if TYPE
__device__ __forceinline__ float as_float(narrow v) { return widen(v); }
__device__ __forceinline__ void store(narrow *to, float v) { *to = narrowed(v); }
#endif
__device__ __forceinline__ void store(float *to, float v) { *to = v; }

template <typename T>
__device__ void rows_back(const Loop &l, const NormStep &n, int t) {
    i64 row = blockIdx.x, length = length_of(l, row), width = n.width;
    if (t >= length) return;
    i64 at = row_index(l, t, row, length);
    T *dv = (T *)n.dv + (n.by_row ? row : at) * width;
    const T *d = (const T *)n.d + at * width;
    const float *hat = n.hat + at * width;
    float one = 0, two = 0;
    for (i64 j = threadIdx.x; j < width; j += blockDim.x) {
        one += as_float(d[j]) * n.scale[j];
        two += as_float(d[j]) * n.scale[j] * hat[j];
    }
    float2 all = block_sums(one, two);
    float rstd = inverse(n.var[at], n.eps), m1 = all.x / width, m2 = all.y / width;
    for (i64 j = threadIdx.x; j < width; j += blockDim.x)
        store(dv + j, rstd * (as_float(d[j]) * n.scale[j] - m1 - hat[j] * m2));
}

template <typename T>
__device__ void columns_back(const Loop &l, const NormStep &n, int t) {
    i64 j = (i64)blockIdx.x * 32 + threadIdx.x, width = n.width;
    bool in = j < width;
    float one = 0, two = 0, alive = 0;
    for (i64 b = threadIdx.y; in && !n.given && b < l.batch; b += 8) {
        i64 length = length_of(l, b);
        if (t >= length) continue;
        i64 at = row_index(l, t, b, length) * width + j;
        one += as_float(((const T *)n.d)[at]), two += as_float(((const T *)n.d)[at]) * n.hat[at], alive += 1;
    }
    float2 all = column_sums(one, two);
    float rows = fmaxf(column_sums(alive, 0).x, 1.0f);
    if (!in) return;
    float rstd = inverse(n.var[t * width + j], n.eps) * n.scale[j], m1 = all.x / rows, m2 = all.y / rows;
    for (i64 b = threadIdx.y; b < l.batch; b += 8) {
        i64 length = length_of(l, b);
        if (t >= length) continue;
        i64 at = row_index(l, t, b, length) * width + j;
        store((T *)n.dv + (n.by_row ? b * width + j : at),
            rstd * (as_float(((const T *)n.d)[at]) - m1 - n.hat[at] * m2));
    }
}

extern "C" __global__ void norm_rows_back(Loop l, NormStep n, int t) { rows_back<float>(l, n, t); }
extern "C" __global__ void norm_gates_back(Loop l, NormStep n, int t) { rows_back<narrow>(l, n, t); }
extern "C" __global__ void norm_columns_back(Loop l, NormStep n, int t) { columns_back<float>(l, n, t); }
extern "C" __global__ void norm_gate_columns_back(Loop l, NormStep n, int t) { columns_back<narrow>(l, n, t); }
#endif
