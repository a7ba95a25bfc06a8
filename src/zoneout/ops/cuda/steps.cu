/* One step at a time: what stands between the products. One thread for each unit, one block row for each row. */

struct Scratch {
    float *product;          /* [B, G·H]: h·Wh; projection: [B, P] */
    narrow *h_in;            /* [B, P]: h as it enters the product */
    float *h;                /* [B, P]: the carried h, not rounded */
    float *raw;              /* [B, H]: the candidate c; backwards: of the candidate c */
    narrow *u;               /* projection: [B, H] what is projected; backwards: [N, H] */
    float *shown;            /* projection, backwards: [B, H] of what is projected */
    const float *rec;        /* backwards: [B, P] what came through the product of the step after, or NULL */
    float *owed;             /* [B, H]: what a held output gate owes to the step before */
    narrow *du, *dgh;
    float *dnc, *chat;
    i64 norm, given, project; /* norm: 0 none, 1 over the units, 2 over the examples */
    double eps;
    const float *norm_h, *norm_c, *norm_c_shift;
    float *mean_h, *var_h, *mean_c, *var_c;
};
enum { GATES = 1, SHOWS = 2, CARRY = 4 };

struct Place { /* one unit of one row at one step */
    i64 row, j, length, at, before;
    bool in, cut, first; /* first: no step before is seen */
};

__device__ __forceinline__ Place place(const Loop &l, i64 t, i64 units) {
    Place p;
    p.row = blockIdx.x, p.j = (i64)blockIdx.y * blockDim.x + threadIdx.x;
    p.length = length_of(l, p.row);
    p.in = p.j < units && t < p.length;
    p.at = at_of(l, t, p.row, p.length);
    p.before = at_of(l, t - 1, p.row, p.length);
    p.cut = p.in && cut_at(l, t, p.row, p.length);
    p.first = t == 0 || p.cut;
    return p;
}

__device__ __forceinline__ Keep keeps_at(const Loop &l, const Place &p, i64 t) {
    return keeps_of(l, noises_of(l, p.j), (u32)p.j, (u32)l.examples[p.row], step_of(l, t, p.length));
}

__device__ __forceinline__ float old_h(const Loop &l, const Scratch &s, const Place &p) {
    i64 at = p.row * l.outputs + p.j;
    return p.first ? start_h(l, p.cut, at) : s.h[at];
}

__device__ __forceinline__ float old_c(const Loop &l, const Place &p) {
    return p.first ? start_c(l, p.cut, p.row * l.hidden + p.j) : l.c[p.before * l.hidden + p.j];
}

__device__ __forceinline__ float inverse(float var, double eps) { return 1.0f / sqrtf(var + (float)eps); }

/* --- forwards ------------------------------------------------------------------------------------ */

/* h as it enters the product: with resets and the variational mask. */
extern "C" __global__ void enter(Loop l, Scratch s, int t) {
    Place p = place(l, t, l.outputs);
    if (!p.in) return;
    i64 at = p.row * l.outputs + p.j;
    float h = old_h(l, s, p);
    s.h_in[at] = narrowed(l.scale_h ? h * widen(((const narrow *)l.scale_h)[at]) : h);
}

__device__ __forceinline__ void carry_h(const Loop &l, const Scratch &s, const Place &p, float value, const Keep &k) {
    float h = carried_h(l, value, old_h(l, s, p), k);
    s.h[p.row * l.outputs + p.j] = h;
    ((narrow *)l.y)[p.at * l.outputs + p.j] = narrowed(h);
}

/* Projection: the h that is carried, from what W_hr made. */
extern "C" __global__ void carry(Loop l, Scratch s, int t) {
    Place p = place(l, t, l.outputs);
    if (p.in) carry_h(l, s, p, s.product[p.row * l.outputs + p.j], keeps_at(l, p, t));
}

/* What is added to x's part; with a norm it has been added already. */
__device__ __forceinline__ float bias_of(const Loop &l, const Scratch &s, i64 gate) {
    return s.norm ? 0.0f : widen(((const narrow *)l.b_x)[gate]);
}

__device__ __forceinline__ void lstm(const Loop &l, const Scratch &s, const Place &p, int t, int parts, const Keep &k) {
    i64 H = l.hidden;
    narrow *gates = (narrow *)l.gates + p.at * 4 * H + p.j;
    float a[4], c, old = old_c(l, p);
    for (int q = 0; q < 4; q++) a[q] = widen(gates[q * H]);
    if (parts & GATES) {
        for (int q = 0; q < 4; q++) {
            a[q] += bias_of(l, s, q * H + p.j) + s.product[p.row * 4 * H + q * H + p.j];
            a[q] = q == 2 ? tanh_of(a[q]) : sigmoid(a[q]);
            gates[q * H] = narrowed(a[q]);
        }
        c = lstm_candidate(l, a[0], a[1], a[2], old, k);
    } else {
        c = s.raw[p.row * H + p.j];
    }
    if (!(parts & SHOWS)) {
        s.raw[p.row * H + p.j] = c;
        return;
    }
    float shows = c, gate = a[3];
    if (s.norm) {
        i64 which = s.norm == 1 ? p.at : t * H + p.j;
        shows = (c - s.mean_c[which]) * inverse(s.var_c[which], s.eps) * s.norm_c[p.j] + s.norm_c_shift[p.j];
    }
    if (l.update.mode && l.update.hold && !p.first)
        gate = mix(gate, widen(((narrow *)l.gates)[p.before * 4 * H + 3 * H + p.j]), k.update);
    float u = gate * tanh_of(shows);
    l.c[p.at * H + p.j] = carried_c(l, c, old, k);
    if (parts & CARRY)
        carry_h(l, s, p, u, k);
    else
        s.u[p.row * H + p.j] = narrowed(u);
}

__device__ __forceinline__ void gru(const Loop &l, const Scratch &s, const Place &p, const Keep &k) {
    i64 H = l.hidden;
    narrow *gates = (narrow *)l.gates + p.at * 3 * H + p.j;
    const narrow *bias = (const narrow *)l.b_h;
    float v[3];
    for (int q = 0; q < 3; q++) {
        v[q] = s.product[p.row * 3 * H + q * H + p.j];
        if (bias && !s.norm) v[q] += widen(bias[q * H + p.j]);
    }
    if (!s.norm) l.gh[p.at * H + p.j] = v[2];
    float x[3];
    for (int q = 0; q < 3; q++) x[q] = widen(gates[q * H]) + bias_of(l, s, q * H + p.j);
    float r = sigmoid(x[0] + v[0]), z = sigmoid(x[1] + v[1]);
    float n = tanh_of(x[2] + r * v[2]), update = (1 - z) * n;
    gates[0] = narrowed(r), gates[H] = narrowed(z), gates[2 * H] = narrowed(n);
    if (l.update.mode) update = less(update, k.update);
    carry_h(l, s, p, z * old_h(l, s, p) + update, k);
}

__device__ __forceinline__ void rnn(const Loop &l, const Scratch &s, const Place &p, const Keep &k) {
    narrow *gate = (narrow *)l.gates + p.at * l.hidden + p.j;
    float v = widen(*gate) + bias_of(l, s, p.j) + s.product[p.row * l.hidden + p.j];
    v = RELU ? fmaxf(v, 0.0f) : tanh_of(v);
    *gate = narrowed(v);
    carry_h(l, s, p, v, k);
}

extern "C" __global__ void forward(Loop l, Scratch s, int t, int parts) {
    Place p = place(l, t, l.hidden);
    if (!p.in) return;
    Keep k = keeps_at(l, p, t);
    if (LSTM)
        lstm(l, s, p, t, parts, k);
    else if (GRU)
        gru(l, s, p, k);
    else
        rnn(l, s, p, k);
}

/* --- norms --------------------------------------------------------------------------------------- */

/* The sums of two numbers over a block, for all its threads. */
__device__ float2 sums(float one, float two) {
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

struct Normed { /* one thing that is normalised, `width` numbers wide */
    float *v;          /* [B, width]: of this step */
    float *hat;        /* [N, width]: normalised, or NULL where only the moments are wanted */
    const float *scale;
    const narrow *bias;
    float *mean, *var; /* [N] or [T, width] */
    void *dv;          /* backwards */
    const void *d;     /* [N, width]: of the scaled and shifted */
    i64 width, given, by_row; /* by_row: dv is [B, width], of this step */
    double eps;
};

/* Moments of each row, one block a row; where `hat` is given also the normalised, and scaled and shifted in place. */
extern "C" __global__ void norm_rows(Loop l, Normed n, int t) {
    i64 row = blockIdx.x, length = length_of(l, row), width = n.width;
    if (t >= length) return;
    i64 at = at_of(l, t, row, length);
    float *v = n.v + row * width, sum = 0, square = 0;
    for (i64 j = threadIdx.x; j < width; j += blockDim.x) sum += v[j];
    float m = sums(sum, 0).x / width;
    for (i64 j = threadIdx.x; j < width; j += blockDim.x) square += (v[j] - m) * (v[j] - m);
    float variance = sums(square, 0).x / width, rstd = inverse(variance, n.eps);
    if (threadIdx.x == 0) n.mean[at] = m, n.var[at] = variance;
    if (!n.hat) return;
    for (i64 j = threadIdx.x; j < width; j += blockDim.x) {
        float one = (v[j] - m) * rstd;
        n.hat[at * width + j] = one;
        v[j] = one * n.scale[j] + (n.bias ? widen(n.bias[j]) : 0.0f);
    }
}

/* The sums of two numbers over the second dimension of a block of 32 × 8, for all its threads. */
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
extern "C" __global__ void norm_columns(Loop l, Normed n, int t) {
    i64 j = (i64)blockIdx.x * 32 + threadIdx.x, width = n.width;
    bool in = j < width;
    float m, variance;
    if (n.given) {
        m = in ? n.mean[t * width + j] : 0.0f, variance = in ? n.var[t * width + j] : 1.0f;
    } else {
        float sum = 0, square = 0, alive = 0;
        for (i64 b = threadIdx.y; in && b < l.batch; b += 8)
            if (t < length_of(l, b)) sum += n.v[b * width + j], alive += 1;
        float2 all = column_sums(sum, alive);
        float rows = fmaxf(all.y, 1.0f);
        m = all.x / rows;
        for (i64 b = threadIdx.y; in && b < l.batch; b += 8)
            if (t < length_of(l, b)) square += (n.v[b * width + j] - m) * (n.v[b * width + j] - m);
        variance = column_sums(square, 0).x / rows;
        if (in && threadIdx.y == 0) n.mean[t * width + j] = m, n.var[t * width + j] = variance;
    }
    float rstd = inverse(variance, n.eps);
    for (i64 b = threadIdx.y; n.hat && in && b < l.batch; b += 8) {
        i64 length = length_of(l, b);
        if (t >= length) continue;
        float one = (n.v[b * width + j] - m) * rstd;
        n.hat[at_of(l, t, b, length) * width + j] = one;
        n.v[b * width + j] = one * n.scale[j] + (n.bias ? widen(n.bias[j]) : 0.0f);
    }
}

__device__ __forceinline__ float wide(float v) { return v; }
#if TYPE
__device__ __forceinline__ float wide(narrow v) { return widen(v); }
__device__ __forceinline__ void put(narrow *to, float v) { *to = narrowed(v); }
#endif
__device__ __forceinline__ void put(float *to, float v) { *to = v; }

template <typename T>
__device__ void rows_back(const Loop &l, const Normed &n, int t) {
    i64 row = blockIdx.x, length = length_of(l, row), width = n.width;
    if (t >= length) return;
    i64 at = at_of(l, t, row, length);
    T *dv = (T *)n.dv + (n.by_row ? row : at) * width;
    const T *d = (const T *)n.d + at * width;
    const float *hat = n.hat + at * width;
    float one = 0, two = 0;
    for (i64 j = threadIdx.x; j < width; j += blockDim.x) {
        one += wide(d[j]) * n.scale[j];
        two += wide(d[j]) * n.scale[j] * hat[j];
    }
    float2 all = sums(one, two);
    float rstd = inverse(n.var[at], n.eps), m1 = all.x / width, m2 = all.y / width;
    for (i64 j = threadIdx.x; j < width; j += blockDim.x) put(dv + j, rstd * (wide(d[j]) * n.scale[j] - m1 - hat[j] * m2));
}

template <typename T>
__device__ void columns_back(const Loop &l, const Normed &n, int t) {
    i64 j = (i64)blockIdx.x * 32 + threadIdx.x, width = n.width;
    bool in = j < width;
    float one = 0, two = 0, alive = 0;
    for (i64 b = threadIdx.y; in && !n.given && b < l.batch; b += 8) {
        i64 length = length_of(l, b);
        if (t >= length) continue;
        i64 at = at_of(l, t, b, length) * width + j;
        one += wide(((const T *)n.d)[at]), two += wide(((const T *)n.d)[at]) * n.hat[at], alive += 1;
    }
    float2 all = column_sums(one, two);
    float rows = fmaxf(column_sums(alive, 0).x, 1.0f);
    if (!in) return;
    float rstd = inverse(n.var[t * width + j], n.eps) * n.scale[j], m1 = all.x / rows, m2 = all.y / rows;
    for (i64 b = threadIdx.y; b < l.batch; b += 8) {
        i64 length = length_of(l, b);
        if (t >= length) continue;
        i64 at = at_of(l, t, b, length) * width + j;
        put((T *)n.dv + (n.by_row ? b * width + j : at), rstd * (wide(((const T *)n.d)[at]) - m1 - n.hat[at] * m2));
    }
}

extern "C" __global__ void norm_rows_back(Loop l, Normed n, int t) { rows_back<float>(l, n, t); }
extern "C" __global__ void norm_gates_back(Loop l, Normed n, int t) { rows_back<narrow>(l, n, t); }
extern "C" __global__ void norm_columns_back(Loop l, Normed n, int t) { columns_back<float>(l, n, t); }
extern "C" __global__ void norm_gate_columns_back(Loop l, Normed n, int t) { columns_back<narrow>(l, n, t); }

/* --- backwards ----------------------------------------------------------------------------------- */

/* Of the candidate h; what goes straight to the h before is left in dh. */
__device__ __forceinline__ float take_dh(const Loop &l, const Scratch &s, const Place &p, const Keep &k) {
    i64 at = p.row * l.outputs + p.j;
    float dh = l.dh[at] + widen(((const narrow *)l.dy)[p.at * l.outputs + p.j]) + (s.rec ? s.rec[at] : 0.0f);
    float d = carried_h_back(l, dh, k);
    if (!GRU) l.dh[at] = dh;
    return d;
}

extern "C" __global__ void carry_back(Loop l, Scratch s, int t) {
    Place p = place(l, t, l.outputs);
    if (p.in) s.du[p.at * l.outputs + p.j] = narrowed(take_dh(l, s, p, keeps_at(l, p, t)));
}

__device__ __forceinline__ void lstm_back(const Loop &l, const Scratch &s, const Place &p, int t, int parts, const Keep &k) {
    i64 H = l.hidden, here = p.row * H + p.j;
    const narrow *gates = (const narrow *)l.gates + p.at * 4 * H + p.j;
    narrow *out = (narrow *)l.dgx + p.at * 4 * H + p.j;
    float i = widen(gates[0]), f = widen(gates[H]), g = widen(gates[2 * H]), o = widen(gates[3 * H]);
    float old = old_c(l, p), of_c;
    if (parts & SHOWS) {
        float d = s.project ? s.shown[here] : take_dh(l, s, p, k);
        float c = lstm_candidate(l, i, f, g, old, k), gate = o, owed = s.owed ? s.owed[here] : 0.0f;
        if (s.norm) {
            i64 which = s.norm == 1 ? p.at : t * H + p.j;
            float hat = (c - s.mean_c[which]) * inverse(s.var_c[which], s.eps);
            s.chat[p.at * H + p.j] = hat;
            c = hat * s.norm_c[p.j] + s.norm_c_shift[p.j];
        }
        if (l.update.mode && l.update.hold && !p.first)
            gate = mix(gate, widen(((narrow *)l.gates)[p.before * 4 * H + 3 * H + p.j]), k.update);
        float tc = tanh_of(c);
        of_c = d * gate * (1 - tc * tc);
        if (s.project) s.u[p.at * H + p.j] = narrowed(gate * tc);
        out[3 * H] = narrowed(lstm_output_back(l, d * tc, o, p.first, owed, k));
        if (s.owed) s.owed[here] = owed;
        if (s.norm) s.dnc[p.at * H + p.j] = of_c;
    } else {
        of_c = s.raw[here];
    }
    if (!(parts & GATES)) return;
    float d[3], dc = l.dc[here] + (l.dcells ? l.dcells[p.at * H + p.j] : 0.0f);
    lstm_gates_back(l, d, i, f, g, old, of_c, dc, k);
    for (int q = 0; q < 3; q++) out[q * H] = narrowed(d[q]);
    l.dc[here] = dc;
}

__device__ __forceinline__ void gru_back_at(const Loop &l, const Scratch &s, const Place &p, const Keep &k) {
    i64 H = l.hidden, at = p.row * H + p.j;
    const narrow *gates = (const narrow *)l.gates + p.at * 3 * H + p.j;
    float v, dx[3], ds[3];
    if (s.norm) {
        v = l.gh[p.at * 3 * H + 2 * H + p.j] * s.norm_h[2 * H + p.j];
        if (l.b_h) v += widen(((const narrow *)l.b_h)[2 * H + p.j]);
    } else {
        v = l.gh[p.at * H + p.j];
    }
    float old = p.first ? start_h(l, p.cut, at) : widen(((const narrow *)l.y)[p.before * H + p.j]);
    float dh = l.dh[at] + widen(((const narrow *)l.dy)[p.at * H + p.j]) + (s.rec ? s.rec[at] : 0.0f);
    float d = carried_h_back(l, dh, k);
    gru_back(l, dx, ds, widen(gates[0]), widen(gates[H]), widen(gates[2 * H]), v, old, d, dh, k);
    l.dh[at] = dh;
    for (int q = 0; q < 3; q++) {
        ((narrow *)l.dgx)[p.at * 3 * H + q * H + p.j] = narrowed(dx[q]);
        ((narrow *)l.dsh)[p.at * 3 * H + q * H + p.j] = narrowed(ds[q]);
    }
}

__device__ __forceinline__ void rnn_back(const Loop &l, const Scratch &s, const Place &p, const Keep &k) {
    i64 at = p.at * l.hidden + p.j;
    float v = widen(((const narrow *)l.gates)[at]), d = take_dh(l, s, p, k);
    ((narrow *)l.dgx)[at] = narrowed(RELU ? (v > 0 ? d : 0.0f) : d * (1 - v * v));
}

extern "C" __global__ void backward(Loop l, Scratch s, int t, int parts) {
    Place p = place(l, t, l.hidden);
    if (!p.in) return;
    Keep k = keeps_at(l, p, t);
    if (LSTM)
        lstm_back(l, s, p, t, parts, k);
    else if (GRU)
        gru_back_at(l, s, p, k);
    else
        rnn_back(l, s, p, k);
}

/* What came through the product, with the variational mask; at a reset it goes to the state after it and no further. */
extern "C" __global__ void settle(Loop l, Scratch s, int t) {
    i64 P = l.outputs, H = l.hidden;
    Place p = place(l, t, P > H ? P : H);
    if (!p.in) return;
    if (p.j < P) {
        i64 at = p.row * P + p.j;
        float dh = l.dh[at] + s.rec[at] * (l.scale_h ? widen(((const narrow *)l.scale_h)[at]) : 1.0f);
        if (p.cut) l.dreset_h[at] += dh;
        l.dh[at] = p.cut ? 0.0f : dh;
    }
    if (LSTM && p.cut && p.j < H) {
        i64 at = p.row * H + p.j;
        l.dreset_c[at] += l.dc[at];
        l.dc[at] = 0.0f;
    }
}

/* The rows of one step side by side, where they lie apart; zero for those that have ended. */
extern "C" __global__ void gather(Loop l, const narrow *from, narrow *to, i64 width, int t) {
    i64 row = blockIdx.x, j = (i64)blockIdx.y * blockDim.x + threadIdx.x, length = length_of(l, row);
    if (j < width) to[row * width + j] = t < length ? from[at_of(l, t, row, length) * width + j] : narrowed(0.0f);
}
